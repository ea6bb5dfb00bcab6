"""The list of threads: search by name, time and metadata, in pages."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import ThreadInfo
from perdure.inspector.actions import value_in
from perdure.inspector.pages.runs import tag_in, time_in, words_in
from perdure.inspector.view import PageView

_PAGE = 50
_FILTERS = ("name", "tag", "since", "until")


async def threads(view: PageView) -> dict[str, Any]:
    """Return a page of the threads that meet the conditions in the URL, the most recently saved first."""
    asked = {name: view.query.get(name, "").strip() for name in _FILTERS}
    where: dict[str, Any] = {name: time_in(name, asked[name]) for name in ("since", "until") if asked[name]}
    if asked["name"]:
        where["name_prefix"] = asked["name"]
    if asked["tag"]:
        tags = (tag_in(text) for text in words_in(asked["tag"]))
        where["where"] = {key: value_in(value) for key, value in tags}
    before = view.query.get("before") or None
    listed, count = await asyncio.gather(
        view.store.athreads(**where, before=before, limit=_PAGE + 1), view.store.acount_threads(**where)
    )
    rows = await asyncio.gather(*(_row(view, info) for info in listed[:_PAGE]))
    return {
        "threads": rows,
        "next": listed[_PAGE - 1].cursor if len(listed) > _PAGE else None,
        "count": count,
        "count_is_partial": count >= 1000,
        "filters": {name: text for name, text in asked.items() if text},
    }


async def _row(view: PageView, info: ThreadInfo) -> dict[str, Any]:
    head = await view.store.thread(info.name).aget_head()
    return {
        "name": info.name,
        "steps": None if head is None else head.step + 1,
        "size_bytes": None if head is None else head.size_bytes,
        "note": None if head is None else head.note,
        "head": info.head,
        "updated_at": info.updated_at,
        "created_at": info.created_at,
        "is_fork": info.forked_at is not None,
        "metadata": view.value(info.metadata),
    }
