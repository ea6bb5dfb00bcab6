"""The versions of each function: which one new runs get, the canary beside it, and how the runs of each ended."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import UsageError
from perdure.inspector.actions import Confirmation, Fields
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.ops import Deployment

_FUNCTIONS_MAX, _VERSIONS_MAX = 50, 20
_STATUSES = ("running", "queued", "waiting", "stuck", "failed", "done")
_NOT_DEPLOYED = {"version": None, "canary": None, "share": 0.0, "since": None, "reverted": ""}


async def deployments(view: PageView) -> dict[str, Any]:
    """Return the functions that are deployed or have runs, each with its versions and how their runs ended."""
    deployed = {one.function: one for one in await view.store.ops.adeployments()}
    counts = await view.store.acount_runs("function")
    busiest = sorted(counts, key=lambda name: (-counts[name], name))
    names = list(dict.fromkeys([*deployed, *busiest]))
    functions = await asyncio.gather(*(_function(view, name, deployed.get(name)) for name in names[:_FUNCTIONS_MAX]))
    return {"functions": functions, "more": max(0, len(names) - _FUNCTIONS_MAX)}


async def _function(view: PageView, name: str, deployed: Deployment | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, **_NOT_DEPLOYED} | (
        pick(deployed, " ".join(_NOT_DEPLOYED)) if deployed else {}
    )
    chosen = [version for version in (row["version"], row["canary"]) if version is not None]
    # Failures are compared since the canary began.
    failed = {row["version"]: deployed.failed, row["canary"]: deployed.canary_failed} if deployed else {}
    others = set(await view.store.acount_runs("version", function=name)).difference(chosen)
    versions = [*chosen, *sorted(others, reverse=True)][:_VERSIONS_MAX]
    counts = await asyncio.gather(*(view.store.acount_runs(function=name, version=one) for one in versions))
    row["versions"] = [
        {
            "version": version,
            "runs": {status: runs.get(status, 0) for status in _STATUSES},
            "failed_since": failed.get(version) if row["canary"] is not None else None,
        }
        for version, runs in zip(versions, counts, strict=True)
    ]
    return row


async def deploy(view: PageView, fields: Fields) -> Confirmation:
    """Give all or a share of the new runs of a function to a version."""
    function, version, share = fields.get("function"), fields.get("version"), _share(fields.get("share"))
    if not function:
        raise UsageError("name a function")
    percent, said = None if share is None else f"{share * 100:g}%", _version_text(version)

    async def do() -> str:
        await view.store.ops.adeploy(function, version, canary=share, who=view.who)
        return f"{'New' if percent is None else f'{percent} of the new'} runs of {function} get {said}."

    command = view.signed("deploy", function, version, canary=percent)
    if percent is None:
        text = f"All new runs of {function} get this version. Open runs keep theirs."
        return Confirmation(f"Deploy {said} of {function}?", text, "Deploy", (command,), do)
    text = (
        f"{percent} of the new runs of {function} get it; workers revert it if it fails more often than the version "
        "before. Open runs keep theirs."
    )
    return Confirmation(f"Give {percent} to {said} of {function}?", text, "Share", (command,), do)


async def revert(view: PageView, fields: Fields) -> Confirmation:
    """End the canary of a function."""
    deployed = {one.function: one for one in await view.store.ops.adeployments()}.get(fields["function"])
    if deployed is None or deployed.canary is None:
        raise UsageError(f"{fields['function']} has no canary any more")
    function, version, canary = deployed.function, deployed.version, _version_text(deployed.canary)

    async def do() -> str:
        await view.store.ops.adeploy(function, version, who=view.who)
        return f"Reverted {canary}: new runs of {function} get {_version_text(version)}."

    text = f"All new runs of {function} get {_version_text(version)} again. Open runs of the canary keep their version."
    command = view.signed("deploy", function, version)
    return Confirmation(f"Revert {canary} of {function}?", text, "Revert", (command,), do, is_danger=True)


def _version_text(version: str) -> str:
    return f"version {version}" if version else "the code without a version"


def _share(text: str) -> float | None:
    """Return the share of a canary; None is all. Raises UsageError."""
    number = text.rstrip("% ")
    if number in ("", "100"):
        return None
    share = float(number) / 100 if number.replace(".", "", 1).isdecimal() else 0.0
    if not 0 < share < 1:
        raise UsageError(f"share {text[:20]!r}: a percentage between 0 and 100, such as 5%; nothing for all new runs")
    return share


ACTIONS = (deploy, revert)
