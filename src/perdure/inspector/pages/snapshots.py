"""The snapshots, what changed since one or between two, and what restoring one would do."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from perdure import PerdureError, UsageError
from perdure.inspector.actions import Confirmation, Fields, count
from perdure.inspector.values import pick
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
        "snapshots": [
            pick(one, "name note good taken_at keep_until") | {"held_bytes": size}
            for one, size in zip(kept, held, strict=True)
        ],
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
        paths, error = await change.apaths(raw=True), ""
    except PerdureError as damage:  # damaged, or its key is missing
        paths, error = [], str(damage)
    return {"place": _place(change), "error": error, **view.changes(paths, _PATHS_MAX)}


# --- actions


async def take_snapshot(view: PageView, fields: Fields) -> Confirmation:
    """Take a snapshot."""
    name, note = fields.get("name"), fields.get("note") or None

    async def do() -> str:
        taken = await view.store.asnapshot(name or None, note=note, who=view.who)
        return f"Took snapshot {taken.name}."

    text = "It takes milliseconds. From then on the first change of a row keeps the old one, until you release it."
    command = view.signed("snapshot take", *([name] if name else []), note=note)
    return Confirmation(f"Take snapshot {name}?" if name else "Take a snapshot?", text, "Take", (command,), do)


async def release_snapshot(view: PageView, fields: Fields) -> Confirmation:
    """Release a snapshot."""
    one = await view.store.aget_snapshot(fields["snapshot"])

    async def do() -> str:
        await one.arelease(who=view.who)
        return f"Released snapshot {one.name}."

    text = f"The old data that only this snapshot shows is removed: {await one.aheld_bytes():,} bytes."
    command = view.signed("snapshot release", one.name, yes=True)
    return Confirmation(f"Release snapshot {one.name}?", text, "Release", (command,), do, is_danger=True)


async def restore_snapshot(view: PageView, fields: Fields) -> Confirmation:
    """Restore a snapshot, after saying what that would change."""
    one = await view.store.aget_snapshot(fields["snapshot"])
    actions: Counter[str] = Counter(change.action for change in await _plan(view, one))
    if not actions:
        raise UsageError(f"nothing has changed since {one.name}: there is nothing to restore")

    async def do() -> str:
        done = await view.store.arestore(one, who=view.who)
        changes = count(len(done.changes), "change")
        return f"Restored {done.snapshot}: {changes}. To undo it, restore {done.undo.name}."

    will = ", ".join(f"{action} {actions[action]:,}" for action in _KINDS if actions[action])
    text = f"This will {will} (threads, items, deployments, schedules). Runs stay as they are. "
    text += "A snapshot is taken first: restoring that one undoes it."
    command = view.signed("snapshot restore", one.name)
    return Confirmation(f"Restore snapshot {one.name}?", text, "Restore", (command,), do, is_danger=True)


ACTIONS = (take_snapshot, release_snapshot, restore_snapshot)
