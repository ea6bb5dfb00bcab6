"""The versions of each function: which one new runs get, the canary beside it, and how the runs of each ended."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from perdure import UsageError
from perdure.inspector.actions import Action, Confirmation, Fields
from perdure.inspector.view import PageView
from perdure.ops import Deployment

_FUNCTIONS_MAX, _VERSIONS_MAX = 50, 20
_SHOWN = ("running", "queued", "waiting", "stuck", "failed", "done")


async def deployments(view: PageView) -> dict[str, Any]:
    """Return the functions that are deployed or have runs, each with its versions and how their runs ended."""
    deployed = {one.function: one for one in await view.store.ops.adeployments()}
    counts = await view.store.acount_runs("function")
    busiest = sorted(counts, key=lambda name: (-counts[name], name))
    names = list(dict.fromkeys([*deployed, *busiest]))
    functions = await asyncio.gather(*(_function(view, name, deployed.get(name)) for name in names[:_FUNCTIONS_MAX]))
    return {"functions": functions, "more": max(0, len(names) - _FUNCTIONS_MAX)}


async def _function(view: PageView, name: str, deployed: Deployment | None) -> dict[str, Any]:
    versions = set(await view.store.acount_runs("version", function=name))
    versions |= set() if deployed is None else {deployed.version, *([deployed.canary] if deployed.canary else [])}
    chosen = () if deployed is None else (deployed.version, deployed.canary)
    ordered = sorted(versions, reverse=True)
    ordered.sort(key=lambda version: version not in chosen)
    shown = ordered[:_VERSIONS_MAX]
    counts = await asyncio.gather(*(view.store.acount_runs(function=name, version=one) for one in shown))
    row: dict[str, Any] = {"name": name, "version": None, "canary": None, "share": 0.0, "since": None, "reverted": ""}
    if deployed is not None:
        row |= {"version": deployed.version, "canary": deployed.canary, "share": deployed.share}
        row |= {"since": deployed.since, "reverted": deployed.reverted or ""}
    row["versions"] = [
        {
            "version": version,
            "runs": {status: runs.get(status, 0) for status in _SHOWN},
            "failed_since": _failed(deployed, version),
        }
        for version, runs in zip(shown, counts, strict=True)
    ]
    return row


def _failed(deployed: Deployment | None, version: str) -> int | None:
    """Return how many runs of a version failed since the canary began; None if it is not compared."""
    if deployed is None or deployed.canary is None:
        return None
    return {deployed.version: deployed.failed, deployed.canary: deployed.canary_failed}.get(version)


# --- actions


async def _ask_deploy(view: PageView, fields: Fields) -> Confirmation:
    function, version, share = _choice(fields)
    canary = None if share is None else f"{share * 100:g}%"
    command = view.command("deploy", function, version, canary=canary, who=view.who)
    if share is None:
        text = f"All new runs of {function} get this version. Open runs keep theirs."
        return Confirmation(f"Deploy {_said(version)} of {function}?", text, "Deploy", (command,))
    text = (
        f"{canary} of the new runs of {function} get it; workers revert it if it fails more often than the version "
        "before. Open runs keep theirs."
    )
    return Confirmation(f"Give {canary} to {_said(version)} of {function}?", text, "Share", (command,))


async def _deploy(view: PageView, fields: Fields) -> str:
    function, version, share = _choice(fields)
    await view.store.ops.adeploy(function, version, canary=share, who=view.who)
    return f"{'New' if share is None else f'{share * 100:g}% of the new'} runs of {function} get {_said(version)}."


async def _ask_revert(view: PageView, fields: Fields) -> Confirmation:
    one = await _canary(view, fields)
    command = view.command("deploy", one.function, one.version, who=view.who)
    text = f"All new runs of {one.function} get {_said(one.version)} again. Open runs of the canary keep their version."
    return Confirmation(f"Revert {_said(one.canary)} of {one.function}?", text, "Revert", (command,), is_danger=True)


async def _revert(view: PageView, fields: Fields) -> str:
    one = await _canary(view, fields)
    await view.store.ops.adeploy(one.function, one.version, who=view.who)
    return f"Reverted {_said(one.canary)}: new runs of {one.function} get {_said(one.version)}."


async def _canary(view: PageView, fields: Fields) -> Deployment:
    for one in await view.store.ops.adeployments():
        if one.function == fields["function"] and one.canary is not None:
            return one
    raise UsageError(f"{fields['function']} has no canary any more")


def _said(version: str | None) -> str:
    return f"version {version}" if version else "the code without a version"


def _choice(fields: Fields) -> tuple[str, str, float | None]:
    """Return the function, the version and the share of a canary; None is all. Raises UsageError."""
    function, version, text = fields["function"].strip(), fields.get("version").strip(), fields.get("share").strip()
    if not function:
        raise UsageError("name a function")
    if not text or text.rstrip("% ") == "100":
        return function, version, None
    try:
        share = float(text.rstrip("% ")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise UsageError(f"share {text[:20]!r}: a percentage between 0 and 100, such as 5%; nothing for all new runs")
    return function, version, share


ACTIONS = (Action("deploy", _ask_deploy, _deploy), Action("revert", _ask_revert, _revert))
