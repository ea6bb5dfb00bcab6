"""`store.memory(…)`: the items of one namespace, and of all below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from perdure.errors import UsageError
from perdure.memory import flows
from perdure.memory.flows import KIND, Put
from perdure.memory.labels import Labels, check_key, labels_of, path_of
from perdure.memory.models import Item, Namespace, item_of, microseconds
from perdure.memory.rows import DELETED, ItemQuery, ItemRow, NewVersion
from perdure.storage.program import Flow
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Context, Handle


class Memory(Handle):
    """The memory of one namespace. Puts, gets and deletions concern it alone; lists also what is below it."""

    def __init__(self, context: Context, labels: Iterable[str], as_of: int | None = None) -> None:
        self._context = context
        self.namespace: Labels = tuple(labels)
        self._path = path_of(self.namespace)
        self._as_of = as_of

    def __repr__(self) -> str:
        return f"<Memory {'/'.join(map(repr, self.namespace)) or 'of everything'}>"

    def as_of(self, when: datetime) -> Memory:
        """The same namespace as it was known at a time; it cannot be written to. Does no I/O."""
        at = microseconds(when, "as_of")
        if at is None:
            raise UsageError("as_of() wants a datetime")
        return Memory(self._context, self.namespace, at)

    @blocking
    def put(
        self,
        key: str,
        value: Any,
        *,
        text: str | None = None,
        context: str | None = None,
        kind: str = KIND,
        pinned: bool = False,
        ttl_s: float | None = None,
        valid_from: datetime | None = None,
        valid_to: datetime | None = None,
        expect: int | None = None,
        source: str | None = None,
    ) -> Flow[Item]:
        """Store a value under a key. What was there stays in the history; durable when it returns.

        It is found by `text`, or else by every text in the value, and a little by its `context` (what was said before).
        It expires after `ttl_s`. `valid_from` and `valid_to` say when the fact holds, if that differs from when it was
        learned. With `expect`, the version that must be there (0: none), it raises Conflict instead of overwriting.
        """
        put = Put(text, context, kind, pinned, ttl_s, valid_from, valid_to, expect, source)
        [item] = yield from self._put([(key, value)], put)
        return item

    aput = awaited(put)

    @blocking
    def put_many(
        self, items: Mapping[str, Any], *, kind: str = KIND, pinned: bool = False, ttl_s: float | None = None
    ) -> Flow[list[Item]]:
        """Store several values by key, all or none."""
        return self._put(list(items.items()), Put(kind=kind, pinned=pinned, ttl_s=ttl_s))

    aput_many = awaited(put_many)

    @blocking
    def get(self, key: str) -> Flow[Item | None]:
        """The item of a key, or None."""
        [row] = yield from flows.get(self._context, self._here(), [key], self._as_of)
        return None if row is None else self._item(row)

    aget = awaited(get)

    @blocking
    def get_many(self, keys: Iterable[str]) -> Flow[list[Item | None]]:
        """The items of some keys, in their order; None where there is none."""
        found = yield from flows.get(self._context, self._here(), list(keys), self._as_of)
        return [None if row is None else self._item(row) for row in found]

    aget_many = awaited(get_many)

    @blocking
    def namespaces(self) -> Flow[list[Namespace]]:
        """The namespaces at and below this one that hold items, in the order of their labels."""
        found = yield from flows.namespaces(self._context, self._path, self._as_of)
        return [Namespace(labels_of(path), items, size) for path, items, size in found]

    anamespaces = awaited(namespaces)

    @blocking
    def history(self, key: str) -> Flow[list[Item]]:
        """All versions of a key, the oldest first; a deletion is a version without a value."""
        found = yield from flows.history(self._context, self._here(), key, self._as_of)
        return [self._item(row) for row in found]

    ahistory = awaited(history)

    @blocking
    def delete(self, key: str, *, expect: int | None = None) -> Flow[bool]:
        """Remove an item; its history stays. False: there is none. With `expect`, only that version, or Conflict."""
        gone = NewVersion(check_key(key), None, gone=DELETED, expect=expect)
        [row] = yield from flows.write_versions(self._context, self._writable(), [gone], self._context.clock_us())
        return row is not None

    adelete = awaited(delete)

    # --- flows

    def _put(self, items: list[tuple[str, Any]], put: Put) -> Flow[list[Item]]:
        path, now = self._writable(), self._context.clock_us()
        versions = [flows.version_of(self._context, key, value, put, now) for key, value in items]
        found = yield from flows.write_versions(self._context, path, versions, now)
        return [self._item(row) for row in found if row is not None]

    def _item(self, row: ItemRow) -> Item:
        return item_of(row, self._context.codec)

    def _here(self) -> str:
        if not self._path:
            raise UsageError('this needs a namespace: store.memory("users", "alice")')
        return self._path

    def _writable(self) -> str:
        if self._as_of is not None:
            raise UsageError("memory as of a time cannot be written to: use store.memory(…) itself")
        return self._here()

    # Last, because in the class its name hides the type.
    @blocking
    def list(
        self,
        *,
        kind: str | None = None,
        valid_at: datetime | None = None,
        limit: int | None = 100,
        offset: int = 0,
    ) -> Flow[list[Item]]:
        """Items of this namespace and of all below it, the newest first; of one kind, or those that hold at a time."""
        then = self._as_of is not None
        now = self._context.clock_us() if self._as_of is None else self._as_of
        wanted = ItemQuery(self._path, now, then, kind or "", microseconds(valid_at, "valid_at") or 0)
        found = yield from flows.listing(self._context, wanted, limit, offset, None)
        return [self._item(row) for row in found]

    alist = awaited(list)
