"""The commands that only look: threads, log, show, diff, verify, stats.

Each takes the parsed arguments, the store and the output, and gives the exit code. Nothing here writes to a store.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import unquote

from perdure import Change, Checkpoint, Problem, Stats, Store, Thread, ThreadInfo
from perdure.cli import langgraph, messages, paths
from perdure.cli.readable import ago, local, moment, plural, readable, shorten, size, to_json
from perdure.cli.refs import all_lines, existing, resolve
from perdure.cli.render import Cell, Output
from perdure.errors import Damaged, NotFound
from perdure.log.envelopes import ENVELOPE
from perdure.storage.urls import is_postgres
from perdure.threads.compare import compare
from perdure.threads.labelled import read_beside, read_spaces

OK, NO = 0, 1
VALUE_WIDTH = 160


# --- threads


def threads(args: Namespace, store: Store, out: Output) -> int:
    limit = args.limit or None
    found = store.threads(where=dict(args.where) or None, since=args.since, limit=limit)
    steps = ((info, _head_step(store, info)) for info in found)
    if out.json:
        for info, step in steps:
            out.json_line(_thread_json(info, step))
        return OK
    now = datetime.now(UTC)
    rows = [_thread_row(info, step, now) for info, step in steps]
    if rows:
        out.table(("thread", "head", "step", "updated", "metadata"), rows, right=(2,))
    else:
        out.message("no threads" + (" fit" if args.where or args.since else " in this store for this tenant"))
    if limit is not None and len(found) == limit:
        out.message(f"the newest {limit}; there may be more: --limit 0 lists all")
    return OK


def _head_step(store: Store, info: ThreadInfo) -> int | None:
    try:
        head = store.thread(info.name).head()
    except (NotFound, Damaged):  # deleted while we look, or not to be trusted
        return None
    return None if head is None else head.step


def _thread_json(info: ThreadInfo, step: int | None) -> dict[str, Any]:
    return {
        "name": info.name,
        "head": info.head,
        "step": step,
        "created_at": moment(info.created_at),
        "updated_at": moment(info.updated_at),
        "forked_at": info.forked_at,
        "metadata": info.metadata,
    }


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


def log(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    tips = {tip.id for tip in thread.branches()}
    limit = args.limit or None
    line = _line(thread, args)
    marked = _marked(islice(line, limit), tips)
    if out.json:
        for checkpoint, mark in marked:
            out.json_line(checkpoint_json(checkpoint) | {"mark": mark})
        return OK
    rows = [_log_row(checkpoint, mark) for checkpoint, mark in marked]
    out.table(("", "checkpoint", "step", "time", "kind", "size", "note"), rows, right=(2, 5))
    if next(line, None) is not None:
        out.message("there are older checkpoints: --limit 0 shows all")
    others = len(tips) - sum(1 for row in rows if row[0][0] in ("head", "branch"))
    if others > 0 and not args.branches and args.start is None:
        out.message(f"{plural(others, 'other line')} not shown: --branches shows all lines")
    return OK


def _line(thread: Thread, args: Namespace) -> Iterator[Checkpoint]:
    if args.branches:
        return all_lines(thread)
    return thread.history(start=resolve(thread, args.start) if args.start else None)


def _marked(line: Iterable[Checkpoint], tips: set[str]) -> Iterator[tuple[Checkpoint, str | None]]:
    """Each checkpoint with what it is: the head, the end of a branch, or where lines split (children come first)."""
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
    return {
        "id": checkpoint.id,
        "thread": checkpoint.thread,
        "parent": checkpoint.parent,
        "step": checkpoint.step,
        "at": moment(checkpoint.at),
        "kind": checkpoint.kind,
        "note": checkpoint.note,
        "metadata": checkpoint.metadata,
        "size_bytes": checkpoint.size_bytes,
        "is_head": checkpoint.is_head,
    }


# --- show


def show(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    if args.path is not None:
        paths.parse(args.path)  # a path that makes no sense is said before anything is read
    newest = None if args.namespace is None else _newest_in(thread, args.namespace)
    if args.ref is None and newest is None:
        checkpoint = thread.load(raw=True)
    else:  # who asks for one checkpoint gets that one, or an error; never an older one in its place
        checkpoint = thread.load(resolve(thread, args.ref, newest), raw=True, strict=True)
    if checkpoint.skipped:
        out.message(f"damaged and passed over: {', '.join(checkpoint.skipped)}; this is the newest valid checkpoint")
    state = readable(checkpoint.state)
    value = state if args.path is None else paths.pick(state, args.path)
    described = None
    if args.path is None and langgraph.is_checkpoint(checkpoint.state):
        described = _describe(thread, checkpoint, out)
    if out.json:
        part = {"state": value} if args.path is None else {"path": args.path, "value": value}
        found = {} if described is None else {"langgraph": described[0]}
        out.document(checkpoint_json(checkpoint) | part | found)
        return OK
    out.line(*_checkpoint_cells(checkpoint))
    if described is None or args.all:
        out.state(value)
    else:
        for cell in langgraph.value_lines(checkpoint.state, VALUE_WIDTH):
            out.line(cell)
        out.line()
    if described is not None:
        for cell in langgraph.status_lines(*described, VALUE_WIDTH):
            out.line(cell)
    return OK


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


def _newest_in(thread: Thread, name: str) -> Checkpoint:
    """The newest checkpoint of a namespace, which may be named by a unique beginning. Raises NotFound."""
    spaces = read_spaces(thread)
    fitting = [space for space in spaces if space.name == name]
    fitting = fitting or [space for space in spaces if space.name.startswith(name)]
    if len(fitting) == 1:
        return next(thread.history(start=fitting[0].newest, limit=1))
    some = ", ".join(space.name or '""' for space in (fitting or spaces)[:3])
    if not fitting:
        raise NotFound(f"thread {thread.name!r} has no namespace {name!r}; it has {some}")
    raise NotFound(f"{name!r} begins {len(fitting)} namespaces: {some}; write more of it")


def _describe(thread: Thread, checkpoint: Checkpoint, out: Output) -> tuple[dict[str, Any], list[langgraph.Task]]:
    """What LangGraph keeps beside the values of a checkpoint."""
    state = checkpoint.state
    beside = read_beside(thread, checkpoint, str(state[ENVELOPE].get("id")))
    try:
        tasks = langgraph.tasks_of(state, beside.pending())
    except Damaged as error:
        out.message(f"pending writes are left out: {error}")
        tasks = langgraph.tasks_of(state, [])
    return langgraph.describe(state, beside, tasks), tasks


# --- diff


def diff(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    before, after = resolve(thread, args.before), resolve(thread, args.after)
    old, new = (thread.load(one, raw=True, strict=True).state for one in (before, after))
    changes = compare(old, new) if args.all else messages.compare_states(_values(old), _values(new))
    if out.json:
        out.document(
            {
                "before": before.id,
                "after": after.id,
                "changes": [_change_json(change) for change in changes],
            }
        )
    else:
        for change in changes:
            out.line(_change_cell(change))
        if not changes and not args.all and langgraph.is_checkpoint(old) and langgraph.is_checkpoint(new):
            out.message(f"{before.id} and {after.id} hold the same values; --all shows LangGraph's bookkeeping")
        elif not changes:
            out.message(f"{before.id} and {after.id} hold the same state")
    return NO if changes and args.exit_code else OK


def _values(state: Any) -> Any:
    """A state without LangGraph's bookkeeping."""
    return langgraph.values_of(state, with_input=False) if langgraph.is_checkpoint(state) else state


def _change_json(change: Change) -> dict[str, Any]:
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


# --- verify


def verify(args: Namespace, store: Store, out: Output) -> int:
    verified = store.ops.verify if args.thread is None else existing(store, args.thread).verify
    with out.progress("verifying") as progress:
        report = verified(progress=progress)
    if out.json:
        out.document(
            {
                "ok": report.ok,
                "threads": report.threads,
                "checkpoints": report.checkpoints,
                **({"runs": report.runs} if args.thread is None else {}),
                "problems": [_problem_json(found) for found in report.problems],
            }
        )
        return OK if report.ok else NO
    runs = f" and {plural(report.runs, 'run')}" if report.runs else ""
    checked = f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}{runs} checked"
    if report.ok:
        out.line((f"{checked}: no problems", "green"))
        return OK
    rows: list[list[Cell]] = [
        [(found.thread or "-", "bold"), (found.checkpoint or "-", "yellow"), (found.what, "red")]
        for found in report.problems
    ]
    out.table(("thread", "checkpoint", "problem"), rows)
    out.line((f"{checked}: {plural(len(report.problems), 'problem')}", "bold red"))
    return NO


def _problem_json(found: Problem) -> dict[str, Any]:
    whose = {"thread": found.thread, "checkpoint": found.checkpoint} if found.run is None else {"run": found.run}
    return whose | {"what": found.what}


# --- stats


def stats(args: Namespace, store: Store, out: Output) -> int:
    found = store.ops.stats()
    file_bytes = _file_bytes(args.store)
    if out.json:
        out.document(_stats_json(found, file_bytes))
        return OK
    rows: list[list[Cell]] = [
        [("threads", ""), (f"{found.threads:,}", "bold")],
        [("checkpoints", ""), (f"{found.checkpoints:,}", "bold")],
        [("keyframes", ""), (f"{found.keyframes:,}", "bold")],
        [("stored", ""), (size(found.stored_bytes), "bold")],
        [("  differences", ""), (size(found.difference_bytes), "")],
        [("  keyframes", ""), (size(found.keyframe_bytes), "")],
        [("full JSON", ""), (size(found.state_bytes), "bold")],
        [("ratio", ""), (f"{found.ratio:.1f}x", "bold green")],
    ]
    if found.runs:
        rows += [[("runs", ""), (f"{found.runs:,}", "bold")], [("  journals", ""), (size(found.run_bytes), "")]]
    if file_bytes is not None:
        rows.append([("file", ""), (size(file_bytes), "bold")])
    out.table(("what", "how much"), rows, right=(1,))
    return OK


def _stats_json(found: Stats, file_bytes: int | None) -> dict[str, Any]:
    return {
        "threads": found.threads,
        "checkpoints": found.checkpoints,
        "keyframes": found.keyframes,
        "stored_bytes": found.stored_bytes,
        "difference_bytes": found.difference_bytes,
        "keyframe_bytes": found.keyframe_bytes,
        "state_bytes": found.state_bytes,
        "ratio": round(found.ratio, 3),
        "runs": found.runs,
        "run_bytes": found.run_bytes,
        "file_bytes": file_bytes,
    }


def sqlite_file(url: str) -> str | None:
    """The file behind a store's URL, if it is one."""
    if url.startswith("sqlite:///"):
        return unquote(url.removeprefix("sqlite:///"))
    return None if is_postgres(url) or "://" in url or url == ":memory:" or not url.strip() else url


def _file_bytes(url: str) -> int | None:
    """What the store takes on disk: the file and its write-ahead log."""
    path = sqlite_file(url)
    if path is None:
        return None
    return sum(os.path.getsize(name) for name in (path, path + "-wal") if os.path.exists(name))
