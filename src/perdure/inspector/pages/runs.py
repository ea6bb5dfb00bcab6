"""The list of runs: search, pages, and actions for one run, the chosen ones, or all that match."""

from __future__ import annotations

import asyncio
import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure import RunInfo
from perdure.errors import UsageError
from perdure.inspector.actions import Confirmation, Fields, count
from perdure.inspector.values import pick
from perdure.inspector.view import PageView

_PAGE, _NAMES_MAX = 100, 200
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
        "functions": sorted(functions)[:_NAMES_MAX],
        "queues": sorted(queues)[:_NAMES_MAX],
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
    return pick(
        info, "id status function version queue priority attempts tags created_at changed_at request parent origin"
    ) | {"wake_at": wake_at, "waits_for": "a worker" if is_due else waits, "level": 0}


def why_stuck(info: RunInfo) -> str:
    """Return the error of a stuck run; "" for others."""
    waits = info.waiting_for if info.status == "stuck" else None
    return "" if waits is None else f"{waits.name}: {waits.text}".removeprefix(": ")


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


# --- conditions, as people write them


def _conditions(query: Any) -> dict[str, Any]:
    """Return the conditions in a query, as `store.runs` takes them. Raises UsageError."""
    asked = {name: query.get(name, "").strip() for name in _FILTERS}
    where: dict[str, Any] = {name: asked[name] for name in ("function", "version", "queue", "parent") if asked[name]}
    if asked["status"]:
        where["statuses"] = asked["status"].split(",")
    if asked["id"]:
        where["id_prefix"] = asked["id"]
    if asked["tag"]:
        where["tags"] = tags_in(asked["tag"])
    return where | times_in(asked)


def tags_in(text: str) -> dict[str, str]:
    """Return the tags in a text such as `customer=c-42 'city=New York'`. Raises UsageError."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise UsageError(f"tags {text[:80]!r}: {error}") from error
    if not all(key and equals for key, equals, _ in pairs):
        raise UsageError(f"tag {text[:80]!r}: KEY=VALUE is needed, such as customer=c-42")
    return {key: value for key, _, value in pairs}


def times_in(asked: dict[str, str]) -> dict[str, datetime]:
    """Return the conditions on time, `since` and `until`, of a form. Raises UsageError."""
    return {name: time_in(name, asked[name]) for name in ("since", "until") if asked[name]}


def time_in(name: str, text: str) -> datetime:
    """Return a time: `2h` is two hours ago. Raises UsageError."""
    if age := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{name} {text[:40]!r}: 30m, 2h, 3d or a date such as 2026-11-18T09:00") from None


# --- actions


async def change_runs(view: PageView, fields: Fields) -> Confirmation:
    """Pause, resume, retry, cancel or undo one run, the chosen ones, or all that match."""
    verb = fields.one_of("verb", VERBS, "run")
    label, statuses, text = VERBS[verb]
    where: dict[str, Any] = {}
    ids = list(dict.fromkeys(fields.all("run")))
    if fields.get("scope") == "all":
        ids, where = [], {"statuses": statuses, **_conditions(fields)}
    elif not ids:
        raise UsageError("choose runs first, or all that match")
    if len(ids) == 1:
        return await _change_one(view, verb, ids[0])
    number = len(ids) or (await view.store.acount_runs(limit=None, **where)).total
    if not number:
        raise UsageError(f"no run matches that can be changed: {verb} is for {', '.join(statuses)} runs")

    async def do() -> str:
        result = await view.store.abulk(verb, *ids, who=view.who, **where)  # type: ignore[arg-type]  # one of VERBS
        ended = ", ".join(f"{count:,} {status}" for status, count in result.statuses.items())
        refused = [f"{run}: {why}." for run, why in list(result.refused.items())[:3]]
        said = [f"{label}: {result.changed:,} runs changed{f' ({ended})' if ended else ''}."]
        said += [f"{len(result.refused):,} refused.", *refused] if refused else []
        if not result.changed:
            raise UsageError(" ".join(said))
        return " ".join(said)

    commands = tuple(view.signed(f"run {verb}", run) for run in ids) or (_command(view, verb, fields),)
    text = f"Each {text}. One that cannot be changed stops no other. It is recorded as {view.who}'s."
    return Confirmation(f"{label} {count(number, 'run')}?", text, label, commands, do, is_danger=verb in DANGEROUS)


async def _change_one(view: PageView, verb: str, id: str) -> Confirmation:
    (label, _, text), run = VERBS[verb], await view.store.aget_run(id)

    async def do() -> str:
        status = await getattr(run, f"a{verb}")(who=view.who)
        return f"{label}: {run.id} is {status} now."

    text = f"The run, which is {run.status} now, {text}. It is recorded as {view.who}'s."
    command = view.signed(f"run {verb}", run.id)
    return Confirmation(f"{label} {run.id}?", text, label, (command,), do, is_danger=verb in DANGEROUS)


def _command(view: PageView, verb: str, fields: Fields) -> str:
    """Return the command for all that match."""
    names = {name: {"id": "prefix"}.get(name, name) for name in _FILTERS}
    asked: dict[str, Any] = {names[name]: fields.get(name) for name in _FILTERS if fields.get(name)}
    statuses = asked.pop("status").split(",") if "status" in asked else [] if asked else list(VERBS[verb][1])
    tags = [f"{key}={value}" for key, value in tags_in(asked.pop("tag", "")).items()]
    return view.signed(f"run {verb}", status=statuses, tag=tags, yes=True, **asked)


ACTIONS = (change_runs,)
