"""The commands about snapshots: take, list, diff, good, restore, release, incident."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, snapshot_group, with_store
from perdure.cli.parameters import duration, namespace_text, namespaces_option, threads_option, yes_option
from perdure.cli.text import local, readable, size
from perdure.errors import UsageError
from perdure.values.safe_repr import shown

if TYPE_CHECKING:
    from perdure import Store
    from perdure.snapshots import Frame, Snapshot, SnapshotChange

_WIDTH = 1000


@command(
    snapshot_group,
    "Commands",
    'perdure snapshot take before-deploy --note "v42"\nperdure snapshot take nightly-0117 --keep 14d',
)
@click.argument("name", required=False)
@click.option("--note", metavar="TEXT", help="Why; shown in the list.")
@click.option("--keep", metavar="TIME", type=duration, help="Release it after so long (default: it stays).")
@with_store
def take(cli: Invocation, store: Store, name: str | None, note: str | None, keep: timedelta | None) -> None:
    """Freeze the whole store, all tenants, at this instant.

    Takes milliseconds, however much is stored: from then on the first change of a row keeps the old one.
    Without a name it is snapshot-1, snapshot-2, ….
    """
    until = None if keep is None else datetime.now(UTC) + keep
    made = store.snapshot(name, note=note, keep_until=until)
    cli.result(f"took snapshot {made.name}", _document(made))


@command(snapshot_group, "Commands", "perdure snapshot list", name="list")
@with_store
def list_(cli: Invocation, store: Store) -> None:
    """List the snapshots that are kept, the newest first, and what releasing each would free.

    --json prints a line per snapshot.
    """
    cli.listing(
        store.snapshots(),
        ("name", "taken", "good", "keep until", "held", "note"),
        lambda one: [
            one.name,
            local(one.taken_at),
            "good" if one.good else "",
            local(one.keep_until) if one.keep_until else "",
            size(one.held_bytes()),
            one.note or "",
        ],
        empty="there are no snapshots; `perdure snapshot take NAME` takes one",
        right=(4,),
        document=lambda one: _document(one) | {"held_bytes": one.held_bytes()},
    )


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot diff before-deploy\nperdure snapshot diff monday tuesday --paths",
)
@click.argument("name")
@click.argument("later", required=False)
@click.option("--paths", is_flag=True, help="Also where in each of them: reads both states.")
@with_store
def diff(cli: Invocation, store: Store, name: str, later: str | None, paths: bool) -> None:
    """List the threads, runs, items and deployments that changed since a snapshot, or up to a later one.

    + was made since, - was deleted, ~ was changed. --json prints a line for each.
    """
    until = None if later is None else store.get_snapshot(later)
    changes = store.get_snapshot(name).diff(until)
    for change in changes:
        _print_change(cli, change, paths)
    if not changes:
        cli.message("nothing has changed")


@command(snapshot_group, "Commands", "perdure snapshot good before-deploy\nperdure snapshot good before-deploy --not")
@click.argument("name")
@click.option("--not", "undo", is_flag=True, help="Remove the mark.")
@with_store
def good(cli: Invocation, store: Store, name: str, undo: bool) -> None:
    """Mark a snapshot as good: a state to go back to."""
    found = store.get_snapshot(name)
    found.mark_good(not undo)
    cli.result(f"{name} is {'no longer ' if undo else ''}marked good", _document(found))


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot restore before-deploy --dry-run\n"
    "perdure snapshot restore before-deploy --thread 'support-*' --namespace users/alice\n"
    "perdure snapshot restore before-deploy --runs rewind",
)
@click.argument("name")
@threads_option
@namespaces_option
@click.option("--runs", type=click.Choice(["rewind"]), help="Also rewind the runs that changed since.")
@click.option("--keys", type=click.Choice(["same", "new"]), help="Also what had effects since; see above.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@with_store
def restore(cli: Invocation, store: Store, /, name: str, dry_run: bool, **wanted: Any) -> None:
    """Go back to a snapshot, in one tenant: all threads, memory and deployments, or some.

    A snapshot is taken first: restoring that one undoes it. Threads and items get their old content as a new head or
    version, so that history stays; what was made since is deleted. Runs are left alone without --runs rewind, which is
    refused if one had effects since: with --keys same they may run again, under the same idempotency keys, with --keys
    new under new ones. Threads of LangGraph are refused so too, and know --keys new alone. After an interruption, run
    the same command again.
    """
    given = {key: value or None for key, value in wanted.items()}
    done = store.restore(name, dry_run=dry_run, **given)
    undo = None if dry_run or not done.changes else done.undo.name
    if cli.json:
        return cli.document(done, undo=undo, dry_run=dry_run)
    for change in done.changes:
        _print_change(cli, change)
    if not done.changes:
        return cli.message("nothing has changed since")
    if dry_run:
        return cli.message("dry run: nothing was restored")
    runs = " --runs rewind --keys same" if given["runs"] else ""
    return cli.message(f"restored; to undo it: perdure snapshot restore {undo}{runs}")


@command(snapshot_group, "Commands", "perdure snapshot release before-deploy --yes")
@click.argument("name")
@yes_option
@with_store
def release(cli: Invocation, store: Store, name: str, yes: bool) -> None:
    """Remove a snapshot, and what only it can see.

    The store itself, and other snapshots, are not touched.
    """
    found = store.get_snapshot(name)
    cli.confirm(f"Release snapshot {name!r}?", yes=yes)
    held = found.held_bytes()
    found.release()
    cli.result(f"released {name}: {size(held)} freed", name=name, freed_bytes=held)


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot incident friday trip-42\nperdure snapshot incident friday trip-42 --blame cart.total",
)
@click.argument("name")
@click.argument("run")
@click.option("--blame", metavar="PATH", help="Only the steps that changed this path of the state: cart.0.price.")
@click.option(
    "--good", metavar="RUN", help="With --blame: only those after which it is not as in a run that went well."
)
@click.option("--states", is_flag=True, help="Also the whole state after each step.")
@with_store
def incident(
    cli: Invocation, store: Store, name: str, run: str, blame: str | None, good: str | None, states: bool
) -> None:
    """Step through what led to the failure of a run, as a snapshot has it.

    For each step: its result, the arguments of an effect, what changed in the state since the step before, what the
    prompt was made of if that was recorded, and where its failure was raised. --json prints the run, then a line per
    step, with states.
    """
    from perdure.snapshots import incident as incident_of

    if good is not None and blame is None:
        raise UsageError("--good is for --blame PATH: name the path of the state that is wrong")
    snapshot = store.get_snapshot(name)
    found = incident_of(snapshot, run)
    if cli.json:
        cli.json_line(readable(found))
    else:
        cli.line(f"{run}: {found.run.status}{': ' + found.error if found.error else ''}")
    if blame is None and not cli.json:
        parts = (found.environment or {}).items()
        environment = {name: len(value) if name == "packages" else value for name, value in parts}
        _print_below(cli, *(found.traceback or "").splitlines(), *_named(environment))
    frames = found if blame is None else found.blame(blame, incident_of(snapshot, good) if good else None)
    for frame in frames:
        _print_frame(cli, frame, states)
    if not frames and blame is not None:
        changed = "changed" if good is None else "made a difference at"
        cli.message(f"no step {changed} {blame}; --states shows the state")


def _print_frame(cli: Invocation, frame: Frame, states: bool) -> None:
    if cli.json:
        return cli.json_line(readable(frame))
    step = frame.step
    path = "" if step.path == str(step.number) else f" ({step.path})"
    cli.line(f"{step.number}{path}  {step.kind}  {step.name}  {step.status}: {step.error or shown(step.result, 100)}")
    parts = {"arguments": frame.arguments, "context": frame.context, "state": frame.state if states else None}
    return _print_below(cli, *frame.changes, *_named(parts), *(frame.traceback or "").splitlines())


def _print_change(cli: Invocation, change: SnapshotChange, paths: bool = False) -> None:
    found = change.paths() if paths else []
    if cli.json:
        return cli.json_line(readable(change) | ({"paths": readable(found)} if paths else {}))
    name = namespace_text((*change.namespace, change.name)) if change.namespace else change.name
    cli.line(f"{change.sign} {change.what} {name}")
    return _print_below(cli, *found)


def _print_below(cli: Invocation, *lines: object) -> None:
    for line in lines:
        cli.line(f"    {line}")


def _named(parts: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {shown(value, _WIDTH)}" for name, value in parts.items() if value is not None]


def _document(snapshot: Snapshot) -> dict[str, Any]:
    names = ("name", "taken_at", "note", "good", "keep_until", "manifest")
    return {name: readable(getattr(snapshot, name)) for name in names}
