"""A run: its steps in time, the chosen step, the run itself; a window of steps at a time, however many there are.

`?step=` is the number of the chosen step, `?from=` where the window begins, `?time=scale` draws pauses to scale. The
script of the page asks the JSON twin for `?part=steps`, `?part=outline` (all steps, to draw) and `?part=find`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from perdure import Change, Run, RunInfo, Step, views
from perdure.errors import Damaged, NotFound, PerdureError, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Action, Confirmation, Fields, value_in
from perdure.inspector.pages.runs import DANGEROUS, VERBS, row_of
from perdure.inspector.questions import card
from perdure.inspector.timeline import Mark, Timeline
from perdure.inspector.view import PageView
from perdure.views import to_json

WINDOW = 100
_MAP_FROM = 60  # steps: a shorter run needs no map
_CHANGES_MAX, _HITS_MAX, _CHILDREN_MAX, _MESSAGES_MAX = 50, 100, 50, 50
_FINISHED = ("done", "failed", "cancelled", "undone", "exported")
_WORK = ("step", "effect", "undo")


async def run(view: PageView) -> dict[str, Any]:
    """Return a run with a window of its steps and the chosen one, or a part of it for the script."""
    handle = await view.store.aget_run(view.params["id"])
    match view.query.get("part"):
        case "steps":
            return {"rows": (await _window(view, handle, await handle.arefresh()))["rows"]}
        case "outline":
            return await _drawing(view, handle)
        case "find":
            return {"hits": await _hits(view, handle)}
    info = await handle.arefresh()
    shown = await _window(view, handle, info)
    chosen = await _chosen(view, handle, shown.pop("steps"), shown["outline"])
    questions, details = await asyncio.gather(view.store.aquestions(handle), _details(view, handle, info, shown))
    outline = shown.pop("outline")
    return {
        "run": row_of(info) | {"priority": info.priority, "attempts": info.attempts, "owner": info.owner},
        "is_running": info.status not in _FINISHED,
        "ended_at": _end(info),
        "cards": [card(view, one) for one in questions],
        "hits": await _hits(view, handle) if view.query.get("find") else None,
        "chosen": chosen,
        "verbs": [(verb, VERBS[verb][0]) for verb in VERBS if info.status in VERBS[verb][1]],
        "dangerous": DANGEROUS,
        "to_scale": view.query.get("time") == "scale",
        "window": WINDOW,
        "has_map": shown["total"] > _MAP_FROM,
        "is_long": outline is not None,
        **shown,
        **details,
    }


def _end(info: RunInfo) -> datetime:
    return info.changed_at if info.status in _FINISHED else datetime.now(UTC)


async def _details(view: PageView, handle: Run, info: RunInfo, shown: dict[str, Any]) -> dict[str, Any]:
    """Return what concerns the run as a whole: arguments, outcome, state, family, messages."""
    children, messages = await asyncio.gather(handle.achildren(limit=_CHILDREN_MAX), handle.amessages())
    outcome, damage = None, None
    try:
        outcome = await handle.aoutcome(raw=True)
    except Damaged as error:  # the run is shown all the same
        damage = str(error)
    waits = info.waiting_for
    stuck = f"{waits.name}: {waits.text}".removeprefix(": ") if waits is not None and info.status == "stuck" else None
    return {
        "arguments": await _or_none(view, handle.aarguments(raw=True)),
        "state": await _or_none(view, handle.astate_at()) if shown["has_state"] else None,
        "has_result": outcome is not None and outcome.status == "done",
        "result": view.value(outcome.result) if outcome else None,
        "error": outcome.error if outcome else damage or stuck,
        "traceback": outcome.traceback if outcome else None,
        "children": [row_of(one) for one in children],
        "messages": [
            {"topic": one.topic, "value": view.value(one.value), "at": one.at, "is_received": one.is_received}
            for one in messages[-_MESSAGES_MAX:]
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


async def _window(view: PageView, handle: Run, info: RunInfo) -> dict[str, Any]:
    """Return the steps of the window, drawn, and what is known of all of them."""
    begin = view.number("from", 0)
    number = view.number("step", 0)
    if "from" not in view.query and number:
        begin = (number - 1) // WINDOW * WINDOW
    outline, steps = None, [] if begin else await handle.asteps(limit=WINDOW + 1, values="small")
    if begin or len(steps) > WINDOW:
        outline = await handle.aoutline()
        begin = min(begin, max(len(outline) - 1, 0) // WINDOW * WINDOW)
        steps = steps or await handle.asteps(after=outline.cursor(begin), limit=WINDOW, values="small")
        outline = outline if len(outline) > WINDOW else None
    steps = steps[:WINDOW]
    is_last = outline is None or begin + WINDOW >= len(outline)
    marks = [_mark(one) for one in steps]
    end = _end(info).timestamp() if is_last else max((until or begun for _, begun, until in marks), default=0.0)
    line = Timeline(marks, end, to_scale=view.query.get("time") == "scale")
    every = zip(outline.kinds, outline.started_at, outline.ended_at, strict=True) if outline else marks
    kinds = outline.kinds if outline else [one.kind for one in steps]
    return {
        "steps": steps,
        "outline": outline,
        "rows": [_row(view, one, line) for one in steps],
        "this_from": begin,
        "total": len(outline) if outline else len(steps),
        "pauses": line.labels(),
        "worked_s": sum(until - begun for kind, begun, until in every if kind in _WORK and until),
        "undone": kinds.count("undo"),
        "has_state": outline.has_state if outline else True,
    }


def _mark(step: Step) -> Mark:
    return step.kind, step.started_at.timestamp(), None if step.ended_at is None else step.ended_at.timestamp()


def _row(view: PageView, step: Step, line: Timeline) -> dict[str, Any]:
    """Return a step as the list shows it."""
    x, width = line.bar(*_mark(step)[1:])
    took = (step.ended_at - step.started_at).total_seconds() if step.ended_at else None
    if step.error or step.status == "in doubt":
        text = step.error or f"key {step.key}"
    elif step.result_bytes is not None:
        text = f"{step.result_bytes:,} bytes"
    else:
        text = "" if step.result is None else values.brief(view.value(step.result), 120)
    return {
        "number": step.number,
        "kind": step.kind,
        "status": step.status,
        "name": values.brief(step.name.removeprefix("perdure."), 80),
        "path": step.path,
        "took": values.lasted(took),
        "attempts": step.attempts,
        "text": values.brief(text, 120),
        "x": x,
        "width": width,
    }


async def _drawing(view: PageView, handle: Run) -> dict[str, Any]:
    """Return all steps as short lists: each begins `starts` microseconds after the one before and takes `lasts`."""
    info, outline = await asyncio.gather(handle.arefresh(), handle.aoutline())
    marks = list(zip(outline.kinds, outline.started_at, outline.ended_at, strict=True))
    line = Timeline(marks, _end(info).timestamp(), to_scale=view.query.get("time") == "scale")
    named = {name: number for number, name in enumerate(dict.fromkeys(map(_colour, outline.kinds, outline.statuses)))}
    before, starts, lasts = line.start, [], []
    for _, begin, until in marks:
        starts.append(round((begin - before) * 1e6))
        lasts.append(-1 if until is None else round((until - begin) * 1e6))
        before += starts[-1] / 1e6
    return {
        "colours": list(named),
        "steps": [named[_colour(*one)] for one in zip(outline.kinds, outline.statuses, strict=True)],
        "starts": starts,
        "lasts": lasts,
        "duration": line.end - line.start,
        "gaps": [(a - line.start, b - line.start, values.lasted(b - a)) for a, b in line.gaps],
    }


def _colour(kind: str, status: str) -> str:
    if status in ("failed", "in doubt"):
        return {"failed": "bar-failed", "in doubt": "bar-doubt"}[status]
    return {"step": "bar-step", "effect": "bar-effect", "undo": "bar-effect", "ask": "bar-ask"}.get(kind, "bar-wait")


async def _hits(view: PageView, handle: Run) -> list[dict[str, Any]]:
    text = view.query.get("find", "").strip()
    found = await handle.afind_step(text, limit=_HITS_MAX) if text else []
    return [{"number": one.number, "path": one.path, "name": one.name, "status": one.status} for one in found]


async def _chosen(view: PageView, handle: Run, steps: list[Step], outline: Any) -> dict[str, Any] | None:
    """Return the chosen step with its values, and how the state changed in it; None if there is none."""
    number = view.number("step", 0)
    if not number:
        return None
    before = next((one for one in steps if one.number == number - 1), None)
    if before is None and number > 1 and outline is not None and number <= len(outline):
        [before] = await handle.asteps(after=outline.cursor(number - 2), limit=1, values=False)
    found = await handle.asteps(after=before, limit=1) if before or number == 1 else []
    if not found:
        raise NotFound(f"run {handle.id!r} has no step number {number} so far")
    [step] = found
    changes: list[Change] = []
    if outline is None or outline.has_state:
        try:
            changes = await handle.adiff(before or 0, step)
        except PerdureError:  # its checkpoints may be pruned
            changes = []
    note = {name: value for name, value in (step.note or {}).items() if name != "state"}
    return {
        "number": step.number,
        "path": step.path,
        "name": step.name.removeprefix("perdure."),
        "kind": step.kind,
        "status": step.status,
        "attempts": step.attempts,
        "started_at": step.started_at,
        "ended_at": step.ended_at,
        "key": step.key,
        "is_shared": step.shared,
        "error": step.error,
        "traceback": step.traceback,
        "arguments": view.value(step.arguments),
        "has_result": step.ended_at is not None and not step.error,
        "result": view.value(step.result),
        "note": view.value(note or None),
        "changes": changes_of(view, changes[:_CHANGES_MAX]),
        "changes_more": max(0, len(changes) - _CHANGES_MAX),
        "command": view.command("run fork", handle.id, step.path, name=f"{handle.id}-fork", keys="new"),
    }


def changes_of(view: PageView, changes: list[Change]) -> list[dict[str, Any]]:
    """Return changes of a state for a page. Values are masked by the keys that lead to them."""
    rows = []
    for change in changes:
        before, after = change.before, change.after
        for key in reversed(change.path):
            before, after = {key: before}, {key: after}
        masked = [_leaf(view.value(one), len(change.path)) for one in (before, after)]
        path = ".".join(map(str, change.path)) or "(all of it)"
        rows.append({"path": path, "kind": change.kind, "before": masked[0], "after": masked[1]})
    return rows


def _leaf(value: Any, levels: int) -> Any:
    for _ in range(levels):
        if not isinstance(value, dict):
            break
        [value] = value.values()
    return views.as_line(value) if views.role_of(value) else value


# --- the live tail


async def tail(view: PageView) -> AsyncGenerator[str, None]:
    """Yield what the steps that run now emit, as events for the page, until the run ends."""
    handle = await view.store.aget_run(view.params["id"])
    async for event in handle.astream(view.headers.get("last-event-id", ""), recorded=False):
        value = view.value(event.value) if event.kind in ("chunk", "lost", "status") else None
        text = value if isinstance(value, str) else to_json(value)
        data = {"path": event.path, "name": event.name, "text": values.safe_text(text[: values.TEXT_MAX])}
        yield f"id: {event.cursor}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"


# --- actions


async def _ask_fork(view: PageView, fields: Fields) -> Confirmation:
    run, step, name, keys = _fork_of(fields)
    command = view.command("run fork", run, step, name=name, keys=keys, who=view.who)
    text = (
        f"The new run shares everything up to step {step}, and a worker continues it from there. {run} stays as it is. "
    )
    text += "Receivers of its effects see new requests." if keys == "new" else "Receivers answer its effects as before."
    return Confirmation(f"Fork {run} after step {step}, as {name}?", text, "Fork", (command,))


async def _fork(view: PageView, fields: Fields) -> str:
    run, step, name, keys = _fork_of(fields)
    fork = await view.store.afork(run, at=step, id=name, keys=keys, who=view.who)
    return f"Forked as {fork.id}. A worker continues it."


def _fork_of(fields: Fields) -> tuple[str, str, str, Any]:
    if fields["keys"] not in ("new", "same"):
        raise UsageError("choose the keys of effects: new, or same")
    return fields["run"], fields["step"], fields["id"], fields["keys"]


async def _ask_send(view: PageView, fields: Fields) -> Confirmation:
    run, topic, text = fields["run"], fields.get("topic"), fields["value"]
    command = view.command("run send", run, text, topic=topic or None, who=view.who)
    where = f"on the topic {topic}" if topic else "without a topic"
    return Confirmation(f"Send a message to {run}?", f"{text} {where}. The run gets it once.", "Send", (command,))


async def _send(view: PageView, fields: Fields) -> str:
    await view.store.asend(fields["run"], value_in(fields["value"]), topic=fields.get("topic"), who=view.who)
    return f"Sent to {fields['run']}."


ACTIONS = (Action("fork", _ask_fork, _fork), Action("send", _ask_send, _send))
