"""The list of runs: search, pages, and actions for one run, the chosen ones, or all that match."""

from __future__ import annotations

import asyncio
import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure import RunInfo
from perdure.errors import UsageError
from perdure.inspector.actions import Action, Confirmation, Fields
from perdure.inspector.view import PageView

_PAGE = 100
STATUSES = ("running", "waiting", "queued", "stuck", "paused", "failed", "done", "cancelled", "undone", "exported")
_FILTERS = ("status", "function", "version", "queue", "tag", "since", "until", "id", "parent")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
# The label of each verb, the runs that it is for, and what it does.
VERBS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pause": ("Pause", ("queued", "running", "waiting"), "stops at its next step, until it is resumed"),
    "resume": ("Resume", ("paused", "stuck"), "is taken up again by a worker"),
    "retry": ("Retry", ("failed",), "continues with the current code at the call that failed; earlier results stand"),
    "cancel": (
        "Cancel",
        ("queued", "running", "waiting", "paused", "stuck"),
        "stops for good with its children, and its effects are undone, the newest first",
    ),
    "undo": ("Undo", ("done", "failed", "cancelled"), "has its effects undone by a worker, the newest first"),
}
DANGEROUS = ("cancel", "undo")


async def runs(view: PageView) -> dict[str, Any]:
    """Return a page of the runs that meet the conditions in the URL, and the number of runs by status."""
    where = _conditions(view.query)
    others = {name: value for name, value in where.items() if name != "statuses"}
    listed, counts, functions, queues = await asyncio.gather(
        view.store.aruns(**where, before=view.query.get("before") or None, limit=_PAGE + 1),
        view.store.acount_runs(**others),
        view.store.acount_runs("function"),
        view.store.acount_runs("queue"),
    )
    return {
        "runs": _under_parents([row_of(info) for info in listed[:_PAGE]]),
        "next": listed[_PAGE - 1].cursor if len(listed) > _PAGE else None,
        "counts": dict(counts),
        "is_partial": counts.is_partial,
        "functions": sorted(functions)[:200],
        "queues": sorted(queues)[:200],
        "statuses": STATUSES,
        "filters": {name: view.query[name] for name in _FILTERS if view.query.get(name)},
        "verbs": {verb: label for verb, (label, _, _) in VERBS.items()},
        "dangerous": DANGEROUS,
    }


def row_of(info: RunInfo) -> dict[str, Any]:
    """Return a run as a row of a list."""
    wake_at = info.wake_at if info.wake_at is not None and info.wake_at > datetime.now(UTC) else None
    is_due = info.status == "waiting" and (info.is_due or wake_at is not info.wake_at)
    waits = info.waiting_for.shown if info.waiting_for else ""
    return {
        "id": info.id,
        "status": info.status,
        "function": info.function,
        "version": info.version,
        "queue": info.queue,
        "tags": info.tags,
        "created_at": info.created_at,
        "changed_at": info.changed_at,
        "wake_at": wake_at,
        "waits_for": "a worker" if is_due else waits,
        "request": info.request,
        "parent": info.parent,
        "origin": info.origin,
        "level": 0,
    }


def _under_parents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with children after their parents, where both are on the page."""
    ids = {row["id"] for row in rows}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"] if row["parent"] in ids else None, []).append(row)
    ordered: list[dict[str, Any]] = []
    waiting = children.get(None, [])[::-1]
    while waiting:
        row = waiting.pop()
        ordered.append(row)
        waiting += [one | {"level": row["level"] + 1} for one in reversed(children.get(row["id"], []))]
    return ordered


def _conditions(query: Any) -> dict[str, Any]:
    """Return the conditions in a query, as `store.runs` takes them. Raises UsageError."""
    asked = {name: query.get(name, "").strip() for name in _FILTERS}
    where: dict[str, Any] = {name: asked[name] for name in ("function", "version", "queue", "parent") if asked[name]}
    if asked["status"]:
        where["statuses"] = asked["status"].split(",")
    if asked["id"]:
        where["id_prefix"] = asked["id"]
    if asked["tag"]:
        where["tags"] = dict(_tag(text) for text in _words(asked["tag"]))
    return where | {name: time_in(name, asked[name]) for name in ("since", "until") if asked[name]}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"tags {text[:80]!r}: {error}") from error


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"tag {text[:80]!r}: KEY=VALUE is needed, such as customer=c-42")
    return key, value


def time_in(name: str, text: str) -> datetime:
    """Return the time that a person typed: an age, or a date. Raises UsageError."""
    if age := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{name} {text[:40]!r}: 30m, 2h, 3d or a date such as 2026-11-18T09:00") from None


# --- actions


async def _ask(view: PageView, fields: Fields) -> Confirmation:
    ids, verb, where = _chosen(fields)
    label, _, text = VERBS[verb]
    if len(ids) == 1:
        run = await view.store.aget_run(ids[0])
        title, text = f"{label} {run.id}?", f"The run, which is {run.status} now, {text}."
    else:
        count = len(ids) or (await view.store.acount_runs(limit=None, **where)).total
        runs = "run" if count == 1 else "runs"
        title, text = f"{label} {count:,} {runs}?", f"Each {text}. One that cannot be changed stops no other."
        if not ids and not count:
            raise UsageError(f"no run matches that can be changed: {verb} is for {', '.join(VERBS[verb][1])} runs")
    text += f" It is recorded as {view.who}'s."
    commands = tuple(view.command(f"run {verb}", run, who=view.who) for run in ids) or (_command(view, verb, fields),)
    return Confirmation(title, text, label, commands, is_danger=verb in DANGEROUS)


async def _do(view: PageView, fields: Fields) -> str:
    ids, verb, where = _chosen(fields)
    if len(ids) == 1:
        run = await view.store.aget_run(ids[0])
        status = await getattr(run, f"a{verb}")(who=view.who)
        return f"{VERBS[verb][0]}: {run.id} is {status} now."
    result = await view.store.abulk(verb, *ids, who=view.who, **where)  # type: ignore[arg-type]  # one of VERBS
    statuses = ", ".join(f"{count:,} {status}" for status, count in result.statuses.items())
    text = f"{VERBS[verb][0]}: {result.changed:,} runs changed{f' ({statuses})' if statuses else ''}."
    refused = [f"{run}: {why}." for run, why in list(result.refused.items())[:3]]
    text = " ".join([text, *([f"{len(result.refused):,} refused."] if refused else []), *refused])
    if not result.changed:
        raise UsageError(text)
    return text


def _chosen(fields: Fields) -> tuple[list[str], str, dict[str, Any]]:
    """Return the runs, the verb, and the conditions if all that match are meant. Raises UsageError."""
    verb = fields["verb"]
    if verb not in VERBS:
        raise UsageError(f"{verb!r} is nothing that can be asked of a run")
    if fields.get("scope") == "all":
        return [], verb, {"statuses": VERBS[verb][1], **_conditions(fields)}
    if not (ids := fields.all("run")):
        raise UsageError("choose runs first, or all that match")
    return list(dict.fromkeys(ids)), verb, {}


def _command(view: PageView, verb: str, fields: Fields) -> str:
    """Return the command for all that match."""
    names = {name: {"id": "prefix"}.get(name, name) for name in _FILTERS}
    asked = {names[name]: fields.get(name) for name in _FILTERS if fields.get(name)}
    statuses = asked.pop("status", "").split(",") if asked.get("status") else [] if asked else list(VERBS[verb][1])
    return view.command(
        f"run {verb}", status=statuses, tag=_words(asked.pop("tag", "")), who=view.who, yes=True, **asked
    )


ACTIONS = (Action("runs", _ask, _do),)
