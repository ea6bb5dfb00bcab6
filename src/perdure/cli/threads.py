"""The commands that inspect threads: threads, log, show, diff. Nothing here writes to a store."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import REF_HELP, Invocation, command, root, with_store
from perdure.cli.parameters import as_of_option, limit_option, pair, since
from perdure.cli.refs import all_lines, existing, resolve
from perdure.cli.text import ago, local, plural, readable, shorten, size, to_json
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Change, Checkpoint, Store, ThreadInfo

VALUE_WIDTH = 160


@command(
    root,
    "Threads",
    "perdure threads\nperdure threads --where user=alice --since 2h\nperdure threads --json --limit 0 | jq .name",
)
@click.option(
    "--where",
    metavar="KEY=VALUE",
    type=pair,
    multiple=True,
    help="Only threads with this metadata (may be repeated: all must match).",
)
@click.option(
    "--since", "after", metavar="TIME", type=since, help="Only threads saved since: 30m, 2h, 3d, 1w or an ISO date."
)
@limit_option
@with_store
def threads(
    cli: Invocation, store: Store, where: tuple[tuple[str, Any], ...], after: datetime | None, limit: int
) -> None:
    """List the threads, the most recently saved first.

    Shows the head of each thread, the time of its last save, and its metadata. --json prints a line per thread.
    """
    infos = store.threads(where=dict(where) or None, since=after, limit=limit or None)
    now = datetime.now(UTC)

    def row(info: ThreadInfo) -> list[str]:
        values = {key: value if isinstance(value, str) else to_json(value) for key, value in info.metadata.items()}
        metadata = " ".join(f"{key}={value}" for key, value in values.items())
        return [info.name, info.head or "-", ago(info.updated_at, now), shorten(metadata, VALUE_WIDTH)]

    cli.listing(
        infos,
        ("thread", "head", "updated", "metadata"),
        row,
        empty="no threads match" if where or after else "no threads in this store for this tenant",
    )
    if limit and len(infos) == limit and not cli.json:
        cli.message(f"the newest {limit}; there may be more: --limit 0 lists all")


@command(
    root,
    "Threads",
    "perdure log alice-001\nperdure log alice-001 --branches --limit 0\nperdure log alice-001 --start @12 --limit 5",
)
@click.argument("thread")
@limit_option
@click.option("--start", metavar="REF", help=f"Start at this checkpoint instead of the head: {REF_HELP}.")
@click.option("--branches", is_flag=True, help="List all branches of the thread together, newest first.")
@with_store
def log(cli: Invocation, store: Store, thread: str, limit: int, start: str | None, branches: bool) -> None:
    """List the checkpoints of a thread, newest first.

    Marks the head, the ends of branches, and where branches split. --json prints a line per checkpoint.
    """
    if start is not None and branches:
        raise UsageError("--start and --branches exclude each other")
    handle = existing(store, thread)
    tips = {tip.id for tip in handle.branches()}
    line = all_lines(handle) if branches else handle.history(start=resolve(handle, start) if start else None)
    marked = list(_marked(islice(line, limit or None), tips))
    cli.listing(
        marked,
        ("", "checkpoint", "step", "time", "kind", "size", "note"),
        lambda pair: [pair[1] or "", *_cells(pair[0]), shorten(pair[0].note or "", VALUE_WIDTH)],
        empty=f"thread {thread} has no checkpoint yet",
        right=(2, 5),
        document=lambda pair: checkpoint_json(pair[0]) | {"mark": pair[1]},
    )
    if cli.json:
        return
    if next(line, None) is not None:
        cli.message("there are older checkpoints: --limit 0 shows all")
    others = len(tips) - sum(1 for _, mark in marked if mark in ("head", "branch"))
    if others > 0 and not branches and start is None:
        cli.message(f"{plural(others, 'other branch', 'other branches')} not shown: --branches shows all")


def _marked(line: Iterable[Checkpoint], tips: set[str]) -> Iterator[tuple[Checkpoint, str | None]]:
    """Yield each checkpoint with its mark: head, branch (its end) or split. Children must come before parents."""
    children: Counter[str | None] = Counter()
    for checkpoint in line:
        children[checkpoint.parent] += 1
        if checkpoint.is_head:
            yield checkpoint, "head"
        elif checkpoint.id in tips:
            yield checkpoint, "branch"
        else:
            yield checkpoint, "split" if children[checkpoint.id] > 1 else None


def _cells(checkpoint: Checkpoint) -> list[str]:
    return [
        checkpoint.id,
        str(checkpoint.step),
        local(checkpoint.at),
        checkpoint.kind,
        size(checkpoint.size_bytes),
    ]


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint without its state, for JSON."""
    names = ("id", "thread", "parent", "step", "kind", "note", "metadata", "size_bytes", "is_head", "at")
    return {name: readable(getattr(checkpoint, name)) for name in names}


@command(
    root,
    "Threads",
    "perdure show alice-001 head~3\nperdure show alice-001 @12 --json | jq .state.plan\n"
    "perdure show alice-001 --as-of 2h",
)
@click.argument("thread")
@click.argument("ref", required=False)
@as_of_option
@with_store
def show(cli: Invocation, store: Store, thread: str, ref: str | None, as_of: datetime | None) -> None:
    """Show a checkpoint and its state; by default the newest valid one.

    Needs none of your classes: shows them as {"<type>": …}. Bytes, times and other values that JSON lacks become text.
    Of a LangGraph checkpoint, shows the values, the nodes that run next, interrupts and pending writes; --json prints
    all of it.
    """
    from perdure.cli.graphs import show_lines
    from perdure.views import describe, is_checkpoint

    handle = existing(store, thread) if as_of is None else store.at(as_of).thread(thread)
    # An older checkpoint never stands in for one that the user named.
    checkpoint = handle.load(ref and resolve(handle, ref), raw=True, strict=ref is not None)
    if checkpoint.skipped:
        cli.message(f"damaged and passed over: {', '.join(checkpoint.skipped)}; this is the newest valid checkpoint")
    described = describe(handle, checkpoint) if is_checkpoint(checkpoint.state) else None
    if described is not None and described.problem:
        cli.message(f"pending writes are left out: {described.problem}")
    if cli.json:
        more = {} if described is None else {"langgraph": described}
        return cli.document(checkpoint_json(checkpoint), more, state=checkpoint.state)
    id_, step, *cells = _cells(checkpoint)
    cli.line(id_, f"step {step}", *cells, "head" if checkpoint.is_head else "", checkpoint.note or "")
    if described is None:
        cli.state(readable(checkpoint.state))
    else:
        for line in show_lines(checkpoint.state, described, VALUE_WIDTH):
            cli.line(line)
    return None


@command(root, "Threads", "perdure diff alice-001 head~1\nperdure diff alice-001 @3 @9 --json > changes.json")
@click.argument("thread")
@click.argument("before")
@click.argument("after", required=False)
@with_store
def diff(cli: Invocation, store: Store, thread: str, before: str, after: str | None) -> None:
    """Compare two checkpoints (REF), path by path; AFTER is the head by default.

    + means added, - removed, ~ changed. Long values are cut; --json prints them in full.
    """
    from perdure import compare
    from perdure.views import is_checkpoint, values_of

    handle = existing(store, thread)
    first, second = resolve(handle, before), resolve(handle, after)
    old, new = (handle.load(one, raw=True, strict=True).state for one in (first, second))
    changes = compare(*(values_of(one) if is_checkpoint(one) else one for one in (old, new)))
    if cli.json:
        return cli.document(before=first.id, after=second.id, changes=[_change_json(change) for change in changes])
    for change in changes:
        cli.line(_change_line(change))
    if not changes:
        cli.message(f"{first.id} and {second.id} hold the same values")
    return None


def _change_json(change: Change) -> dict[str, Any]:
    document: dict[str, Any] = {"path": show_path(change.path), "parts": change.path, "kind": change.kind}
    if change.kind != "added":
        document["before"] = change.before
    if change.kind != "removed":
        document["after"] = change.after
    return document


def _change_line(change: Change) -> str:
    where = show_path(change.path)
    match change.kind:
        case "added":
            return f"+ {where} = {_brief(change.after)}"
        case "removed":
            return f"- {where} = {_brief(change.before)}"
        case _:
            return f"~ {where}: {_brief(change.before)} -> {_brief(change.after)}"


def _brief(value: Any) -> str:
    from perdure.cli.graphs import one_line

    return shorten(one_line(value), VALUE_WIDTH)


def show_path(path: tuple[Any, ...]) -> str:
    """Return a path into a state as text: `plan.steps[3].title`. Keys with dots are quoted."""
    shown = ""
    for part in map(readable, path):
        if type(part) is int:
            shown += f"[{part}]"
        else:
            key = str(part)
            plain = re.fullmatch(r'[^.\[\]"\s]+', key)
            shown += ("." if shown else "") + (key if plain else json.dumps(key, ensure_ascii=False))
    return shown or "(the whole state)"
