"""The snapshots, what changed since one or between two, and what restoring one would do."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import PerdureError, UsageError
from perdure.inspector.actions import Action, Confirmation, Fields
from perdure.inspector.pages.run import changes_of
from perdure.inspector.view import PageView
from perdure.snapshots import RestoreChange, Snapshot, SnapshotChange

_PAGE, _PATHS_MAX, _PLAN_MAX = 100, 100, 1000
_SUBJECTS = {"thread": "Threads", "run": "Runs", "item": "Memory", "deployment": "Deployments", "schedule": "Schedules"}
_PAGES_OF = {"thread": "threads", "run": "runs", "deployment": "deployments", "schedule": "schedules"}
_KINDS = {"bring back": "added", "set back": "changed", "delete": "removed"}  # what a restore does, as a change


async def snapshots(view: PageView) -> dict[str, Any]:
    """Return the snapshots, and of the chosen one the changes since, or what restoring it would do."""
    kept = await view.store.asnapshots()
    held = await asyncio.gather(*(one.aheld_bytes() for one in kept))
    name = view.query.get("name") or (kept[0].name if kept else "")
    data: dict[str, Any] = {
        "snapshots": [_row(one, size) for one, size in zip(kept, held, strict=True)],
        "chosen": name or None,
        "until": view.query.get("until") or None,
        "is_dry_run": view.query.get("show") == "restore",
        "refused": "",
        "groups": [],
        "next": None,
        "more": 0,
        "later": [],
        "detail": None,
    }
    if not name:
        return data
    chosen = await view.store.aget_snapshot(name)
    data["later"] = [one.name for one in kept if one.taken_at > chosen.taken_at]
    try:
        changes: list[Any] = list(await (_plan(view, chosen) if data["is_dry_run"] else _diff(view, chosen, data)))
    except UsageError as error:  # such as effects that stand in the way of a restore, or two in the wrong order
        return data | {"refused": str(error)}
    page = changes[: _PLAN_MAX if data["is_dry_run"] else _PAGE]
    at = view.query.get("change")
    opened = next((one for one in page if _place(one) == at), None) if at else _first(page)
    data["next"] = page[-1].cursor if len(changes) > len(page) and not data["is_dry_run"] else None
    data["more"] = len(changes) - len(page) if data["is_dry_run"] else 0
    data["groups"] = _groups(page)
    data["detail"] = None if opened is None else await _detail(view, opened)
    return data


def _row(one: Snapshot, held: int) -> dict[str, Any]:
    times = {"taken_at": one.taken_at, "keep_until": one.keep_until}
    return {"name": one.name, "note": one.note or "", "good": one.good, "held_bytes": held, **times}


async def _diff(view: PageView, chosen: Snapshot, data: dict[str, Any]) -> list[SnapshotChange]:
    return await chosen.adiff(data["until"], limit=_PAGE + 1, after=view.query.get("after") or None)


async def _plan(view: PageView, chosen: Snapshot) -> tuple[RestoreChange, ...]:
    return (await view.store.arestore(chosen, dry_run=True)).changes


def _place(change: SnapshotChange | RestoreChange) -> str:
    return "/".join((change.what, *change.namespace, change.name))


def _first(page: list[Any]) -> Any:
    """Return what is shown first: a thread or an item, whose states are read quickly."""
    return next((one for one in page if one.what in ("item", "thread")), None)


def _groups(page: list[Any]) -> list[dict[str, Any]]:
    """Return the changes as a tree: by subject, items also by namespace."""
    groups: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for one in page:
        kind = one.kind if isinstance(one, SnapshotChange) else _KINDS[one.action]
        action = "" if isinstance(one, SnapshotChange) else one.action
        parts = (
            [_PAGES_OF[one.what], one.name] if one.what in ("thread", "run") else [_PAGES_OF.get(one.what, "memory")]
        )
        row = {"name": one.name, "kind": kind, "action": action, "place": _place(one), "page": parts}
        groups.setdefault((one.what, one.namespace), []).append(row)
    return [
        {"what": what, "title": _SUBJECTS[what], "namespace": list(namespace), "changes": rows}
        for (what, namespace), rows in groups.items()
    ]


async def _detail(view: PageView, change: SnapshotChange | RestoreChange) -> dict[str, Any]:
    try:
        paths = await change.apaths(raw=True)
    except PerdureError as error:  # damaged, or its key is missing
        return {"place": _place(change), "rows": [], "more": 0, "error": str(error)}
    rows = changes_of(view, paths[:_PATHS_MAX])
    return {"place": _place(change), "rows": rows, "more": max(0, len(paths) - _PATHS_MAX), "error": ""}


# --- actions


async def _ask_take(view: PageView, fields: Fields) -> Confirmation:
    name, note = fields.get("name").strip(), fields.get("note").strip()
    command = view.command("snapshot take", *([name] if name else []), note=note or None, who=view.who)
    text = "It takes milliseconds. From then on the first change of a row keeps the old one, until you release it."
    return Confirmation(f"Take snapshot {name}?" if name else "Take a snapshot?", text, "Take", (command,))


async def _take(view: PageView, fields: Fields) -> str:
    name, note = fields.get("name").strip(), fields.get("note").strip()
    taken = await view.store.asnapshot(name or None, note=note or None, who=view.who)
    return f"Took snapshot {taken.name}."


async def _ask_release(view: PageView, fields: Fields) -> Confirmation:
    one = await view.store.aget_snapshot(fields["snapshot"])
    text = f"The old data that only this snapshot shows is removed: {await one.aheld_bytes():,} bytes."
    command = view.command("snapshot release", one.name, who=view.who, yes=True)
    return Confirmation(f"Release snapshot {one.name}?", text, "Release", (command,), is_danger=True)


async def _release(view: PageView, fields: Fields) -> str:
    one = await view.store.aget_snapshot(fields["snapshot"])
    await one.arelease(who=view.who)
    return f"Released snapshot {one.name}."


async def _ask_restore(view: PageView, fields: Fields) -> Confirmation:
    one = await view.store.aget_snapshot(fields["snapshot"])
    changes = await _plan(view, one)
    if not changes:
        raise UsageError(f"nothing has changed since {one.name}: there is nothing to restore")
    counts = [
        f"{action} {sum(change.action == action for change in changes):,}"
        for action in _KINDS
        if any(change.action == action for change in changes)
    ]
    text = (
        f"This will {', '.join(counts)} (threads, items, deployments, schedules). Runs stay as they are. "
        "A snapshot is taken first: restoring that one undoes it."
    )
    command = view.command("snapshot restore", one.name, who=view.who)
    return Confirmation(f"Restore snapshot {one.name}?", text, "Restore", (command,), is_danger=True)


async def _restore(view: PageView, fields: Fields) -> str:
    done = await view.store.arestore(fields["snapshot"], who=view.who)
    if not done.changes:
        return "Nothing has changed since: nothing was restored."
    count = f"{len(done.changes):,} {'change' if len(done.changes) == 1 else 'changes'}"
    return f"Restored {done.snapshot}: {count}. To undo it, restore {done.undo.name}."


ACTIONS = (
    Action("snapshot-take", _ask_take, _take),
    Action("snapshot-release", _ask_release, _release),
    Action("snapshot-restore", _ask_restore, _restore),
)
