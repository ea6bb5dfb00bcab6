"""The commands that inspect threads: threads, log, show, diff. Nothing here writes to a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, argument, command, with_store
from perdure.cli.parameters import REF_HELP, Pair, Since, limit_option, thread_argument
from perdure.cli.refs import all_lines, existing, resolve
from perdure.cli.text import ago, fields, local, moment, plural, readable, shorten, size, to_json
from perdure.errors import Damaged, NotFound, UsageError

if TYPE_CHECKING:
    from perdure import Change, Checkpoint, Store, ThreadInfo
    from perdure.cli.output import Cell

VALUE_WIDTH = 160


@command("perdure threads\nperdure threads --where user=alice --since 2h\nperdure threads --json --limit 0 | jq .name")
@click.option(
    "--where",
    metavar="KEY=VALUE",
    type=Pair(),
    multiple=True,
    help="Only threads with this metadata (may be repeated: all must match).",
)
@click.option("--since", metavar="TIME", type=Since(), help="Saved since: 30m, 2h, 3d, 1w or an ISO date.")
@limit_option
@with_store
def threads(
    cli: Invocation, store: Store, where: tuple[tuple[str, Any], ...], since: datetime | None, limit: int
) -> None:
    """List the threads, the most recently saved first.

    Each with its head, how many steps led there, when it was saved last, and its metadata. --json prints a line per
    thread.
    """
    out = cli.out
    found = store.threads(where=dict(where) or None, since=since, limit=limit or None)
    steps = ((info, _head_step(store, info)) for info in found)
    if out.json:
        for info, step in steps:
            out.json_line(fields(info) | {"step": step})
        return
    now = datetime.now(UTC)
    rows = [_thread_row(info, step, now) for info, step in steps]
    if rows:
        out.table(("thread", "head", "step", "updated", "metadata"), rows, right=(2,))
    else:
        out.message("no threads" + (" match" if where or since else " in this store for this tenant"))
    if limit and len(found) == limit:
        out.message(f"the newest {limit}; there may be more: --limit 0 lists all")


def _head_step(store: Store, info: ThreadInfo) -> int | None:
    try:
        head = store.thread(info.name).head()
    except (NotFound, Damaged):  # deleted meanwhile, or not to be trusted
        return None
    return None if head is None else head.step


def _thread_row(info: ThreadInfo, step: int | None, now: datetime) -> list[Cell]:
    metadata = " ".join(
        f"{key}={value if isinstance(value, str) else to_json(value)}" for key, value in info.metadata.items()
    )
    return [
        (info.name, "bold"),
        (info.head or "-", "yellow"),
        ("-" if step is None else str(step), ""),
        (ago(info.updated_at, now), "green"),
        (shorten(metadata, VALUE_WIDTH), "dim"),
    ]


# --- log


@command(
    "perdure log alice-001\nperdure log alice-001 --branches --limit 0\nperdure log alice-001 --start @12 --limit 5"
)
@thread_argument
@limit_option
@click.option("--start", metavar="REF", help=f"Go back from this checkpoint, not from the head: {REF_HELP}.")
@click.option("--branches", is_flag=True, help="All branches of the thread, merged, newest first.")
@with_store
def log(cli: Invocation, store: Store, thread: str, limit: int, start: str | None, branches: bool) -> None:
    """List the checkpoints of a thread, newest first.

    Marks the head, the ends of branches, and where branches split. --json prints a line per checkpoint.
    """
    if start is not None and branches:
        raise UsageError("--start and --branches exclude each other")
    out, handle = cli.out, existing(store, thread)
    tips = {tip.id for tip in handle.branches()}
    at = resolve(handle, start) if start else None
    line = all_lines(handle) if branches else handle.history(start=at)
    marked = _marked(islice(line, limit or None), tips)
    if out.json:
        for checkpoint, mark in marked:
            out.json_line(checkpoint_json(checkpoint) | {"mark": mark})
        return
    rows = [_log_row(checkpoint, mark) for checkpoint, mark in marked]
    out.table(("", "checkpoint", "step", "time", "kind", "size", "note"), rows, right=(2, 5))
    if next(line, None) is not None:
        out.message("there are older checkpoints: --limit 0 shows all")
    others = len(tips) - sum(1 for row in rows if row[0][0] in ("head", "branch"))
    if others > 0 and not branches and start is None:
        out.message(f"{plural(others, 'other branch', 'other branches')} not shown: --branches shows all")


def _marked(line: Iterable[Checkpoint], tips: set[str]) -> Iterator[tuple[Checkpoint, str | None]]:
    """Each checkpoint with what it is: the head, the end of a branch, or where branches split (children come first)."""
    children: Counter[str | None] = Counter()
    for checkpoint in line:
        children[checkpoint.parent] += 1
        if checkpoint.is_head:
            yield checkpoint, "head"
        elif checkpoint.id in tips:
            yield checkpoint, "branch"
        else:
            yield checkpoint, "split" if children[checkpoint.id] > 1 else None


_MARK_STYLES = {"head": "bold green", "branch": "bold magenta", "split": "cyan"}


def _log_row(checkpoint: Checkpoint, mark: str | None) -> list[Cell]:
    return [
        (mark or "", _MARK_STYLES.get(mark or "", "")),
        (checkpoint.id, "yellow"),
        (str(checkpoint.step), ""),
        (local(checkpoint.at), "green"),
        (checkpoint.kind, "dim"),
        (size(checkpoint.size_bytes), ""),
        (shorten(checkpoint.note or "", VALUE_WIDTH), ""),
    ]


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint without its state."""
    names = ("id", "thread", "parent", "step", "kind", "note", "metadata", "size_bytes", "is_head")
    return {name: getattr(checkpoint, name) for name in names} | {"at": moment(checkpoint.at)}


# --- show


@command(
    "perdure show alice-001\nperdure show alice-001 head~3 --path messages[-1].content\n"
    "perdure show alice-001 @12 --json | jq .state"
)
@thread_argument
@argument("ref", "[REF]", f"{REF_HELP} (default: the newest valid checkpoint).", required=False)
@click.option("--path", metavar="PATH", help='A part of the state: plan.steps[3].title, limits."gpt-4.1".')
@click.option("--namespace", metavar="NS", help="LangGraph: a subgraph's checkpoints; head is its newest.")
@click.option("--all", "whole", is_flag=True, help="LangGraph: the whole state as it is stored, nothing cut.")
@with_store
def show(
    cli: Invocation, store: Store, thread: str, ref: str | None, path: str | None, namespace: str | None, whole: bool
) -> None:
    """Show a checkpoint and its state.

    Needs none of your classes: they are shown as {"<type>": …}. Bytes, times and other values that JSON lacks become
    text.
    """
    from perdure.cli import langgraph, paths

    out, handle = cli.out, existing(store, thread)
    if path is not None:
        paths.parse(path)  # a malformed path is refused before anything is read
    newest = None if namespace is None else langgraph.newest_in(handle, namespace)
    if ref is None and newest is None:
        checkpoint = handle.load(raw=True)
    else:  # a checkpoint that is asked for by name is never replaced by an older one
        checkpoint = handle.load(resolve(handle, ref, newest), raw=True, strict=True)
    if checkpoint.skipped:
        out.message(f"damaged and passed over: {', '.join(checkpoint.skipped)}; this is the newest valid checkpoint")
    state = readable(checkpoint.state)
    value = state if path is None else paths.pick(state, path)
    found = None
    if path is None and langgraph.is_checkpoint(checkpoint.state):
        found = langgraph.describe(handle, checkpoint, out)
    if out.json:
        part = {"state": value} if path is None else {"path": path, "value": value}
        out.document(checkpoint_json(checkpoint) | part | ({} if found is None else {"langgraph": found}))
        return
    out.line(*_checkpoint_cells(checkpoint))
    if found is None or whole:
        out.state(value)
    else:
        for cell in langgraph.value_lines(checkpoint.state, VALUE_WIDTH):
            out.line(cell)
        out.line()
    if found is not None:
        for cell in langgraph.status_lines(found, VALUE_WIDTH):
            out.line(cell)


def _checkpoint_cells(checkpoint: Checkpoint) -> list[Cell]:
    return [
        (checkpoint.id, "yellow"),
        (f"step {checkpoint.step}", ""),
        (local(checkpoint.at), "green"),
        (checkpoint.kind, "dim"),
        (size(checkpoint.size_bytes), ""),
        ("head" if checkpoint.is_head else "", _MARK_STYLES["head"]),
        (checkpoint.note or "", "bold"),
    ]


# --- diff


@command(
    "perdure diff alice-001 head~1\nperdure diff alice-001 @3 @9\n"
    "perdure diff alice-001 @3 --exit-code --json > changes.json"
)
@thread_argument
@argument("before", "A", f"From this checkpoint: {REF_HELP}.")
@argument("after", "[B]", "To this one (default: head).", required=False)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@click.option("--all", "whole", is_flag=True, help="Also fields of messages, and LangGraph's bookkeeping.")
@with_store
def diff(
    cli: Invocation, store: Store, thread: str, before: str, after: str | None, exit_code: bool, whole: bool
) -> int:
    """Compare two checkpoints, path by path.

    + was added, - was removed, ~ was changed. Long values are cut; --json has them in full.
    """
    from perdure.cli import langgraph, messages
    from perdure.threads.compare import compare

    out, handle = cli.out, existing(store, thread)
    first, second = resolve(handle, before), resolve(handle, after)
    old, new = (handle.load(one, raw=True, strict=True).state for one in (first, second))
    both_graphs = langgraph.is_checkpoint(old) and langgraph.is_checkpoint(new)
    changes = compare(old, new) if whole else messages.compare_states(_values(old), _values(new))
    if out.json:
        changed = [_change_json(change) for change in changes]
        out.document({"before": first.id, "after": second.id, "changes": changed})
    else:
        for change in changes:
            out.line(_change_cell(change))
        if not changes and not whole and both_graphs:
            out.message(f"{first.id} and {second.id} hold the same values; --all shows LangGraph's bookkeeping")
        elif not changes:
            out.message(f"{first.id} and {second.id} hold the same state")
    return NO if changes and exit_code else OK


def _values(state: Any) -> Any:
    """A state without LangGraph's bookkeeping."""
    from perdure.cli import langgraph

    return langgraph.values_of(state, with_input=False) if langgraph.is_checkpoint(state) else state


def _change_json(change: Change) -> dict[str, Any]:
    from perdure.cli import paths

    made: dict[str, Any] = {
        "path": paths.show(change.path),
        "parts": [seen if type(seen := readable(part)) in (str, int) else str(seen) for part in change.path],
        "kind": change.kind,
    }
    if change.kind != "added":
        made["before"] = readable(change.before)
    if change.kind != "removed":
        made["after"] = readable(change.after)
    return made


_CHANGE_STYLES = {"added": "green", "removed": "red", "changed": "yellow"}


def _change_cell(change: Change) -> Cell:
    from perdure.cli import messages, paths

    where, style = paths.show(change.path), _CHANGE_STYLES[change.kind]
    held = [change.before] * (change.kind != "added") + [change.after] * (change.kind != "removed")
    if all(isinstance(value, messages.Message) for value in held):
        return messages.change_line(change, where, VALUE_WIDTH), style
    before, after = _brief(change.before), _brief(change.after)
    match change.kind:
        case "added":
            return f"+ {where} = {after}", style
        case "removed":
            return f"- {where} = {before}", style
        case _:
            return f"~ {where}: {before} -> {after}", style


def _brief(value: Any) -> str:
    return shorten(to_json(readable(value)), VALUE_WIDTH)
