"""The commands about snapshots: take, list, diff, good, restore, release, export, check."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, root, snapshot_group, with_store
from perdure.cli.parameters import (
    duration,
    namespace_text,
    namespaces_option,
    public_key_option,
    sign_option,
    threads_option,
    yes_option,
)
from perdure.cli.text import local, readable, size

if TYPE_CHECKING:
    from perdure import Store
    from perdure.snapshots import RestoreChange, Snapshot, SnapshotChange


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


@command(root, "Stores", "perdure snapshots\nperdure snapshots --json | jq .name", name="snapshots")
@with_store
def list_snapshots(cli: Invocation, store: Store) -> None:
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
        _print_change(cli, change.sign, change, paths)
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
        _print_change(cli, change.action, change)
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
    "perdure snapshot export before-deploy incident.db\n"
    "perdure snapshot export before-deploy s3://bucket/incident.db --thread 'support-*' --sign audit.pem\n"
    "perdure snapshot export tuesday tuesday.db --since monday",
)
@click.argument("name")
@click.argument("file")
@threads_option
@click.option("--run", "runs", metavar="PATTERN", multiple=True, help="Only these runs (may be repeated).")
@namespaces_option
@click.option("--since", metavar="NAME", help="Of that, only what has changed since this older snapshot.")
@sign_option
@with_store
def export(cli: Invocation, store: Store, /, name: str, file: str, **parts: Any) -> None:
    """Copy a snapshot into a file that can be given away: what this tenant had, or a part of it.

    FILE is a path or an object (s3://bucket/NAME), and is not there yet.
    """
    chosen = {option: given or None for option, given in parts.items()}
    made = store.get_snapshot(name).export(file, **chosen)
    cli.result(f"exported {name}: {made.place}, {size(made.bytes)}, BLAKE3 {made.blake3}", readable(made))


@command(
    snapshot_group, "Commands", "perdure snapshot check incident.db --key audit.pub", name="check", names_stores=True
)
@click.argument("file")
@public_key_option
@click.pass_obj
def check_(cli: Invocation, file: str, key: str | None) -> None:
    """Check a bundle: no byte of it has changed, and who signed it. Opens no store.

    Exit code 4 if it was changed, or another key signed it.
    """
    from perdure.snapshots import check_bundle

    found = check_bundle(file, key)
    signer = "not signed" if found.key is None else f"signed by {found.key}"
    cli.result(f"unchanged: snapshot {found.snapshot} of tenant {found.tenant}, {signer}", readable(found))


def _print_change(cli: Invocation, mark: str, change: SnapshotChange | RestoreChange, paths: bool = False) -> None:
    found = change.paths() if paths else []
    if cli.json:
        return cli.json_line(readable(change) | ({"paths": readable(found)} if paths else {}))
    name = namespace_text((*change.namespace, change.name)) if change.namespace else change.name
    cli.line(f"{mark} {change.what} {name}")
    return cli.lines_below(*found)


def _document(snapshot: Snapshot) -> dict[str, Any]:
    names = ("name", "taken_at", "note", "good", "keep_until", "manifest")
    return {name: readable(getattr(snapshot, name)) for name in names}
