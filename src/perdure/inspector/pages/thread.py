"""One thread: its history under a scrubber, a checkpoint as chat, tree or JSON, and what changed since another one.

A checkpoint is named by its step on the head's history (`?at=12`), or by its id (`?cp=…`) if it is on a branch or in a
namespace of LangGraph. A move of the scrubber asks for the checkpoint alone: the header `X-Part: checkpoint`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeGuard

import perdure
from perdure import Checkpoint, Thread, views
from perdure.errors import Damaged, NotFound, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Confirmation, Fields, value_in
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.views import to_json

_CHANGES_MAX, _TIPS_MAX, _MESSAGES, _MESSAGES_MAX = 200, 20, 30, 1000
_POINTS = 200  # of the picture of sizes
_COPY_MAX, _EDIT_MAX = 100_000, 100_000  # characters
_NOTHING_BEFORE = {"step": None, "asked": "", "id": None}
_MOVING = "checkpoint"  # the part that a move of the scrubber replaces


async def thread(view: PageView) -> dict[str, Any]:
    """Return a checkpoint of a thread and, unless only the scrubber moved, its history."""
    handle = view.store.thread(view.params["name"])
    head = await handle.aget_head()
    if head is None:
        raise NotFound(f"thread {handle.name!r} has no checkpoint")
    shown, damage = await _chosen(view, handle, head), ""
    before, since, state = None, dict(_NOTHING_BEFORE), None
    try:
        shown = await _load(handle, shown)
        state = shown.state
        before, since = await _compared(view, handle, shown)
    except Damaged as error:  # what is left of the thread is shown all the same
        damage = str(error)
    data = {
        "damage": damage,
        "name": handle.name,
        "head": {"id": head.id, "step": head.step},
        "checkpoint": pick(shown, "id step parent at note kind size_bytes is_head")
        | {"metadata": view.value(shown.metadata)},
        "since": since,
        "history": None if view.headers.get("x-part") == _MOVING else await _history(view, handle),
        "graph": await _graph(view, handle, shown) if views.is_checkpoint(state) else None,
        **_states(view, state, None if before is None else before.state),
    }
    editing = view.query.get("edit")
    may_edit = shown.is_head and data["graph"] is None and not damage
    data["may_edit"] = may_edit and not view.settings.read_only
    data["editing"] = _editing(view, state, editing) if may_edit and editing is not None else None
    return data


async def _chosen(view: PageView, handle: Thread, head: Checkpoint) -> Checkpoint:
    """Return the checkpoint that the URL names, without its state."""
    if view.query.get("cp"):
        return await handle.aload(view.query["cp"], strict=True, raw=True)
    at = view.number("at", head.step)
    return head if at == head.step else await handle.aat_step(at)


async def _load(handle: Thread, checkpoint: Checkpoint) -> Checkpoint:
    return await handle.aload(checkpoint.id, raw=True, strict=True)


async def _compared(view: PageView, handle: Thread, shown: Checkpoint) -> tuple[Checkpoint | None, dict[str, Any]]:
    """Return the checkpoint that this one is compared with, and how the page names it. None: there is none before."""
    asked = view.query.get("base", "")
    if not asked:
        if shown.parent is None:
            return None, dict(_NOTHING_BEFORE)
        try:
            base = await handle.aload(shown.parent, raw=True, strict=True)
        except NotFound:  # it was pruned
            return None, dict(_NOTHING_BEFORE)
    elif asked == "first":
        base = await _load(handle, await _first(handle))
    else:
        base = await _load(handle, await handle.aat_step(view.number("base", 0)))
    return base, {"step": base.step, "asked": asked, "id": base.id}


async def _first(handle: Thread) -> Checkpoint:
    """Return the oldest checkpoint of the head's history that is left."""
    try:
        return await handle.aat_step(0)
    except NotFound:  # it was pruned
        return (await handle.asizes(points=2))[0]


async def _history(view: PageView, handle: Thread) -> dict[str, Any]:
    """Return what is the same for every checkpoint of a thread: sizes, notes, branches, pins, who changed it."""
    info, points, tips, pins, actions = await asyncio.gather(
        handle.ainfo(),
        handle.asizes(points=_POINTS),
        handle.abranches(),
        handle.apins(),
        view.store.ops.aactions(subject=f"thread {handle.name}", limit=5),
    )
    return pick(info, "created_at updated_at forked_at") | {
        "metadata": view.value(info.metadata),
        "first": points[0].step if points else 0,
        "sizes": [{"step": one.step, "bytes": one.size_bytes, "note": one.note} for one in points],
        "branches": [pick(one, "id step at note is_head") for one in tips[:_TIPS_MAX]],
        "branch_count": len(tips),
        "pins": [pick(one, "name checkpoint at") for one in pins],
        "actions": [pick(one, "who action at") for one in actions],
    }


async def _graph(view: PageView, handle: Thread, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what LangGraph keeps beside the values of a checkpoint of its own."""
    about = await views.adescribe(handle, checkpoint)
    values_of = {name: view.value(getattr(about, name)) for name in ("interrupts", "pending_writes", "metadata")}
    return pick(about, "namespace namespaces next checkpoint_id problem") | values_of


# --- the state


def _states(view: PageView, state: Any, before: Any) -> dict[str, Any]:
    """Return a state in the forms that a page shows, and the changes from the one before."""
    inner, earlier = (views.values_of(one) if views.is_checkpoint(one) else one for one in (state, before))
    changes = perdure.compare(earlier, inner) if before is not None else []
    plain = view.value(inner)
    manifest = inner.get("manifest") if isinstance(inner, dict) else None
    chats = _chats(view, plain, earlier)
    forms = [name for name, there in (("chat", chats), ("prompt", is_manifest(manifest))) if there]
    form = view.query.get("view") or ("chat" if chats else "tree")
    text = to_json(plain, indent=2) if form == "json" else None
    return {
        "state": plain,
        "form": form if form in ("tree", "json", *forms) else "tree",
        "forms": [*forms, "tree", "json"],
        "text": None if text is None else text[:_COPY_MAX],
        "text_more": 0 if text is None else max(0, len(text) - _COPY_MAX),
        "chats": chats if form == "chat" else {},
        "prompt": prompt(manifest) if form == "prompt" and is_manifest(manifest) else None,
        "changes": view.changes(changes, _CHANGES_MAX),
        "marks": [(tuple(map(_key, one.path)), one.kind) for one in changes[:1000] if one.kind != "removed"],
    }


def _key(part: Any) -> Any:
    """Return a part of a path as the tree of a plain value names it."""
    return part if isinstance(part, int) and not isinstance(part, bool) else str(views.readable(part))


def _chats(view: PageView, state: Any, before: Any) -> dict[str, Any]:
    """Return the lists of chat messages in a state: the last messages of each."""
    lists = {"": state} if isinstance(state, list) else state if isinstance(state, dict) else {}
    old = {"": before} if isinstance(before, list) else before if isinstance(before, dict) else {}
    most = view.number("last", _MESSAGES, least=1, most=_MESSAGES_MAX)
    chats = {}
    for name, messages in lists.items():
        if name == "turns" and _are_turns(messages):  # of perdure.memory.Conversation
            messages = [{"role": one["role"], "content": one["text"]} for one in messages]
        if not views.are_messages(messages):
            continue
        known = len(old[name]) if isinstance(old.get(name), list | tuple) else len(messages)
        start = max(0, len(messages) - most)
        chats[name] = {
            "earlier": start,
            "messages": [_message(one) | {"is_new": at >= known} for at, one in enumerate(messages[start:], start)],
        }
    return chats


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and {"role", "text"} == set(one) for one in value)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a bubble: who, what was said, and the tools that were called."""
    calls = message.get("tool_calls")
    text = views.text_of({**message, "tool_calls": None} if isinstance(calls, list) else message)
    return {
        "role": views.role_of(message),
        "name": message.get("name"),
        "text": values.safe_text(text[: values.TEXT_MAX]),
        "more": max(0, len(text) - values.TEXT_MAX),
        "calls": [_call(one) for one in calls] if isinstance(calls, list) else [],
    }


def _call(call: Any) -> dict[str, str]:
    function: dict[str, Any] = call.get("function", call) if isinstance(call, dict) else {"name": call}
    arguments: Any = next((function[name] for name in ("args", "arguments", "input") if name in function), {})
    return {"name": values.brief(function.get("name"), 100), "arguments": values.brief(arguments, 300)}


# --- the prompt of a turn


def is_manifest(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value of a raw state is the manifest of a prompt."""
    return isinstance(value, dict) and {"budget_tokens", "tokens", "query", "left_out"} <= set(value)


def prompt(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a prompt by part: what went in, and what was left out and why.

    It names items by their keys and holds texts, so that nothing in it is masked by the name of a field.
    """
    said: dict[str, Any] = views.readable(manifest)
    turns = said.get("turns")
    inside = {name: said.get(name) or [] for name in ("pinned", "procedures", "memories", "progress", "scratchpad")}
    inside["summary"] = ["the summary"] if said.get("summary") else []
    inside["turns"] = [f"turns {turns[0]} to {turns[1] - 1}"] if isinstance(turns, list) and len(turns) == 2 else []
    omitted = [one for one in said["left_out"] if isinstance(one, dict)]
    parts = [
        {"name": name, "entries": entries, "left_out": [one for one in omitted if one.get("part") == name]}
        for name, entries in inside.items()
    ]
    known = ("query", "instructions", "tokens", "budget_tokens", "tokenizer", "thread", "checkpoint")
    return {**{name: said.get(name) for name in known}, "parts": parts}


# --- editing


def _editing(view: PageView, state: Any, text: str) -> dict[str, Any]:
    """Return the value that a person wants to edit, as JSON, or why it cannot be."""
    path, value, problem = _path(text), state, ""
    try:
        for part in path:
            value = value[part]
    except (LookupError, TypeError):
        value, problem = None, "It is not there any more."
    shown = to_json(value, indent=2) if _is_json(value) else ""
    if not shown:
        problem = "This is no JSON value: edit it in your code."
    if view.value_at(path, value) != values.plain(value, reveal=True):
        problem = "It holds a secret, which is masked: start the inspector with --reveal to edit it."
    elif len(shown) > _EDIT_MAX:
        problem = "It is too large to edit here: choose a part of it."
    return {"path": text, "label": shown_path(path), "text": "" if problem else shown, "problem": problem}


def _is_json(value: Any) -> bool:
    """Return whether a value of a raw state is one of JSON's own, so that its text says all of it."""
    if type(value) is dict:
        return "<type>" not in value and all(type(key) is str and _is_json(one) for key, one in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and value - value == 0)


def _path(text: str) -> list[Any]:
    path = value_in(text)
    if not isinstance(path, list) or not path or not all(type(part) in (str, int) for part in path):
        raise UsageError(f"{text[:80]!r} is no path: a JSON list of keys and positions is needed")
    return path


def shown_path(path: list[Any]) -> str:
    """Return a path for people: `tasks[2].owner`."""
    text = "".join(f"[{part}]" if type(part) is int else f".{part}" for part in path)
    return values.safe_text(text.removeprefix("."))


# --- actions


async def fork_thread(view: PageView, fields: Fields) -> Confirmation:
    """Fork a thread at a checkpoint."""
    thread, at, name = fields["thread"], fields["checkpoint"], fields["name"]

    async def do() -> str:
        await view.store.thread(thread).afork(at, name=name, who=view.who)
        return f"Forked as {name}."

    text = f"A thread of its own continues from checkpoint {at}. Nothing is copied, and {thread} stays as it is."
    command = view.signed("thread fork", thread, at, name=name)
    return Confirmation(f"Fork {thread} as {name}?", text, "Fork", (command,), do)


async def rollback_thread(view: PageView, fields: Fields) -> Confirmation:
    """Roll a thread back to a checkpoint."""
    thread, at, note = fields["thread"], fields["checkpoint"], fields.get("note") or None

    async def do() -> str:
        head = await view.store.thread(thread).arollback(at, note=note, who=view.who)
        return f"Rolled back to {at}: the new head is {head.id}."

    text = "A new head that equals this checkpoint is saved. What came after it stays in the history."
    command = view.signed("thread rollback", thread, at, note=note)
    return Confirmation(f"Roll {thread} back to {at}?", text, "Roll back", (command,), do)


async def pin_thread(view: PageView, fields: Fields) -> Confirmation:
    """Pin a checkpoint."""
    thread, at, name = fields["thread"], fields["checkpoint"], fields["name"]

    async def do() -> str:
        await view.store.thread(thread).apin(at, name=name, who=view.who)
        return f"Pinned {at} as {name}."

    text = f"No retention rule removes checkpoint {at}, and the thread does not expire, until it is unpinned."
    return Confirmation(f"Pin {at} as {name}?", text, "Pin", (view.signed("thread pin", thread, at, name=name),), do)


async def unpin_thread(view: PageView, fields: Fields) -> Confirmation:
    """Remove a pin."""
    thread, name = fields["thread"], fields["name"]

    async def do() -> str:
        await view.store.thread(thread).aunpin(name, who=view.who)
        return f"The pin {name} is removed."

    text = "Retention rules apply to its checkpoint again. Nothing is removed now."
    command = view.signed("thread unpin", thread, name=name)
    return Confirmation(f"Remove the pin {name}?", text, "Unpin", (command,), do, is_danger=True)


async def edit_thread(view: PageView, fields: Fields) -> Confirmation:
    """Save a new checkpoint with one value changed, if the head is still the one that was seen."""
    thread, path, note, expect = fields["thread"], _path(fields["path"]), fields.get("note") or None, fields["expect"]
    try:
        value = json.loads(fields["value"])
    except (ValueError, RecursionError):
        raise UsageError("the value must be JSON: text stands in double quotes") from None

    async def do() -> str:
        saved = await view.store.thread(thread).aedit(path, value, note=note, expect=expect, who=view.who)
        return f"Saved as {saved.id}: {shown_path(path)} is changed."

    text = f"{shown_path(path)} becomes {values.brief(value, 300)}. A new checkpoint is saved; the old one stays."
    command = view.signed("thread edit", thread, to_json(path), to_json(value), note=note, expect=expect)
    return Confirmation(f"Edit {shown_path(path)} of {thread}?", text, "Save", (command,), do)


ACTIONS = (fork_thread, rollback_thread, pin_thread, unpin_thread, edit_thread)
