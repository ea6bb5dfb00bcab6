"""`store.memory(…)`: the items of one namespace, and of all below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from perdure.errors import UsageError
from perdure.memory import flows, upkeep
from perdure.memory.filters import matcher
from perdure.memory.flows import KIND, Put
from perdure.memory.labels import Labels, check_key, labels_of, path_of
from perdure.memory.models import Item, MemoryStats, Namespace, item_of, microseconds
from perdure.memory.policies import KEEP, MemoryPolicy
from perdure.memory.rows import DELETED, ItemQuery, ItemRow, NewVersion, read_stats
from perdure.memory.search import Ranked, SearchRequest, search, searcher_of
from perdure.runs.calls.saving import RunJournal
from perdure.storage.program import Flow, Progress, read
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import COUNT_MAX, check_limit
from perdure.threads.context import Handle, StoreContext
from perdure.threads.retention import Erased

T = TypeVar("T")
_runs = RunJournal()


class Memory(Handle):
    """The memory of one namespace. Puts, gets and deletions concern it alone; lists also what is below it."""

    def __init__(
        self, context: StoreContext, labels: Iterable[str], as_of: int | None = None, *, raw: bool = False
    ) -> None:
        self._context, self._raw = context, raw
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
        return Memory(self._context, self.namespace, at, raw=self._raw)

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
        supersedes: str | None = None,
        schema: str | None = None,
        links: Iterable[tuple[str, str]] = (),
    ) -> Flow[Item]:
        """Store a value under a key. What was there stays in the history; durable when it returns.

        It is found by `text`, or else by every text in the value, and a little by its `context` (what was said before).
        It expires after `ttl_s`. `valid_from` and `valid_to` say when the fact holds, if that differs from when it was
        learned. `supersedes` is the key of an item that does not hold from then on: its `valid_to` is set. `schema`
        ("profile:2") names what `perdure.migration` brings up to date when it is read. `links` are pairs of a name and
        the key of another item, for `neighbours`. With `expect`, the version that must be there (0: none), it raises
        Conflict instead of overwriting.
        """
        put = Put(
            text,
            context,
            kind,
            pinned,
            ttl_s,
            valid_from,
            valid_to,
            expect,
            source,
            supersedes,
            None,
            schema,
            tuple(links),
        )
        [item] = yield from self._put("memory.put", [(key, value)], put)
        return item

    aput = awaited(put)

    @blocking
    def put_many(
        self, items: Mapping[str, Any], *, kind: str = KIND, pinned: bool = False, ttl_s: float | None = None
    ) -> Flow[list[Item]]:
        """Store several values by key, all or none."""
        return self._put("memory.put_many", list(items.items()), Put(kind=kind, pinned=pinned, ttl_s=ttl_s))

    aput_many = awaited(put_many)

    @blocking
    def get(self, key: str) -> Flow[Item | None]:
        """The item of a key, or None."""
        [found] = yield from self._read("memory.get", [key], self._got([key]))
        return found

    aget = awaited(get)

    @blocking
    def get_many(self, keys: Iterable[str]) -> Flow[list[Item | None]]:
        """The items of some keys, in their order; None where there is none."""
        wanted = [*keys]
        return self._read("memory.get_many", wanted, self._got(wanted))

    aget_many = awaited(get_many)

    @blocking
    def search(
        self,
        query: str,
        *,
        limit: int = 10,
        offset: int = 0,
        where: Mapping[str, Any] | None = None,
        kind: str | None = None,
        valid_at: datetime | None = None,
        relevant: bool = False,
        explain: bool = False,
    ) -> Flow[list[Item]]:
        """The items of this namespace and of all below it that fit a query best, by their words and, if the store was
        opened with an embedder, by their meaning. Only what holds now, or at `valid_at`.

        `where` maps fields of the value to what they must be: `{"topic": "ui", "age": {"gte": 18}}`, with eq, ne, gt,
        gte, lt, lte, in, contains, exists, and, or, not. `relevant` leaves out what is not about the query; `explain`
        says of each item how its score came about. Needs the extra `search`.
        """
        if not isinstance(query, str):
            raise UsageError(f"search() wants a text, not {type(query).__name__}")
        most, skip = check_limit(limit), check_limit(offset)
        items = self._query(kind, valid_at)
        items = items if items.valid_at else items._replace(valid_at=items.now)
        matches = self._matches(where)
        wanted = SearchRequest(query, items, COUNT_MAX if most is None else most, skip or 0, relevant, matches)
        said = [query, where, kind, valid_at, limit, offset, relevant, explain]
        return self._read("memory.search", said, self._searched(wanted, explain))

    asearch = awaited(search)

    @blocking
    def update(self, key: str, change: Callable[[Any], Any]) -> Flow[Item]:
        """Put what `change` makes of the value (None: there is none). If another writer was faster, it is called again
        with the new value. Kind, pin, validity, context and expiry stay."""
        path = self._writable()
        [item] = yield from self._write(
            "memory.update",
            lambda: [key],
            lambda commit: flows.update(self._context, path, key, change, commit),
            self._items,
        )
        return item

    aupdate = awaited(update)

    @blocking
    def forget(self, where: Mapping[str, Any], *, kind: str | None = None) -> Flow[int]:
        """Delete the items of this namespace and of all below it that match; `{}` matches all. Their history stays.
        How many."""
        matches = self._matches(where)
        if matches is None or self._as_of is not None:
            raise UsageError("forget() wants a filter, and memory as it is now; {} matches all")
        forgetting = flows.forget(self._context, self._query(kind, None), matches)
        return self._read("memory.forget", [where, kind], forgetting)

    aforget = awaited(forget)

    @blocking
    def policy(
        self,
        *,
        max_items: int | None = KEEP,
        max_bytes: int | None = KEEP,
        max_age_days: float | None = KEEP,
        ttl_s: float | None = KEEP,
        history_days: float | None = KEEP,
    ) -> Flow[MemoryPolicy]:
        """The caps of this namespace, and of each below it that has none of its own. What is given is set, None for no
        limit, and acted on at once: the oldest items that are not pinned go. History says "cap" of them."""
        said = {"max_items": max_items, "max_bytes": max_bytes, "max_age_days": max_age_days, "ttl_s": ttl_s}
        said = {name: value for name, value in {**said, "history_days": history_days}.items() if value is not KEEP}
        return (yield from upkeep.policy(self._context, self._writable(), said))

    apolicy = awaited(policy)

    def tools(self, *, read_only: bool = False, budget_tokens: int = 1000) -> list[Callable[..., Any]]:
        """Memory as tools of a model: functions `memory_search`, `memory_save` and `memory_forget` for `perdure.tools`,
        LangChain or MCP. An answer has at most `budget_tokens`. In an async run: `atools`. Does no I/O."""
        from perdure.memory.tools import memory_tools  # imported late: few programs need it

        return memory_tools(self, read_only, budget_tokens, is_async=False)

    def atools(self, *, read_only: bool = False, budget_tokens: int = 1000) -> list[Callable[..., Any]]:
        """`tools` as async functions."""
        from perdure.memory.tools import memory_tools

        return memory_tools(self, read_only, budget_tokens, is_async=True)

    @blocking
    def erase(self, key: str, *, full: bool = False) -> Flow[Erased]:
        """Erase an item for good with its history, also from the store's own files. `may_remain` of the answer names
        what may still hold it; `full` lets PostgreSQL rewrite its tables."""
        return (yield from upkeep.erase_item(self._context, self._writable(), key, full))

    aerase = awaited(erase)

    @blocking
    def neighbours(self, key: str, *, depth: int = 1) -> Flow[list[Item]]:
        """The items of this namespace that a link of this one leads to, or whose link leads here; with `depth`, their
        neighbours too. The nearest first."""
        if type(depth) is not int or depth < 1:
            raise UsageError(f"neighbours(depth={depth!r}): a number of steps from 1 on")
        found = flows.neighbours(self._context, self._here(), key, depth, self._as_of)
        return self._read("memory.neighbours", [key, depth], self._shown(found))

    aneighbours = awaited(neighbours)

    @blocking
    def migrate(self, *, progress: Progress | None = None) -> Flow[int]:
        """Write the items of this namespace and of all below it, whose schema has a newer version, anew. How many.
        `progress`: (done, of how many) items."""
        if self._as_of is not None:
            raise UsageError("memory as of a time cannot be written to: use store.memory(…) itself")
        return self._read("memory.migrate", [], flows.migrate(self._context, self._query(None, None), progress))

    amigrate = awaited(migrate)

    @blocking
    def reembed(self, *, progress: Progress | None = None) -> Flow[int]:
        """Give the items of this namespace and of all below it that have no vector of the store's embedder one: after
        the embedder was changed, or has failed. Until then they are found by their words. How many.
        `progress`: (done, of how many) items."""
        return self._read("memory.reembed", [], upkeep.reembed(self._context, self._path, progress))

    areembed = awaited(reembed)

    @blocking
    def stats(self) -> Flow[MemoryStats]:
        """How much this namespace and all below it hold."""
        tenant = yield from self._context.tenant()
        if tenant is None:
            return MemoryStats(0, 0, 0, 0, 0)
        spaces = yield from flows.namespaces(self._context, self._path, self._as_of)
        model = searcher_of(self._context).model
        versions, embedded = yield from read(partial(read_stats, tenant, self._path, model))
        items, size = sum(space[1] for space in spaces), sum(space[2] for space in spaces)
        return MemoryStats(len(spaces), items, size, versions, embedded)

    astats = awaited(stats)

    @blocking
    def namespaces(self) -> Flow[list[Namespace]]:
        """The namespaces at and below this one that hold items, in the order of their labels."""
        return self._read("memory.namespaces", [], self._spaces())

    anamespaces = awaited(namespaces)

    @blocking
    def history(self, key: str) -> Flow[list[Item]]:
        """All versions of a key, the oldest first; a deletion is a version without a value."""
        found = flows.history(self._context, self._here(), key, self._as_of)
        return self._read("memory.history", [key], self._shown(found))

    ahistory = awaited(history)

    @blocking
    def delete(self, key: str, *, expect: int | None = None) -> Flow[bool]:
        """Remove an item; its history stays. False: there is none. With `expect`, only that version, or Conflict."""
        gone, path = NewVersion(check_key(key), None, gone=DELETED, expect=expect), self._writable()
        now = self._context.clock_us()
        return self._write(
            "memory.delete",
            lambda: [key, expect],
            lambda commit: commit(self._context, path, [gone], now),
            lambda written: written[0] is not None,
        )

    adelete = awaited(delete)

    # --- flows

    def _put(self, name: str, items: list[tuple[str, Any]], put: Put) -> Flow[list[Item]]:
        path = self._writable()
        return self._write(
            name,
            lambda: [items, [getattr(put, field.name) for field in fields(put)]],
            lambda commit: flows.put(self._context, path, items, put, commit),
            lambda written: self._items(written[-len(items) :] if items else []),
        )

    def _read(self, name: str, said: list[Any], flow: Flow[T]) -> Flow[T]:
        if not _runs.wants(self._context):
            return (yield from flow)
        from perdure.memory import journal  # imported late: most calls are none of a run

        return (yield from journal.read(self._context, name, [self.namespace, self._as_of, *said], flow))

    def _write(
        self,
        name: str,
        said: Callable[[], list[Any]],
        make: Callable[[flows.Commit], Flow[list[ItemRow | None]]],
        shape: Callable[[list[ItemRow | None]], T],
    ) -> Flow[T]:
        if not _runs.wants(self._context):
            return shape((yield from make(flows.write_versions)))
        from perdure.memory import journal

        return (yield from journal.write(self._context, name, [self.namespace, *said()], make, shape))

    def _got(self, keys: list[str]) -> Flow[list[Item | None]]:
        found = yield from flows.get(self._context, self._here(), keys, self._as_of)
        return [None if row is None else self._item(row) for row in found]

    def _searched(self, wanted: SearchRequest, explain: bool) -> Flow[list[Item]]:
        found = yield from search(self._context, wanted)
        return [self._ranked(one, explain) for one in found]

    def _shown(self, flow: Flow[list[ItemRow]]) -> Flow[list[Item]]:
        return [self._item(row) for row in (yield from flow)]

    def _spaces(self) -> Flow[list[Namespace]]:
        found = yield from flows.namespaces(self._context, self._path, self._as_of)
        return [Namespace(labels_of(path), items, size) for path, items, size in found]

    def _items(self, written: list[ItemRow | None]) -> list[Item]:
        return [self._item(row) for row in written if row is not None]

    def _query(self, kind: str | None, valid_at: datetime | None) -> ItemQuery:
        now = self._context.clock_us() if self._as_of is None else self._as_of
        return ItemQuery(self._path, now, self._as_of is not None, kind or "", microseconds(valid_at, "valid_at") or 0)

    def _matches(self, where: Mapping[str, Any] | None) -> Callable[[ItemRow], bool] | None:
        if where is None:
            return None
        matches = matcher(where)
        return lambda row: matches(self._item(row).value)

    def _ranked(self, found: Ranked, explain: bool) -> Item:
        parts = {"words": found.words} | ({} if found.cosine is None else {"cosine": found.cosine})
        return replace(self._item(found.row), score=found.score, explain=parts if explain else None)

    def _item(self, row: ItemRow) -> Item:
        return item_of(row, self._context.codec, raw=self._raw)

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
        where: Mapping[str, Any] | None = None,
        kind: str | None = None,
        valid_at: datetime | None = None,
        limit: int | None = 100,
        offset: int = 0,
    ) -> Flow[list[Item]]:
        """Items of this namespace and of all below it, the newest first: those whose value matches `where` (as in
        `search`), of one kind, or that hold at a time."""
        wanted = self._query(kind, valid_at)
        found = flows.listing(self._context, wanted, limit, offset, self._matches(where))
        return self._read("memory.list", [where, kind, valid_at, limit, offset], self._shown(found))

    alist = awaited(list)
