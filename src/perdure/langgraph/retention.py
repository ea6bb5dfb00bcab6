"""Which checkpoints stay: `ttl`, `keep_last`, prune, and the removal of whole runs.

A checkpoint with a DeltaChannel holds only what changed, by LangGraph's own design, and is rebuilt from its
ancestors' writes. So what a kept checkpoint needs stays, up to the nearest ancestor that holds the whole value.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import orjson

from perdure.adapters import Flow, LineEngine, Texts, drop_of_thread, line_flows, needs_of, number_of, parent_of
from perdure.errors import Damaged, NotFound, PerdureError, UsageError
from perdure.langgraph.checkpoints import run_key
from perdure.log.gc import remove_labelled
from perdure.log.labels import MAIN, LabelRow, labels_in, labels_of_runs, space_heads, spaces_of
from perdure.log.thread_table import ThreadRow, idle_threads, thread_names, thread_numbered, try_thread
from perdure.storage.events import event, said
from perdure.storage.program import Program, read

_log = logging.getLogger("perdure")
_PUTS_MIN = 16  # shortening a history costs a keyframe, so it is not done at every put
_EXPIRE_EVERY = 256
_EXPIRE_MOST = 8
_PAGE = 500


class Retention(NamedTuple):
    """How long things stay. None: for good."""

    ttl_us: int | None = None
    keep_last: int | None = None

    def expired_before(self, now_us: int) -> int:
        """Threads that were written before this are gone."""
        return 0 if self.ttl_us is None else now_us - self.ttl_us

    @classmethod
    def of(cls, ttl: float | timedelta | None, keep_last: int | None) -> Retention:
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
            raise UsageError(f"ttl={ttl!r}: seconds, more than 0, or a timedelta")
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise UsageError(f"keep_last={keep_last!r}: a count of 1 or more")
        return cls(None if seconds is None else int(seconds * 1_000_000), keep_last)


def delete(engine: LineEngine, name: str, *, idle_since: int | None = None) -> Flow[None]:
    """Delete a thread, and the runs that stand for its tasks."""
    tenant = yield from engine.ctx.tenant()
    number = (yield from number_of(tenant, name)) if tenant is not None else None
    yield from line_flows.delete(engine, name, idle_since=idle_since)
    if tenant is not None and number is not None and (yield from number_of(tenant, name)) != number:
        yield from drop_of_thread(tenant, number)


def after_put(engine: LineEngine, retention: Retention, name: str) -> Flow[None]:
    """What retention asks for after a put: now and then, and bounded. A failure here is logged: the put is stored."""
    try:
        yield from _after_put(engine, retention, name)
    except PerdureError as error:
        _log.warning(
            "thread %r: its checkpoint is stored, but old ones could not be removed: %s",
            name,
            said(error),
            extra=event("retention.failed", thread=name, error=type(error).__name__),
        )


def _after_put(engine: LineEngine, retention: Retention, name: str) -> Flow[None]:
    seen = engine.threads.get(name)
    tenant = yield from engine.ctx.tenant()
    if seen is None or tenant is None:
        return
    keep = retention.keep_last
    if keep is not None and seen.saves >= max(_PUTS_MIN, keep):
        seen.saves = 0
        yield from _shorten(engine, tenant, name, keep)
    if retention.ttl_us is not None:
        engine.saves += 1
        if engine.saves % _EXPIRE_EVERY == 0:
            yield from _expire_some(engine, tenant, retention.ttl_us, _EXPIRE_MOST)


def expire(engine: LineEngine, retention: Retention, name: str) -> Flow[None]:
    """Delete a thread that has expired, before anybody reads it."""
    if retention.ttl_us is None:
        return
    tenant = yield from engine.ctx.tenant()
    row = (yield from read(partial(try_thread, tenant, name))) if tenant is not None else None
    if row is not None and row.updated_at < retention.expired_before(engine.ctx.clock_us()):
        yield from delete(engine, name, idle_since=row.updated_at + 1)


def _expire_some(engine: LineEngine, tenant: int, ttl_us: int, limit: int) -> Flow[int]:
    before = engine.ctx.clock_us() - ttl_us
    names = yield from read(partial(idle_threads, tenant, before, limit))
    for name in names:
        yield from delete(engine, name, idle_since=before)
    return len(names)


def enforce(engine: LineEngine, retention: Retention) -> Flow[tuple[int, int]]:
    """Apply `ttl` and `keep_last` to every thread. How many threads and checkpoints went."""
    tenant = yield from engine.ctx.tenant()
    threads = checkpoints = after = 0
    if tenant is None:
        return 0, 0
    while retention.ttl_us is not None:
        gone = yield from _expire_some(engine, tenant, retention.ttl_us, _PAGE)
        threads += gone
        if gone < _PAGE:
            break
    while retention.keep_last is not None and (page := (yield from read(partial(thread_names, tenant, after, _PAGE)))):
        for after, name in page:  # noqa: B007 - where the next page begins
            checkpoints += yield from _shorten(engine, tenant, name, retention.keep_last)
    return threads, checkpoints


def prune(engine: LineEngine, threads: Sequence[str], strategy: str) -> Flow[None]:
    """LangGraph's prune: "keep_latest" or "delete"."""
    if strategy not in ("keep_latest", "delete"):
        raise UsageError(f'strategy={strategy!r}: "keep_latest" or "delete"')
    _check_many(threads, "prune", "thread_ids")
    tenant = yield from engine.ctx.tenant()
    for thread in threads if tenant is not None else ():
        if strategy == "delete":
            yield from delete(engine, str(thread))
        else:
            assert tenant is not None
            yield from _shorten(engine, tenant, str(thread), 1, whole=True)


def delete_for_runs(engine: LineEngine, runs: Sequence[str]) -> Flow[None]:
    """Remove the checkpoints that runs have made, in all threads."""
    _check_many(runs, "delete_for_runs", "run_ids")
    tenant = yield from engine.ctx.tenant()
    if tenant is None or not runs:
        return
    found = yield from read(partial(labels_of_runs, tenant, [run_key(str(run)) for run in runs]))
    by_thread: dict[int, set[tuple[int, bytes]]] = {}
    for label in found:
        by_thread.setdefault(label.thread, set()).add((label.space, label.id))
    for number, doomed in by_thread.items():
        row, labels = yield from read(partial(_labels, tenant, None, number))
        if row is not None:
            yield from _remove(engine, tenant, row, labels, doomed)


def _check_many(given: object, method: str, what: str) -> None:
    if isinstance(given, str | bytes):  # its characters would be taken for names
        raise UsageError(f"{method}({given!r}): {what} are a list: [{given!r}]")


def _shorten(engine: LineEngine, tenant: int, name: str, keep: int, *, whole: bool = False) -> Flow[int]:
    """Keep the newest checkpoints of each namespace. `whole`: of every one; else that of a single call of a subgraph
    ("node:task") goes when it is older than all that is kept of the thread itself."""
    row, labels = yield from read(partial(_labels, tenant, name, None))
    if row is None:
        return 0
    names = yield from read(partial(spaces_of, tenant, row.thread))
    heads = {**(yield from read(partial(space_heads, tenant, row.thread))), MAIN: row.head}
    by_space: dict[int, list[LabelRow]] = {}
    for label in sorted(labels, key=lambda label: label.id, reverse=True):
        by_space.setdefault(label.space, []).append(label)
    main = by_space.get(MAIN, [])
    newest = [label for label in labels if label.record == heads.get(label.space)]
    oldest = min((label.id for label in [*main[:keep], *newest] if label.space == MAIN), default=b"")
    doomed: set[tuple[int, bytes]] = set()
    for space, line in by_space.items():
        kept = line[:keep]
        if not whole and ":" in names.get(space, "") and line[0].id < oldest:
            kept = []
        stay = {label.id for label in kept}
        if kept:  # also where a clock stepped back, and the newest has not the greatest id
            stay |= {label.id for label in newest if label.space == space}
        doomed |= {(space, label.id) for label in line if label.id not in stay}
    return (yield from _remove(engine, tenant, row, labels, doomed))


def _labels(tenant: int, name: str | None, number: int | None) -> Program[tuple[ThreadRow | None, list[LabelRow]]]:
    if name is not None:
        row = yield from try_thread(tenant, name)
    else:
        row = yield from thread_numbered(tenant, number or 0)
    if row is None:
        return None, []
    return row, (yield from labels_in(tenant, [row.thread]))


def _remove(
    engine: LineEngine, tenant: int, row: ThreadRow, labels: list[LabelRow], doomed: set[tuple[int, bytes]]
) -> Flow[int]:
    doomed -= yield from _needed(engine, tenant, row, labels, doomed)
    if not doomed:
        return 0
    try:
        return (yield from remove_labelled(tenant, row.name, doomed))
    except NotFound:
        return 0  # it was deleted meanwhile


def _needed(
    engine: LineEngine, tenant: int, row: ThreadRow, labels: list[LabelRow], doomed: Collection[tuple[int, bytes]]
) -> Flow[set[tuple[int, bytes]]]:
    """Which of the doomed are needed to rebuild delta channels of what stays."""
    records = {(label.space, label.id): label.record for label in labels}
    texts = Texts(engine, tenant)
    needed: set[tuple[int, bytes]] = set()
    for label in sorted(labels, key=lambda label: label.id, reverse=True):
        if (label.space, label.id) in doomed:
            continue
        key: tuple[int, bytes] | None = (label.space, label.id)
        state = yield from _state(texts, row.tree, records[(label.space, label.id)])
        # If its parent stays too, then that one's needs cover these.
        missing = set(needs_of(state)) if _parent(label.space, state) in doomed else set()
        while missing and (key := _parent(label.space, state)) is not None and key in records:
            needed.add(key)
            state = yield from _state(texts, row.tree, records[key])
            missing -= state.keys()
    return needed


def _state(texts: Texts, tree: int, record: int) -> Flow[dict[str, Any]]:
    """A checkpoint's state as plain JSON."""
    try:
        text = yield from texts.of(tree, record)
    except Damaged:
        return {}  # removed meanwhile, or lost: its needs are unknown
    state = orjson.loads(text)
    return state if type(state) is dict else {}


def _parent(space: int, state: dict[str, Any]) -> tuple[int, bytes] | None:
    parent = parent_of(state)
    return None if parent is None else (space, parent)
