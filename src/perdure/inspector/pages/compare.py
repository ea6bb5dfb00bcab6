"""Two runs or two threads side by side, from where they part: `/compare?a=&b=`."""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from typing import Any

import perdure
from perdure import Checkpoint, Run, Step, Thread
from perdure.errors import NotFound, PerdureError
from perdure.inspector import values
from perdure.inspector.pages.run import took
from perdure.inspector.pages.runs import row_of
from perdure.inspector.view import PageView

_ROWS_MAX, _CHANGES_MAX = 100, 200


async def compare(view: PageView) -> dict[str, Any]:
    """Return both sides and what differs. A name is that of a run; if there is no such run, that of a thread."""
    names = [view.query.get(side, "").strip() for side in ("a", "b")]
    data: dict[str, Any] = {
        "names": names,
        "kind": None,
        "sides": [],
        "rows": [],
        "parted_at": None,
        "more": 0,
        "changes": {},
    }
    if not all(names):
        return data
    try:
        pair = await asyncio.gather(*(view.store.aget_run(name) for name in names))
    except NotFound as error:
        threads = [view.store.thread(name) for name in names]
        if None in await asyncio.gather(*(one.aget_head() for one in threads)):
            raise NotFound(f"{error}; and there is no such thread") from error
        return data | await _threads(view, *threads)
    return data | await _runs(view, *pair)


def _changes(view: PageView, before: Any, after: Any) -> dict[str, Any] | None:
    changes = perdure.compare(values.plain(before, reveal=True), values.plain(after, reveal=True))
    return view.changes(changes, _CHANGES_MAX) if changes else None


# --- runs


async def _runs(view: PageView, a: Run, b: Run) -> dict[str, Any]:
    infos = await asyncio.gather(a.arefresh(), b.arefresh())
    lists = await asyncio.gather(a.asteps(values="small"), b.asteps(values="small"))
    pairs = list(zip_longest(*lists))
    parted = next((at for at, (one, other) in enumerate(pairs) if _essence(one) != _essence(other)), len(pairs))
    shown = pairs[parted : parted + _ROWS_MAX]
    before, after = await asyncio.gather(_values(a), _values(b))
    return {
        "kind": "run",
        "sides": [row_of(info) for info in infos],
        "parted_at": parted,
        "rows": [
            {"a": _step(view, one), "b": _step(view, other), "same": _essence(one) == _essence(other)}
            for one, other in shown
        ],
        "more": len(pairs) - parted - len(shown),
        "changes": {title: _changes(view, before[title], after[title]) for title in before},
    }


def _essence(step: Step | None) -> Any:
    """Return what makes two steps the same: the call and how it ended, not when."""
    if step is None:
        return None
    result = values.plain(step.result, reveal=True)
    return step.path, step.name, step.kind, step.status, step.error, step.result_bytes, result


def _step(view: PageView, step: Step | None) -> dict[str, Any] | None:
    if step is None:
        return None
    text = step.error or ("" if step.result is None else values.brief(view.value(step.result), 200))
    about = {"name": step.name.removeprefix("perdure."), "took": took(step), "text": text}
    return values.pick(step, "number path kind status") | about


async def _values(run: Run) -> dict[str, Any]:
    """Return what two runs are compared by besides their steps. A text in parentheses says why a value is missing."""
    reads = {"Arguments": run.aarguments(raw=True), "Result": run.aoutcome(raw=True), "State": run.astate_at()}
    values_of: dict[str, Any] = {}
    for title, reading in reads.items():
        try:
            values_of[title] = await reading
        except PerdureError as error:  # pruned, erased or damaged
            values_of[title] = f"({error})"
    ended = values_of["Result"]
    if not isinstance(ended, str):
        values_of["Result"] = "(no result yet)" if ended is None else ended.error or ended.result
    if values_of["State"] is None:
        values_of["State"] = "(no state)"
    return values_of


# --- threads


async def _threads(view: PageView, a: Thread, b: Thread) -> dict[str, Any]:
    heads = await asyncio.gather(a.aload(raw=True), b.aload(raw=True))
    common = await _last_common(a, b, *heads)
    changes = {"Between the two": _changes(view, heads[0].state, heads[1].state)}
    if common is not None:
        shared = (await a.aload(common, raw=True)).state
        for thread, head in zip((a, b), heads, strict=True):
            changes[f"{thread.name} since they parted"] = _changes(view, shared, head.state)
    sides = zip((a, b), heads, strict=True)
    return {
        "kind": "thread",
        "sides": [{"id": one.name, "head": head.id, "step": head.step, "at": head.at} for one, head in sides],
        "parted_at": None if common is None else common.step,
        "changes": changes,
    }


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
