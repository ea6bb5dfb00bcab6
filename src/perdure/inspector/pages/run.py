"""A run: its steps in time, the chosen step, the run itself; a window of steps at a time, however many there are.

`?step=` is the number of the chosen step, `?from=` where the window begins, `?time=scale` draws pauses to scale. The
script of the page asks the JSON twin for `?part=steps` while a person scrolls, and for `?part=find`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from perdure import Change, Run, RunInfo, Step
from perdure.errors import Damaged, NotFound, PerdureError, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Confirmation, Fields, value_in
from perdure.inspector.pages.runs import DANGEROUS, VERBS, row_of, why_stuck
from perdure.inspector.questions import card
from perdure.inspector.timeline import Mark, Timeline
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.views import to_json

WINDOW = 100  # steps
_MAP_FROM, _MAP_ROWS = 60, 48  # a shorter run needs no map; a row of it stands for several steps
_CHANGES_MAX, _HITS_MAX, _FAMILY_MAX, _MESSAGES_MAX = 50, 100, 50, 50
_FINISHED = ("done", "failed", "cancelled", "undone", "exported")
_WORK = ("step", "effect", "undo")


async def run(view: PageView) -> dict[str, Any]:
    """Return a run with a window of its steps and the chosen one, or a part of it for the script."""
    handle = await view.store.aget_run(view.params["id"])
    if view.query.get("part") == "find":
        return {"hits": await _hits(view, handle)}
    info = await handle.arefresh()
    shown = await _read(view, handle, info)
    if view.query.get("part") == "steps":
        return {"rows": [_row(view, one, shown.line) for one in shown.steps], "pauses": shown.line.labels()}
    is_running = info.status not in _FINISHED
    questions, details, chosen, verbs = await asyncio.gather(
        view.store.aquestions(handle), _details(view, handle, info), _chosen(view, handle, shown), _verbs(handle, info)
    )
    return {
        "run": row_of(info) | {"owner": info.owner},
        "is_running": is_running,
        "ended_at": _end(info),
        "cards": [card(view, one) for one in questions],
        "retries": await _retries(handle, shown) if is_running else [],
        "hits": await _hits(view, handle) if view.query.get("find") else None,
        "chosen": chosen,
        "verbs": verbs,
        "dangerous": DANGEROUS,
        "to_scale": view.query.get("time") == "scale",
        "window": WINDOW,
        "is_long": shown.outline is not None,
        "rows": [] if view.part == "detail" else [_row(view, one, shown.line) for one in shown.steps],
        "pauses": shown.line.labels(),
        "this_from": shown.begin,
        "total": shown.total,
        **_summary(view, handle, shown, info),
        "state": await _or_none(view, handle.astate_at()) if shown.has_state and chosen is None else None,
        **details,
    }


def _end(info: RunInfo) -> datetime:
    return info.changed_at if info.status in _FINISHED else datetime.now(UTC)


async def _verbs(handle: Run, info: RunInfo) -> list[tuple[str, str]]:
    """Return what can be asked of the run, with the labels of the buttons."""
    verbs = [verb for verb, (_, statuses, _) in VERBS.items() if info.status in statuses]
    if "undo" in verbs and not await handle.acan_undo():
        verbs.remove("undo")
    return [(verb, VERBS[verb][0]) for verb in verbs]


async def _details(view: PageView, handle: Run, info: RunInfo) -> dict[str, Any]:
    """Return what concerns the run as a whole: arguments, outcome, family, messages."""
    children, forks, messages = await asyncio.gather(
        handle.achildren(limit=_FAMILY_MAX), handle.aforks(limit=_FAMILY_MAX), handle.amessages()
    )
    outcome, damage = None, None
    try:
        outcome = await handle.aoutcome(raw=True)
    except Damaged as error:  # the run is shown all the same
        damage = str(error)
    return {
        "arguments": await _or_none(view, handle.aarguments(raw=True)),
        "has_result": outcome is not None and outcome.status == "done",
        "result": view.value(outcome.result) if outcome else None,
        "error": outcome.error if outcome else damage or why_stuck(info),
        "traceback": outcome.traceback if outcome else None,
        "children": [row_of(one) for one in children],
        "forks": [row_of(one) for one in forks],
        "messages": [
            pick(one, "topic at is_received") | {"value": view.value(one.value)} for one in messages[-_MESSAGES_MAX:]
        ],
    }


async def _or_none(view: PageView, reading: Any) -> Any:
    try:
        return view.value(await reading)
    except NotFound:  # pruned or erased
        return None
    except Damaged as error:
        return f"({error})"


# --- steps


@dataclass(frozen=True)
class _Steps:
    """The steps of the window, where they lie in time, and what is known of all steps."""

    begin: int
    steps: list[Step]
    line: Timeline
    marks: list[Mark]  # of all steps
    outline: Any  # of a run with more than WINDOW steps

    @property
    def total(self) -> int:
        return len(self.marks)

    @property
    def has_state(self) -> bool:
        return self.outline is None or self.outline.has_state

    def cursor(self, number: int) -> str | None:
        """Return the cursor after which the step that follows a number begins."""
        if self.outline is not None:
            return self.outline.cursor(number)  # type: ignore[no-any-return]
        return self.steps[number - 1].cursor if number else None


async def _read(view: PageView, handle: Run, info: RunInfo) -> _Steps:
    """Read the window that the URL names. A long run has an outline, of which a server reads every row once."""
    chosen = view.number("step", 0)
    begin = view.number("from", max(chosen - 1, 0) // WINDOW * WINDOW)
    key, steps = (view.tenant, handle.id), []
    outline = view.kept.get(key)
    if outline is None:
        steps = await handle.asteps(limit=WINDOW + 1, values="small")
    if outline is not None or len(steps) > WINDOW:
        view.kept.keep(key, outline := await handle.aoutline(outline))
        begin = min(begin, max(len(outline) - 1, 0) // WINDOW * WINDOW)
        steps = await handle.asteps(after=outline.cursor(begin), limit=WINDOW, values="small")
    marks = [_mark(one) for one in steps]
    is_last = outline is None or begin + WINDOW >= len(outline)
    end = _end(info).timestamp() if is_last else max(until or begun for _, begun, until in marks)
    line = Timeline(marks, end, to_scale=view.query.get("time") == "scale")
    every = list(zip(outline.kinds, outline.started_at, outline.ended_at, strict=True)) if outline else marks
    return _Steps(begin if outline else 0, steps, line, every, outline)


def _mark(step: Step) -> Mark:
    return step.kind, step.started_at.timestamp(), None if step.ended_at is None else step.ended_at.timestamp()


def _row(view: PageView, step: Step, line: Timeline) -> dict[str, Any]:
    """Return a step as the list shows it."""
    x, width = line.bar(*_mark(step)[1:])
    if step.error or step.status == "in doubt":
        text = step.error or f"key {step.key}"
    elif step.result_bytes is not None:
        text = f"{step.result_bytes:,} bytes"
    else:
        text = "" if step.result is None else values.brief(view.value(step.result), 120)
    return pick(step, "number kind status path attempts") | {
        "name": values.brief(step.name.removeprefix("perdure."), 80),
        "took": took(step),
        "text": values.brief(text, 120),
        "x": x,
        "width": width,
    }


def took(step: Step) -> str:
    """Return how long a step took; "" if it has not ended."""
    return values.lasted((step.ended_at - step.started_at).total_seconds()) if step.ended_at else ""


def _summary(view: PageView, handle: Run, shown: _Steps, info: RunInfo) -> dict[str, Any]:
    """Return what is known of all steps: the time at work, how many were undone, the map."""
    key = (view.tenant, handle.id, to_scale := view.query.get("time") == "scale")
    outline, until, known = view.kept.get(key, (None, None, {}))
    summary: dict[str, Any] = known
    if outline is None or outline is not shown.outline or until != _end(info):
        summary = {
            "worked_s": sum(until - begun for kind, begun, until in shown.marks if kind in _WORK and until),
            "undone": sum(kind == "undo" for kind, _, _ in shown.marks),
            "map": _map(shown, _end(info).timestamp(), to_scale=to_scale) if shown.total > _MAP_FROM else [],
        }
        if shown.outline is not None:
            view.kept.keep(key, (shown.outline, _end(info), summary))
    return summary


def _map(shown: _Steps, end: float, *, to_scale: bool) -> list[dict[str, Any]]:
    """Return all steps in time as few bars, each of several steps that began one after another."""
    statuses = shown.outline.statuses if shown.outline else [one.status for one in shown.steps]
    line, size, bars = Timeline(shown.marks, end, to_scale=to_scale), -(-shown.total // _MAP_ROWS), []
    for first in range(0, shown.total, size):
        some = shown.marks[first : first + size]
        x = min(line.at(min(begun for _, begun, _ in some)), 996.0)
        until = line.at(max(end if until is None else until for _, _, until in some))
        kind = Counter(kind for kind, _, _ in some).most_common(1)[0][0]
        bad = {"failed", "in doubt"}.intersection(statuses[first : first + size])
        width = round(max(until - x, 4.0), 2)
        bars.append({"x": x, "width": width, "kind": kind, "status": min(bad, default="done")})
    return bars


async def _retries(handle: Run, shown: _Steps) -> list[dict[str, Any]]:
    """Return the steps whose last attempt failed and that are tried again."""
    if shown.outline is None:
        steps = [one for one in shown.steps if one.status == "retrying"]
    else:
        numbers = [number for number, status in enumerate(shown.outline.statuses) if status == "retrying"][-3:]
        pages = [await handle.asteps(after=shown.cursor(number), limit=1, values=False) for number in numbers]
        steps = [one for page in pages for one in page]
    return [pick(one, "number name attempts error") | {"due": (one.note or {}).get("due")} for one in steps]


async def _hits(view: PageView, handle: Run) -> list[dict[str, Any]]:
    text = view.query.get("find", "").strip()
    steps = await handle.afind_step(text, limit=_HITS_MAX) if text else []
    return [pick(one, "number path name status") for one in steps]


async def _chosen(view: PageView, handle: Run, shown: _Steps) -> dict[str, Any] | None:
    """Return the chosen step with its values, and how the state changed in it; None if there is none."""
    number = view.number("step", 0)
    if not number:
        return None
    if number > shown.total:
        raise NotFound(f"run {handle.id!r} has no step number {number} so far")
    [step] = await handle.asteps(after=shown.cursor(number - 1), limit=1)
    changes: list[Change] = []
    if shown.has_state:
        before = [] if number == 1 else await handle.asteps(after=shown.cursor(number - 2), limit=1, values=False)
        try:
            changes = await handle.adiff(before[0] if before else 0, step)
        except PerdureError:  # its checkpoints may be pruned
            changes = []
    note = {name: value for name, value in (step.note or {}).items() if name != "state"}
    about = pick(step, "number path kind status attempts started_at ended_at key error traceback")
    return about | {
        "name": step.name.removeprefix("perdure."),
        "took": took(step),
        "is_shared": step.shared,
        "arguments": view.value(step.arguments),
        "has_result": step.ended_at is not None and not step.error,
        "result": view.value(step.result),
        "note": view.value(note or None),
        "changes": view.changes(changes, _CHANGES_MAX),
        "command": view.command("run fork", handle.id, step.path, name=f"{handle.id}-fork", keys="new"),
    }


# --- the live tail


async def tail(view: PageView) -> AsyncGenerator[str, None]:
    """Yield what the steps that run now emit, as events for the page, until the run ends."""
    handle = await view.store.aget_run(view.params["id"])
    async for event in handle.astream(view.headers.get("last-event-id", ""), recorded=False):
        value = view.value(event.value) if event.kind in ("chunk", "lost", "status") else None
        text = value if isinstance(value, str) else to_json(value) + ("\n" if event.kind == "chunk" else "")
        data = {"path": event.path, "name": event.name, "text": values.safe_text(text[: values.TEXT_MAX])}
        yield f"id: {event.cursor}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"


# --- actions


async def fork(view: PageView, fields: Fields) -> Confirmation:
    """Fork a run after a step."""
    run, step, name = fields["run"], fields["step"], fields["id"]
    keys: Any = fields["keys"]
    if keys not in ("new", "same"):
        raise UsageError("choose the keys of effects: new, or same")

    async def do() -> str:
        forked = await view.store.afork(run, at=step, id=name, keys=keys, who=view.who)
        return f"Forked as {forked.id}. A worker continues it."

    text = (
        f"The new run shares everything up to step {step}, and a worker continues it from there. {run} stays as it is. "
    )
    text += "Receivers of its effects see new requests." if keys == "new" else "Receivers answer its effects as before."
    command = view.signed("run fork", run, step, name=name, keys=keys)
    return Confirmation(f"Fork {run} after step {step}, as {name}?", text, "Fork", (command,), do)


async def send(view: PageView, fields: Fields) -> Confirmation:
    """Send a message to a run."""
    run, topic, text = fields["run"], fields.get("topic"), fields["value"]

    async def do() -> str:
        await view.store.asend(run, value_in(text), topic=topic, who=view.who)
        return f"Sent to {run}."

    where = f"on the topic {topic}" if topic else "without a topic"
    command = view.signed("run send", run, text, topic=topic or None)
    return Confirmation(f"Send a message to {run}?", f"{text} {where}. The run gets it once.", "Send", (command,), do)


ACTIONS = (fork, send)
