"""Two runs or two threads side by side, from where they part: `/compare?a=&b=`."""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from typing import Any

import perdure
from perdure import Checkpoint, Run, Step, Thread
from perdure.errors import NotFound, PerdureError
from perdure.inspector import values
from perdure.inspector.pages.run import changes_of
from perdure.inspector.pages.runs import row_of
from perdure.inspector.view import PageView

_ROWS_MAX, _CHANGES_MAX = 100, 200


async def compare(view: PageView) -> dict[str, Any]:
    """Return both sides and what differs. A name is that of a run; if there is no such run, that of a thread."""
    names = [view.query.get(side, "").strip() for side in ("a", "b")]
    empty: dict[str, Any] = {"kind": None, "sides": [], "rows": [], "parted_at": None, "more": 0, "changes": {}}
    if not all(names):
        return empty | {"names": names}
    try:
        pair = await asyncio.gather(*(view.store.aget_run(name) for name in names))
    except NotFound as error:
        threads = [view.store.thread(name) for name in names]
        if None in await asyncio.gather(*(one.aget_head() for one in threads)):
            raise NotFound(f"{error}; and there is no such thread") from error
        return empty | {"names": names} | await _threads(view, *threads)
    return empty | {"names": names} | await _runs(view, *pair)


# --- runs


async def _runs(view: PageView, a: Run, b: Run) -> dict[str, Any]:
    infos = await asyncio.gather(a.arefresh(), b.arefresh())
    lists = await asyncio.gather(a.asteps(values="small"), b.asteps(values="small"))
    pairs = list(zip_longest(*([step for step in steps if step.kind != "fork"] for steps in lists)))
    parted = next((at for at, (one, other) in enumerate(pairs) if not _same(one, other)), len(pairs))
    shown = pairs[parted : parted + _ROWS_MAX]
    changes = {}
    for title, reads in (
        ("Arguments", (a.aarguments(raw=True), b.aarguments(raw=True))),
        ("Result", (_result(a), _result(b))),
        ("State", (a.astate_at(), b.astate_at())),
    ):
        changes[title] = _changes(view, *await asyncio.gather(*map(_or_none, reads)))
    return {
        "kind": "run",
        "sides": [row_of(info) for info in infos],
        "parted_at": parted,
        "rows": [{"a": _step(view, one), "b": _step(view, other), "same": _same(one, other)} for one, other in shown],
        "more": len(pairs) - parted - len(shown),
        "changes": changes,
    }


def _same(one: Step | None, other: Step | None) -> bool:
    if one is None or other is None:
        return False
    parts = (
        (s.path, s.name, s.kind, s.status, s.error, s.result_bytes, values.plain(s.result, reveal=True))
        for s in (one, other)
    )
    first, second = parts
    return first == second


def _step(view: PageView, step: Step | None) -> dict[str, Any] | None:
    if step is None:
        return None
    took = (step.ended_at - step.started_at).total_seconds() if step.ended_at else None
    text = step.error or ("" if step.result is None else values.brief(view.value(step.result), 200))
    name = step.name.removeprefix("perdure.")
    return {
        "number": step.number, "path": step.path, "name": name, "kind": step.kind, "status": step.status,
        "took": values.lasted(took), "text": text,
    }  # fmt: skip


async def _result(run: Run) -> Any:
    outcome = await run.aoutcome(raw=True)
    return None if outcome is None else outcome.error or outcome.result


async def _or_none(reading: Any) -> Any:
    try:
        return await reading
    except PerdureError:  # pruned, erased or damaged
        return None


def _changes(view: PageView, before: Any, after: Any) -> dict[str, Any] | None:
    found = perdure.compare(values.plain(before, reveal=True), values.plain(after, reveal=True))
    return (
        {"rows": changes_of(view, found[:_CHANGES_MAX]), "more": max(0, len(found) - _CHANGES_MAX)} if found else None
    )


# --- threads


async def _threads(view: PageView, a: Thread, b: Thread) -> dict[str, Any]:
    heads = await asyncio.gather(a.aload(raw=True), b.aload(raw=True))
    common = await _last_common(a, b, *heads)
    shared = None if common is None else (await a.aload(common, raw=True)).state
    changes = {"Between the two": _changes(view, heads[0].state, heads[1].state)}
    if common is not None:
        for thread, head in zip((a, b), heads, strict=True):
            changes[f"{thread.name} since they parted"] = _changes(view, shared, head.state)
    return {
        "kind": "thread",
        "sides": [{"id": one.name, "head": head.id, "step": head.step, "at": head.at}
                  for one, head in zip((a, b), heads, strict=True)],
        "parted_at": None if common is None else common.step,
        "changes": changes,
    }  # fmt: skip


async def _last_common(a: Thread, b: Thread, *heads: Checkpoint) -> Checkpoint | None:
    """Return the newest checkpoint that both histories have, by halving; None if they have none in common."""
    low, high, common = 0, min(head.step for head in heads), None
    while low <= high:
        middle = (low + high) // 2
        one, other = await asyncio.gather(_at(a, middle), _at(b, middle))
        if one is not None and other is not None and one.id == other.id:
            common, low = one, middle + 1
        elif one is None or other is None:  # pruned: what is left is younger
            low = middle + 1
        else:
            high = middle - 1
    return common


async def _at(thread: Thread, step: int) -> Checkpoint | None:
    try:
        return await thread.aat_step(step)
    except NotFound:
        return None
