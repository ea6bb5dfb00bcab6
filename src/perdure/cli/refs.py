"""Find the checkpoint that a REF names: an id, `head`, `head~3`, `@12`, LangGraph's id.

This module only reads. A REF that matches no checkpoint raises NotFound; nothing is guessed.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING

from perdure.cli.base import REF_HELP
from perdure.cli.text import nearest
from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from perdure import Checkpoint, Store, Thread

NAMES_COMPARED = 1000
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # LangGraph's own id of a checkpoint
_REF = re.compile(rf"(?P<base>head|@\d{{1,18}}|{_UUID}|[0-9a-z]{{13}})(?P<back>~\d{{0,18}})?", re.IGNORECASE)


def existing(store: Store, name: str) -> Thread:
    """Return the handle of an existing thread. Raises NotFound, which suggests a run of that id or a similar name."""
    thread = store.thread(name)
    try:
        thread.info()
    except NotFound:
        if _is_run(store, name):
            raise NotFound(f"there is no thread {name!r}, but a run: `perdure run show {quote(name)}`") from None
        names = [info.name for info in store.threads(limit=NAMES_COMPARED)]
        raise NotFound(nearest("thread", name, names, "perdure threads")) from None
    return thread


def _is_run(store: Store, name: str) -> bool:
    try:
        store.get_run(name)
    except NotFound:
        return False
    return True


def resolve(thread: Thread, ref: str | None) -> Checkpoint:
    """Return the checkpoint that a REF names; the head for None."""
    match = _REF.fullmatch(ref or "head")
    if match is None:
        raise UsageError(f"{ref!r} names no checkpoint: write {REF_HELP}")
    base = _base(thread, match["base"].lower())
    if match["back"] is None:
        return base
    return _back(thread, base, int(match["back"][1:] or 1))


def _base(thread: Thread, base: str) -> Checkpoint:
    if base == "head":
        if (head := thread.get_head()) is None:
            raise NotFound(f"thread {thread.name!r} has no checkpoint yet")
        return head
    if base.startswith("@"):
        return thread.at_step(int(base[1:]))
    if "-" in base:
        named = next((line.checkpoints[base] for line in thread.lines() if base in line.checkpoints), None)
        if named is None:
            raise NotFound(f"thread {thread.name!r} has no checkpoint whose checkpoint_id is {base}")
        return next(thread.history(start=named, limit=1))
    return next(thread.history(start=base, limit=1))


def _back(thread: Thread, base: Checkpoint, count: int) -> Checkpoint:
    for checkpoint in islice(thread.history(start=base), count, None):
        return checkpoint
    raise NotFound(f"thread {thread.name!r} has no checkpoint {count} steps before {base.id}")


def all_lines(thread: Thread) -> Iterator[Checkpoint]:
    """Yield the checkpoints of all lines of a thread, newest first, each once. Pages are read on demand."""
    tips = {checkpoint.id: checkpoint for checkpoint in thread.branches()}
    for head in islice(thread.history(limit=1), 1):  # a fresh fork's head is another thread's record, not in `tips`
        tips.setdefault(head.id, head)
    lines = [thread.history(start=tip) for tip in tips.values()]
    last = None
    for checkpoint in heapq.merge(*lines, key=lambda checkpoint: checkpoint.id, reverse=True):
        if checkpoint.id != last:  # lines that have joined yield the same checkpoints
            yield checkpoint
        last = checkpoint.id
