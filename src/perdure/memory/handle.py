"""`store.memory(…)`: the items of one namespace, and of all below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import UsageError
from perdure.memory import flows, journal, maintenance, rows
from perdure.memory.erasing import erase_item, erase_label, erase_namespace
from perdure.memory.filters import matcher
from perdure.memory.flows import KIND, Commit, Written, draft_version
from perdure.memory.labels import Labels, check_key, check_str, labels_of, path_of
from perdure.memory.models import Item, MemoryStats, Namespace, item_of, microseconds
from perdure.memory.policies import KEEP, MemoryPolicy
from perdure.memory.reading import ItemReader
from perdure.memory.rows import DELETED, ItemQuery, ItemRow, NewVersion
from perdure.memory.search import search, searcher_of
from perdure.storage.program import Flow, Progress
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import Handle, StoreContext
from perdure.threads.retention import Erased
from perdure.values.durations import Duration

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import Hit

T = TypeVar("T")


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
    ) -> Flow[Item]:
        """Store a value under a key. What was there stays in the history; durable when it returns.

        It is found by `text`, or else by every text in the value, and a little by its `context` (what was said before).
        It expires after `ttl_s`. `valid_from` and `valid_to` say when the fact holds, if that differs from when it was
        learned. `supersedes` is the key of an item that does not hold from then on: its `valid_to` is set. `schema`
        ("profile:2") names what `perdure.memory.migration` brings up to date when it is read. With `expect`, the
        version that must be there (0: none), it raises Conflict instead of overwriting.
        """
        options: dict[str, Any] = {
            "text": text,
            "context": context,
            "kind": kind,
            "pinned": pinned,
            "ttl_s": ttl_s,
            "source": source,
        }
        options |= {"valid_from": valid_from, "valid_to": valid_to, "schema": schema}
        [item] = yield from self._put("memory.put", {key: value}, {**options, "expect": expect}, supersedes)
        return item

    aput = awaited(put)

    @blocking
    def put_many(
        self, items: Mapping[str, Any], *, kind: str = KIND, pinned: bool = False, ttl_s: float | None = None
    ) -> Flow[list[Item]]:
        """Store several values by key, all or none."""
        if not isinstance(items, Mapping):
            raise UsageError(f'put_many() wants values by key, {{"hobby": "hiking"}}, not a {type(items).__name__}')
        return self._put("memory.put_many", items, {"kind": kind, "pinned": pinned, "ttl_s": ttl_s})

    aput_many = awaited(put_many)

    @blocking
    def get(self, key: str) -> Flow[Item | None]:
        """The item of a key, or None."""
        [found] = yield from self._get("memory.get", [key])
        return found

    aget = awaited(get)

    @blocking
    def get_many(self, keys: Iterable[str]) -> Flow[list[Item | None]]:
        """The items of some keys, in their order; None where there is none."""
        return self._get("memory.get_many", [*keys])

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
        wanted = self._query(kind, valid_at)
        wanted = wanted if wanted.valid_at else wanted._replace(valid_at=wanted.now)
        end = None if most is None else (skip or 0) + most
        reader = self._reader(where)
        found = search(self._context, wanted, query, skip or 0, end, relevant, reader)
        said = [query, where, kind, valid_at, limit, offset, relevant, explain]
        return self._read("memory.search", said, self._ranked(found, reader, explain))

    asearch = awaited(search)

    @blocking
    def update(self, key: str, change: Callable[[Any], Any]) -> Flow[Item]:
        """Put what `change` makes of the value (None: there is none). If another writer was faster, it is called again
        with the new value. Kind, pin, validity, context and expiry stay."""
        path = self._writable()
        [item] = yield from self._write(
            "memory.update", lambda: [key], lambda commit: flows.update(self._context, path, key, change, commit)
        )
        return item

    aupdate = awaited(update)

    @blocking
    def forget(self, where: Mapping[str, Any], *, kind: str | None = None) -> Flow[int]:
        """Delete the items of this namespace and of all below it that match; `{}` matches all. Their history stays.
        How many."""
        if where is None or self._as_of is not None:
            raise UsageError("forget() wants a filter, and memory as it is now; {} matches all")
        reader = self._reader(where)
        return self._read("memory.forget", [where, kind], self._forgotten(self._query(kind), where, reader))

    aforget = awaited(forget)

    @blocking
    def policy(
        self,
        *,
        max_items: int | None = KEEP,
        max_bytes: int | None = KEEP,
        max_age: Duration | None = KEEP,
        ttl: Duration | None = KEEP,
        history: Duration | None = KEEP,
        summarize: Callable[[list[Item], Any], Any] | None = KEEP,
    ) -> Flow[MemoryPolicy]:
        """Return the caps of this namespace, and of each below it that has none of its own. Those that are named are
        set first; None is no limit. Durations are text ("90d") or a timedelta.

        Caps are acted on at once: the oldest items that are not pinned go, and their history says "cap". The first
        policy of a namespace begins with what `store.ops.retention` says.

        `summarize` gets the items that caps remove, before they go, and the value of the item "summary" of their
        namespace (None: there is none). What it returns becomes that item, in the transaction that removes them. It is
        not stored: each process that writes sets its own.
        """
        if summarize is not KEEP:
            searcher_of(self._context).summarizers[self._context.tenant_name, self._writable()] = summarize
        caps = {"max_items": max_items, "max_bytes": max_bytes, "max_age": max_age, "ttl": ttl, "history": history}
        said = {name: value for name, value in caps.items() if value is not KEEP}
        return self._read("memory.policy", [said], maintenance.policy(self._context, self._writable(), said))

    apolicy = awaited(policy)

    def tools(self, *, read_only: bool = False, budget_tokens: int = 1000) -> list[Callable[..., Any]]:
        """Memory as tools of a model: functions `memory_search`, `memory_save` and `memory_forget` for `perdure.tools`,
        an agent framework or MCP. An answer has at most `budget_tokens`. In an async run: `atools`. Does no I/O."""
        from perdure.memory.tools import memory_tools  # imported late: few programs need it

        return memory_tools(self, read_only, budget_tokens, is_async=False)

    def atools(self, *, read_only: bool = False, budget_tokens: int = 1000) -> list[Callable[..., Any]]:
        """`tools` as async functions."""
        from perdure.memory.tools import memory_tools

        return memory_tools(self, read_only, budget_tokens, is_async=True)

    @blocking
    def erase(self, key: str, *, full: bool = False) -> Flow[Erased]:
        """Erase an item for good with its history, also from snapshots and the store's own files. `may_remain` of the
        answer names what may still hold it; `full` lets PostgreSQL rewrite its tables."""
        erasing = erase_item(self._context, self._writable(), check_key(key), full)
        return self._read("memory.erase", [key], erasing)

    aerase = awaited(erase)

    @blocking
    def erase_all(self, *, full: bool = False) -> Flow[Erased]:
        """Erase this namespace and all below it, as `erase` does, with their labels and policies."""
        return self._read("memory.erase_all", [], erase_namespace(self._context, self._writable(), full))

    aerase_all = awaited(erase_all)

    @blocking
    def erase_label(self, label: str, *, full: bool = False) -> Flow[Erased]:
        """Erase every namespace at and below this one that has a label, as `erase_all` does. So
        `store.memory().erase_label("alice")` erases a user of ("users", "alice") and ("orgs", "acme", "alice")."""
        check_str(label, "a label of a namespace")
        self._check_writable()
        erasing = erase_label(self._context, self._path, label, full)
        return self._read("memory.erase_label", [label], erasing)

    aerase_label = awaited(erase_label)

    @blocking
    def migrate(self, *, progress: Progress | None = None) -> Flow[int]:
        """Write the items of this namespace and of all below it, whose schema has a newer version, anew. How many.
        `progress`: (done, of how many) items."""
        if self._as_of is not None:
            raise UsageError("memory as of a time cannot be written to: use store.memory(…) itself")
        return self._read("memory.migrate", [], flows.migrate(self._context, self._query(), progress))

    amigrate = awaited(migrate)

    @blocking
    def reembed(self, *, progress: Progress | None = None) -> Flow[int]:
        """Give the items of this namespace and of all below it that have no vector of the store's embedder one: after
        the embedder was changed, or has failed. Until then they are found by their words. How many.
        `progress`: (done, of how many) items."""
        return self._read("memory.reembed", [], maintenance.reembed(self._context, self._path, progress))

    areembed = awaited(reembed)

    @blocking
    def unreadable(self) -> Flow[list[Item]]:
        """Return the items of this namespace and of all below it that this code cannot read, because newer code wrote
        them. Instances of classes are dicts in them. `list`, `search` and `forget` leave them out and log a warning."""
        return self._read("memory.unreadable", [], self._not_readable())

    aunreadable = awaited(unreadable)

    @blocking
    def stats(self) -> Flow[MemoryStats]:
        """How much this namespace and all below it hold."""
        return self._read("memory.stats", [], self._counted())

    astats = awaited(stats)

    @blocking
    def namespaces(self) -> Flow[list[Namespace]]:
        """The namespaces at and below this one that hold items, in the order of their labels."""
        return self._read("memory.namespaces", [], self._spaces())

    anamespaces = awaited(namespaces)

    @blocking
    def history(self, key: str) -> Flow[list[Item]]:
        """All versions of a key, the oldest first; a deletion is a version without a value."""
        path, stored = self._here(), check_key(key)

        def found() -> Flow[list[Item]]:
            return self._items((yield from flows.query(self._context, rows.read_history, path, stored, self._as_of)))

        return self._read("memory.history", [key], found())

    ahistory = awaited(history)

    @blocking
    def delete(self, key: str, *, expect: int | None = None) -> Flow[bool]:
        """Remove an item; its history stays. False: there is none. With `expect`, only that version, or Conflict."""
        flows.check_expected(expect)
        gone, path, now = NewVersion(check_key(key), gone=DELETED, expect=expect), self._writable(), self._now()
        removed = yield from self._write(
            "memory.delete", lambda: [key, expect], lambda commit: commit(self._context, path, [gone], now)
        )
        return bool(removed)

    adelete = awaited(delete)

    # --- flows

    def _put(
        self, name: str, items: Mapping[str, Any], options: Mapping[str, Any], supersedes: str | None = None
    ) -> Flow[list[Item]]:
        path, now = self._writable(), self._now()

        def put(commit: Commit) -> Flow[Written]:
            drafts = [draft_version(self._context, now, key, value, **options) for key, value in items.items()]
            versions = yield from flows.new_versions(self._context, drafts)
            if supersedes is not None:
                if supersedes in items:
                    raise UsageError("put(supersedes=…) names another item; a put of the same key overwrites it")
                start = versions[0].valid_from
                versions.insert(0, NewVersion(check_key(supersedes), closes_at=now if start is None else start))
            return (yield from flows.put(self._context, path, versions, now, commit))

        return self._write(name, lambda: [dict(items), options, supersedes], put)

    def _get(self, name: str, keys: list[str]) -> Flow[list[Item | None]]:
        def found() -> Flow[list[Item | None]]:
            places, then = [(self._here(), check_key(key)) for key in keys], self._as_of is not None
            stored = yield from flows.query(self._context, rows.read_keys, places, self._now(), then)
            return (yield from flows.decoded(self._found_items, stored))

        return self._read(name, keys, found())

    def _read(self, name: str, said: list[Any], flow: Flow[T]) -> Flow[T]:
        return journal.read(self._context, name, [self.namespace, self._as_of, *said], flow)

    def _write(
        self, name: str, said: Callable[[], list[Any]], make: Callable[[Commit], Flow[Written]]
    ) -> Flow[list[Item]]:
        return journal.write(self._context, name, lambda: [[*self.namespace], *said()], make, self._items)

    def _items(self, written: Sequence[ItemRow | None]) -> list[Item]:
        return [self._item(row) for row in written if row is not None]

    def _found_items(self, stored: Sequence[ItemRow | None]) -> list[Item | None]:
        return [None if row is None else self._item(row) for row in stored]

    def _shown(self, flow: Flow[list[ItemRow]], reader: ItemReader) -> Flow[list[Item]]:
        return reader.items((yield from flow))

    def _ranked(
        self, flow: Flow[list[tuple[ItemRow, Hit]]], reader: ItemReader, explain: bool = False
    ) -> Flow[list[Item]]:
        ranked = yield from flow
        items = []
        for item, (_, hit) in zip(reader.items(row for row, _ in ranked), ranked, strict=True):
            parts = {"words": hit.words} | ({} if hit.cosine is None else {"cosine": hit.cosine})
            items.append(replace(item, score=hit.score, explain=parts if explain else None))
        return items

    def _forgotten(self, wanted: ItemQuery, where: Mapping[str, Any], reader: ItemReader) -> Flow[int]:
        # What matches everything needs no reading: an item that this code cannot read goes too.
        count = yield from flows.forget(self._context, wanted, reader if where else lambda _: True)
        reader.report()
        return count

    def _not_readable(self) -> Flow[list[Item]]:
        reader, raw = self._reader(), ItemReader(self._context.codec, raw=True)
        rows = yield from flows.listing(self._context, self._query(), None, 0, lambda row: not reader(row))
        return raw.items(rows)

    def _newest(self, limit: int) -> Flow[list[Item]]:
        """The newest items that hold now."""
        wanted = self._query()
        reader = self._reader()
        found = flows.listing(self._context, wanted._replace(valid_at=wanted.now), limit, 0, reader)
        return self._read("memory.newest", [limit], self._shown(found, reader))

    def _spaces(self) -> Flow[list[Namespace]]:
        found = yield from flows.query(self._context, rows.read_spaces, self._query())
        return [Namespace(labels_of(path), items, size) for path, items, size in found]

    def _counted(self) -> Flow[MemoryStats]:
        spaces, model = (yield from self._spaces()), searcher_of(self._context).model
        counted = yield from flows.query(self._context, rows.read_stats, self._query(), model)
        items, size = sum(space.items for space in spaces), sum(space.size_bytes for space in spaces)
        return MemoryStats(len(spaces), items, size, *counted)

    def _now(self) -> int:
        return self._context.clock_us() if self._as_of is None else self._as_of

    def _query(self, kind: str | None = None, valid_at: datetime | None = None) -> ItemQuery:
        holds_at = microseconds(valid_at, "valid_at") or 0
        named = "" if kind is None else check_name(kind, "kind")
        return ItemQuery(self._path, self._now(), self._as_of is not None, named, holds_at)

    def _reader(self, where: Mapping[str, Any] | None = None) -> ItemReader:
        return ItemReader(self._context.codec, raw=self._raw, matches=None if where is None else matcher(where))

    def _item(self, row: ItemRow) -> Item:
        return item_of(row, self._context.codec, raw=self._raw)

    def _here(self) -> str:
        if not self._path:
            raise UsageError('this needs a namespace: store.memory("users", "alice")')
        return self._path

    def _writable(self) -> str:
        self._check_writable()
        return self._here()

    def _check_writable(self) -> None:
        if self._as_of is not None:
            raise UsageError("memory as of a time cannot be written to: use store.memory(…) itself")

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
        `search`), of one kind, or that hold at a time. The newest 100, unless `limit` says otherwise; None: all."""
        wanted = self._query(kind, valid_at)
        reader = self._reader(where)
        found = flows.listing(self._context, wanted, limit, offset, reader)
        return self._read("memory.list", [where, kind, valid_at, limit, offset], self._shown(found, reader))

    alist = awaited(list)
