"""The list of threads: search by name, time and metadata, in pages."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import ThreadInfo
from perdure.errors import Damaged
from perdure.inspector.actions import value_in
from perdure.inspector.pages.runs import tags_in, times_in
from perdure.inspector.values import pick
from perdure.inspector.view import PageView

_PAGE = 50
_FILTERS = ("name", "tag", "since", "until")


async def threads(view: PageView) -> dict[str, Any]:
    """Return a page of the threads that meet the conditions in the URL, the most recently saved first."""
    asked = {name: view.query.get(name, "").strip() for name in _FILTERS}
    where: dict[str, Any] = dict(times_in(asked))
    if asked["name"]:
        where["name_prefix"] = asked["name"]
    if asked["tag"]:
        where["where"] = {key: value_in(value) for key, value in tags_in(asked["tag"]).items()}
    before = view.query.get("before") or None
    listed, count = await asyncio.gather(
        view.store.athreads(**where, before=before, limit=_PAGE + 1), view.store.acount_threads(**where)
    )
    return {
        "threads": await asyncio.gather(*(_row(view, info) for info in listed[:_PAGE])),
        "next": listed[_PAGE - 1].cursor if len(listed) > _PAGE else None,
        "count": count,
        "count_is_partial": count >= 1000,
        "filters": {name: text for name, text in asked.items() if text},
    }


async def _row(view: PageView, info: ThreadInfo) -> dict[str, Any]:
    about: dict[str, Any] = {"steps": None, "size_bytes": None, "note": None, "damage": ""}
    try:
        head = await view.store.thread(info.name).aget_head()
        if head is not None:
            about |= {"steps": head.step + 1} | pick(head, "size_bytes note")
    except Damaged as error:  # one damaged thread hides no other
        about["damage"] = str(error)
    row = pick(info, "name head updated_at created_at") | about
    return row | {"is_fork": info.forked_at is not None, "metadata": view.value(info.metadata)}
