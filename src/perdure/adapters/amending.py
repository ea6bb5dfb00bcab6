"""Changes of a thread's newest state that any number of writers make: none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from perdure.adapters.agents import hold
from perdure.errors import ThreadDeleted, UsageError
from perdure.log.append import NOTHING
from perdure.storage.program import Flow
from perdure.threads.checks import check_note
from perdure.threads.models import Checkpoint
from perdure.threads.retention import checkpoint_id
from perdure.threads.saves import Save, Unchanged
from perdure.threads.thread import Thread
from perdure.values.codec import decode, encode

Changes = Sequence[tuple[Thread, Callable[[Any], Any]]]
_WRITERS_MAX = 1024
_EMPTY = b"null"  # the text of the state of a thread without checkpoints


def amend(thread: Thread, change: Callable[[Any], Any], *, note: str | None = None) -> Checkpoint | None:
    """Save what `change` makes of the newest state (None: there is none yet). If it returns None, nothing is saved.

    If another writer saves in between, `change` is called again with the new state, so nothing is lost. In a durable
    function this happens once: a replay returns the same checkpoint and does not call `change`.
    """
    return thread._run(_amending(thread, _text_change(thread, change), note=check_note(note)))


async def aamend(thread: Thread, change: Callable[[Any], Any], *, note: str | None = None) -> Checkpoint | None:
    """`amend`, awaited."""
    return await thread._arun(_amending(thread, _text_change(thread, change), note=check_note(note)))


def extend(
    thread: Thread, items: Sequence[Any], *, expect: str | Literal[False] | None = None, along: Changes = ()
) -> Checkpoint | None:
    """`amend` for a state that is a list: add items at its end. The other items are neither decoded nor encoded.

    `expect` is the id of the checkpoint that must be the newest. False: there must be none. Otherwise Conflict
    is raised. `along` are changes of other threads, as `amend` makes them, in the same transaction.
    """
    return thread._run(_amending(thread, _list_change(thread, items), expect, along=along))


async def aextend(
    thread: Thread, items: Sequence[Any], *, expect: str | Literal[False] | None = None, along: Changes = ()
) -> Checkpoint | None:
    """`extend`, awaited."""
    return await thread._arun(_amending(thread, _list_change(thread, items), expect, along=along))


class Writers:
    """Handles of threads that an adapter extends again and again, by the adapter's own names.

    A handle that has saved knows the newest state, so its next save reads nothing. If another process has deleted a
    thread and created it again, its handle is made anew.
    """

    def __init__(self, thread: Callable[..., Thread]) -> None:
        self._thread = thread
        self._handles: dict[tuple[str, ...], Thread] = {}

    def extend(self, *place: str, items: Sequence[Any], **options: Any) -> Checkpoint | None:
        """`extend` the thread of a place."""
        try:
            return extend(self._handle(place), items, **options)
        except ThreadDeleted:
            self._handles.pop(place, None)
            return extend(self._handle(place), items, **options)

    async def aextend(self, *place: str, items: Sequence[Any], **options: Any) -> Checkpoint | None:
        """`extend`, awaited."""
        try:
            return await aextend(self._handle(place), items, **options)
        except ThreadDeleted:
            self._handles.pop(place, None)
            return await aextend(self._handle(place), items, **options)

    def _handle(self, place: tuple[str, ...]) -> Thread:
        known = self._handles.pop(place, None)
        handle = self._handles[place] = known or self._thread(*place)
        if len(self._handles) > _WRITERS_MAX:
            self._handles.pop(next(iter(self._handles)))
        return handle


def _text_change(thread: Thread, change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    codec = thread._context.codec

    def merge(text: bytes) -> bytes:
        changed = change(decode(text, codec))
        if changed is None:
            raise Unchanged
        return encode(changed, codec)

    return merge


def _list_change(thread: Thread, items: Sequence[Any]) -> Callable[[bytes], bytes]:
    added = encode(list(items), thread._context.codec)

    def merge(text: bytes) -> bytes:
        if not items:
            raise Unchanged
        if text in (_EMPTY, b"[]"):
            return added
        if not (text.startswith(b"[") and text.endswith(b"]")):
            raise UsageError(f"the state of thread {thread.name!r} is no list: give its items a thread of their own")
        return b"".join((memoryview(text)[:-1], b",", memoryview(added)[1:]))  # copies the long text once

    return merge


def _amending(
    thread: Thread,
    merge: Callable[[bytes], bytes],
    expect: str | Literal[False] | None = None,
    note: str | None = None,
    along: Changes = (),
) -> Flow[Checkpoint | None]:
    others = tuple(_amendment(each, _text_change(each, change)) for each, change in along)
    head = NOTHING if expect is False else checkpoint_id(expect)
    try:
        return (yield from thread._perform(_amendment(thread, merge, head, note, others)))
    except Unchanged:
        return None
    except Exception as error:
        hold(error)  # a framework may wrap it: then the run would fail, and not be resumed
        raise


def _amendment(
    thread: Thread,
    merge: Callable[[bytes], bytes],
    expect: int | None = None,
    note: str | None = None,
    along: tuple[Save, ...] = (),
) -> Save:
    return Save(
        thread._context,
        thread._cursor,
        note,
        expect=expect,
        text=_EMPTY,
        merge=merge,
        asked=("amend",),
        along=along,
    )
