"""Memory: namespaces with their caps, items, search with its scores explained, an item's history, the last prompt."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote, unquote

from perdure.errors import ExtraMissing, NotFound, UsageError
from perdure.inspector.actions import Confirmation, Fields
from perdure.inspector.pages.thread import is_manifest, prompt
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.memory import Item, Memory, MemoryPolicy

_PAGE, _SPACES_MAX = 50, 500
Labels = tuple[str, ...]


async def memory(view: PageView) -> dict[str, Any]:
    """Return the namespaces and, of the chosen one, its caps, its items or what a search found, and one item."""
    labels, asked = labels_of(view.query.get("ns", "")), view.query.get("q", "").strip()
    here = view.store.memory(*labels, raw=True)
    spaces, stats, (items, more, problem), chosen = await asyncio.gather(
        view.store.memory().anamespaces(), here.astats(), _items(view, here, asked), _chosen(view)
    )
    return {
        "namespace": text_of(labels),
        "labels": labels,
        "namespaces": [
            {"name": text_of(one.labels), "count": one.items, "size_bytes": one.size_bytes}
            for one in spaces[:_SPACES_MAX]
        ],
        "namespaces_more": max(0, len(spaces) - _SPACES_MAX),
        "policy": _caps(await here.apolicy()) if labels else None,
        "stats": {"count": stats.items, "size_bytes": stats.size_bytes, "versions": stats.versions},
        "search": asked,
        "problem": problem,
        "items": [_row(view, one) for one in items],
        "next": more,
        "item": chosen,
        "prompt": await _last_prompt(view, labels),
    }


async def _items(view: PageView, here: Memory, asked: str) -> tuple[list[Item], int | None, str]:
    """Return a page of items, the offset of the next one if there is more, and why there is none."""
    skip, kind = view.number("offset", 0), view.query.get("kind", "").strip() or None
    try:
        if asked:
            items = await here.asearch(asked, limit=_PAGE + 1, offset=skip, kind=kind, explain=True)
        else:
            items = await here.alist(limit=_PAGE + 1, offset=skip, kind=kind)
    except ExtraMissing as error:
        return [], None, str(error)
    return items[:_PAGE], skip + _PAGE if len(items) > _PAGE else None, ""


async def _chosen(view: PageView) -> dict[str, Any] | None:
    """Return the item that the URL names, with its versions, the newest first."""
    key = view.query.get("key")
    if key is None:
        return None
    place = view.store.memory(*labels_of(view.query.get("in", "")), raw=True)
    versions = await place.ahistory(key)
    if not versions:
        raise NotFound(f"there is no item {key!r} in {text_of(place.namespace)}")
    newest = versions[-1]
    return (
        _row(view, newest)
        | pick(newest, "text context source schema valid_from valid_to created_at")
        | {
            "is_there": newest.gone is None and newest.ended_at is None,
            "versions": [
                pick(one, "version at gone pinned") | {"value": _value(view, one)} for one in reversed(versions)
            ],
        }
    )


def _row(view: PageView, item: Item) -> dict[str, Any]:
    parts = item.explain or {}
    return pick(item, "key version kind pinned at expires_at size_bytes score") | {
        "namespace": text_of(item.namespace),
        "value": _value(view, item),
        "matched": parts.get("matched"),
        "words": parts.get("words"),
        "cosine": parts.get("cosine"),
    }


def _value(view: PageView, item: Item) -> Any:
    """Return the value of an item, masked if its key looks secret."""
    [value] = view.value({item.key: item.value}).values()
    return value


def _caps(policy: MemoryPolicy) -> dict[str, Any]:
    ages = {name: getattr(policy, name) for name in ("max_age", "ttl", "history")}
    seconds = {name: None if age is None else age.total_seconds() for name, age in ages.items()}
    return {"max_items": policy.max_items, "max_bytes": policy.max_bytes, **seconds}


async def _last_prompt(view: PageView, labels: Labels) -> dict[str, Any] | None:
    """Return the manifest of the last prompt of a user's conversation, where `AgentMemory` keeps it by default."""
    if len(labels) < 2 or labels[0] != "users":
        return None
    try:
        head = await view.store.thread(f"users/{labels[1]}").aload(raw=True)
    except NotFound:
        return None
    manifest = head.state.get("manifest") if isinstance(head.state, dict) else None
    return {"of": f"users/{labels[1]}", **prompt(manifest)} if is_manifest(manifest) else None


# --- namespaces as text, as commands write them


def text_of(labels: Labels) -> str:
    """Return a namespace as text: `users/alice`; "/" is all of memory."""
    return "/".join("".join(map(_quoted, label)) for label in labels) or "/"


def _quoted(char: str) -> str:
    return char if char.isprintable() and char not in "/%" else quote(char, safe="")


def labels_of(text: str) -> Labels:
    """Return the labels of a namespace that `text_of` wrote. Raises UsageError."""
    if text in ("", "/"):
        return ()
    labels = tuple(map(unquote, text.split("/")))
    if not all(labels):
        raise UsageError(f"{text[:80]!r} is no namespace: write users/alice; in a label write %2F for a slash")
    return labels


# --- actions


async def pin_item(view: PageView, fields: Fields) -> Confirmation:
    """Pin an item."""
    place, key = fields["namespace"], fields["key"]

    async def do() -> str:
        await view.store.memory(*labels_of(place), raw=True).apin(key, who=view.who)
        return f"{key} is pinned."

    command = view.signed("memory pin", place, key)
    return Confirmation(f"Pin {key} of {place}?", "No cap and no age limit removes it.", "Pin", (command,), do)


async def unpin_item(view: PageView, fields: Fields) -> Confirmation:
    """Unpin an item."""
    place, key = fields["namespace"], fields["key"]

    async def do() -> str:
        await view.store.memory(*labels_of(place), raw=True).aunpin(key, who=view.who)
        return f"{key} is not pinned any more."

    text = "Caps and age limits apply to it again: if the namespace is over its caps, the oldest items go at once."
    command = view.signed("memory unpin", place, key)
    return Confirmation(f"Unpin {key} of {place}?", text, "Unpin", (command,), do, is_danger=True)


async def forget_item(view: PageView, fields: Fields) -> Confirmation:
    """Forget an item, if it is still the version that was seen."""
    place, key, version = fields["namespace"], fields["key"], fields["version"]

    async def do() -> str:
        seen = int(version) if version.isdecimal() else None
        if not await view.store.memory(*labels_of(place), raw=True).adelete(key, expect=seen, who=view.who):
            raise NotFound(f"there is no item {key!r} any more")
        return f"{key} is forgotten. Its history stays."

    text = "Searches and prompts do not have it any more. Its history stays as long as the policy says."
    command = view.signed("memory forget", place, key, yes=True)
    return Confirmation(f"Forget {key} of {place}?", text, "Forget", (command,), do, is_danger=True)


ACTIONS = (pin_item, unpin_item, forget_item)
