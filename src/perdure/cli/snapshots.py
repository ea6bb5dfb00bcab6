"""The commands about snapshots: take, list, diff, good, restore, release, export, check."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, root, snapshot_group, with_store
from perdure.cli.parameters import (
    as_of_option,
    duration,
    namespace_text,
    namespaces_option,
    public_key_option,
    sign_option,
    threads_option,
    who_option,
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
@click.option("--note", metavar="TEXT", help="Why you take it; `perdure snapshots` shows the note.")
@click.option("--keep", metavar="TIME", type=duration, help="Release it after this time (default: keep it).")
@who_option
@with_store
def take(cli: Invocation, store: Store, name: str | None, note: str | None, keep: timedelta | None, who: str) -> None:
    """Freeze the whole store, all tenants, at this instant.

    Takes milliseconds for a store of any size: afterwards the first change of a row keeps the old row. The default
    names are snapshot-1, snapshot-2, ….
    """
    until = None if keep is None else datetime.now(UTC) + keep
    snapshot = store.snapshot(name, note=note, keep_until=until, who=who)
    cli.result(f"took snapshot {snapshot.name}", _document(snapshot))


@command(root, "Stores", "perdure snapshots\nperdure snapshots --json | jq .name", name="snapshots")
@with_store
def list_snapshots(cli: Invocation, store: Store) -> None:
    """List the snapshots, the newest first, and the space that releasing each would free.

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
@click.option("--paths", is_flag=True, help="Also show the paths that changed in each; reads both states.")
@with_store
def diff(cli: Invocation, store: Store, name: str, later: str | None, paths: bool) -> None:
    """List the threads, runs, items, deployments and schedules that changed since a snapshot, or between two snapshots.

    + means created, - deleted, ~ changed. --json prints a line per change.
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
    """Mark a snapshot as good: a state that you can go back to."""
    snapshot = store.get_snapshot(name)
    snapshot.mark_good(not undo)
    cli.result(f"{name} is {'no longer ' if undo else ''}marked good", _document(snapshot))


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot restore before-deploy --dry-run\n"
    "perdure snapshot restore before-deploy --thread 'support-*' --namespace users/alice\n"
    "perdure snapshot restore --as-of 2026-11-17T10:04 --runs rewind --dry-run",
)
@click.argument("name", required=False)
@as_of_option
@threads_option
@namespaces_option
@click.option("--runs", type=click.Choice(["rewind"]), help="Also rewind the runs that changed since.")
@click.option("--keys", type=click.Choice(["same", "new"]), help="Also go back over effects; see above.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@who_option
@with_store
def restore(
    cli: Invocation, store: Store, /, name: str | None, as_of: datetime | None, dry_run: bool, who: str, **options: Any
) -> None:
    """Go back to a snapshot, in one tenant: all threads, memory, deployments and schedules, or some.

    With --as-of, threads, memory and, with --runs rewind, runs go back to an instant that no snapshot was taken at.
    What is not on record is refused.

    Takes a snapshot first; to undo the restore, restore that one. Threads and items get their old content as a new head
    or version, so their history stays. Threads and items that were created since are deleted.

    Runs stay as they are, unless you give --runs rewind. That is refused if a run had effects since then. To
    rewind it nevertheless, say with which idempotency keys its effects may run again: --keys same or --keys new. A
    thread of LangGraph whose nodes had effects since is refused too, and takes only --keys new. After an interruption,
    run the same command again.
    """
    chosen = {key: value or None for key, value in options.items()}
    done = store.restore(name, at=as_of, dry_run=dry_run, who=who, **chosen)
    undo = None if dry_run or not done.changes else done.undo.name
    if cli.json:
        return cli.document(done, undo=undo, dry_run=dry_run)
    for change in done.changes:
        _print_change(cli, change.action, change)
    if not done.changes:
        return cli.message("nothing has changed since")
    if dry_run:
        return cli.message("dry run: nothing was restored")
    runs = " --runs rewind --keys same" if chosen["runs"] else ""
    return cli.message(f"restored; to undo it: perdure snapshot restore {undo}{runs}")


@command(snapshot_group, "Commands", "perdure snapshot release before-deploy --yes")
@click.argument("name")
@who_option
@yes_option
@with_store
def release(cli: Invocation, store: Store, name: str, who: str, yes: bool) -> None:
    """Remove a snapshot, and the old data that only this snapshot shows.

    The store itself and other snapshots stay as they are.
    """
    snapshot = store.get_snapshot(name)
    cli.confirm(f"Release snapshot {name!r}?", yes=yes)
    held = snapshot.held_bytes()
    snapshot.release(who=who)
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
@click.option("--since", metavar="NAME", help="Only what changed since this older snapshot.")
@sign_option
@with_store
def export(cli: Invocation, store: Store, /, name: str, file: str, **parts: Any) -> None:
    """Copy a snapshot of this tenant, or a part of it, into a file that you can pass on.

    FILE is a new path or a new object (s3://bucket/NAME).
    """
    chosen = {option: value or None for option, value in parts.items()}
    bundle = store.get_snapshot(name).export(file, **chosen)
    cli.result(f"exported {name}: {bundle.place}, {size(bundle.bytes)}, BLAKE3 {bundle.blake3}", readable(bundle))


@command(
    snapshot_group, "Commands", "perdure snapshot check incident.db --key audit.pub", name="check", names_stores=True
)
@click.argument("file")
@public_key_option
@click.pass_obj
def check_(cli: Invocation, file: str, key: str | None) -> None:
    """Check that no byte of a bundle has changed, and who signed it. Needs no store.

    Exits with 4 if it was changed, or if another key signed it.
    """
    from perdure.snapshots import check_bundle

    bundle = check_bundle(file, key)
    signer = "not signed" if bundle.key is None else f"signed by {bundle.key}"
    cli.result(f"unchanged: snapshot {bundle.snapshot} of tenant {bundle.tenant}, {signer}", readable(bundle))


def _print_change(cli: Invocation, mark: str, change: SnapshotChange | RestoreChange, paths: bool = False) -> None:
    changed_paths = change.paths() if paths else []
    if cli.json:
        return cli.json_line(readable(change) | ({"paths": readable(changed_paths)} if paths else {}))
    name = namespace_text((*change.namespace, change.name)) if change.namespace else change.name
    cli.line(f"{mark} {change.what} {name}")
    return cli.lines_below(*changed_paths)


def _document(snapshot: Snapshot) -> dict[str, Any]:
    names = ("name", "taken_at", "note", "good", "keep_until", "manifest")
    return {name: readable(getattr(snapshot, name)) for name in names}
