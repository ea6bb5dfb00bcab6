"""The `Memory` handle that `store.memory(…)` returns. Its operations are in `flows`, `search` and `maintenance`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from perdure.errors import UsageError
from perdure.memory import flows, journal, maintenance, rows, sharing
from perdure.memory.decisions import MemoryDecisions
from perdure.memory.erasing import erase_item, erase_label, erase_namespace
from perdure.memory.filters import matcher
from perdure.memory.flows import KIND, Commit, Written, draft_version
from perdure.memory.labels import Labels, check_key, check_str, path_of, subject_of
from perdure.memory.models import Item, MemoryStats, Namespace, item_of, microseconds
from perdure.memory.offers import MemoryOffers
from perdure.memory.policies import KEEP, MemoryPolicy
from perdure.memory.reading import ItemReader
from perdure.memory.reranking import Rerank, candidates, ranked
from perdure.memory.rows import DELETED, ItemQuery, ItemRow, NewVersion
from perdure.memory.scopes import searcher_of
from perdure.memory.search import search
from perdure.memory.sharing import Consistency, Reading
from perdure.storage.program import Flow, Progress
from perdure.storage.twins import awaited, blocking
from perdure.threads.actions import noted
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import StoreContext
from perdure.threads.retention import Erased
from perdure.values.durations import Duration

T = TypeVar("T")


class Memory(MemoryDecisions, MemoryOffers):
    """The items of one namespace.

    `put`, `update`, `get`, `delete`, `erase` and `history` concern this namespace alone. `list`, `search`, `forget` and
    the others also cover every namespace below it.
    """

    _reading: Reading | None = None

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
        """Return the same namespace as it was known at a time. It cannot be written to. Does no I/O."""
        at = microseconds(when, "as_of")
        if at is None:
            raise UsageError("as_of() wants a datetime")
        return Memory(self._context, self.namespace, at, raw=self._raw)

    def reading(self, consistency: Consistency, *, after: str | None = None) -> Memory:
        """Return the same namespace, read with a named consistency. Does no I/O.

        "strong" shows every write that ended before the read began. "causal" shows at least what `after`, a token, has
        seen. "eventual" shows what the store at hand holds. A store that cannot keep this raises Stale.
        """
        if self._as_of is not None:
            raise UsageError("memory as of a time is in the past: read it without reading()")
        chosen = Memory(self._context, self.namespace, raw=self._raw)
        chosen._reading = Reading.of(consistency, after)
        return chosen

    @blocking
    def token(self, *, after: str | None = None) -> Flow[str]:
        """Return a token of what this namespace holds now, for `reading("causal", after=token)` in any store.

        With `after`, it also has what that token has: so a session in several namespaces has one token.
        """
        return self._read("memory.token", [after], sharing.token(self._context, self._here(), after))

    atoken = awaited(token)

    @blocking
    def merge(self, other: Memory) -> Flow[int]:
        """Merge the items of another store's namespace into this one, and return how many have changed here.

        Only values that merge are brought, such as an `ORSet`. Kind, pin and texts of an item that is here stay.
        """
        if not isinstance(other, Memory) or other._as_of is not None:
            raise UsageError('merge() wants the memory of another store: other_store.memory("team")')
        return self._change("merge", sharing.merge(self._context, self._writable(), other._context, other._here()))

    amerge = awaited(merge)

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
        """Store a value under a key and return the new item. It is durable when the method returns.

        The previous version stays in the history. A search finds the item by `text`, or without it by every string in
        the value, and with less weight by its `context` (what was said before). The item expires after `ttl_s`.
        `valid_from` and `valid_to` say when the fact holds, if that differs from when it was learned. `supersedes` is
        the key of another item: its `valid_to` is set to the `valid_from` of this one, or to now. `schema`
        ("profile:2") names the schema of the value; `perdure.memory.migration` upgrades old values when they are read.
        `expect` is the version that must be there (0: none); if another one is, Conflict is raised and nothing is
        written.
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
        """Store several values by key, all or none, and return the new items."""
        if not isinstance(items, Mapping):
            raise UsageError(f'put_many() wants values by key, {{"hobby": "hiking"}}, not a {type(items).__name__}')
        return self._put("memory.put_many", items, {"kind": kind, "pinned": pinned, "ttl_s": ttl_s})

    aput_many = awaited(put_many)

    @blocking
    def get(self, key: str) -> Flow[Item | None]:
        """Return the item of a key, or None."""
        [item] = yield from self._get("memory.get", [key])
        return item

    aget = awaited(get)

    @blocking
    def get_many(self, keys: Iterable[str]) -> Flow[list[Item | None]]:
        """Return the items of several keys in their order, with None for a key that has no item."""
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
        rerank: Rerank | None = None,
    ) -> Flow[list[Item]]:
        """Return the items of this namespace and of all below it that match a query best, the best first.

        They are ranked by their words and, if the store was opened with an embedder, by their meaning. Only items that
        hold now, or at `valid_at`, are returned. `where` maps fields of the value to conditions:
        `{"topic": "ui", "age": {"gte": 18}}`, with eq, ne, gt, gte, lt, lte, in, contains, exists, and, or, not.
        `relevant` leaves out items that are not about the query. `explain` adds the parts of the score to each item.
        `rerank(query, items)`, plain or async, returns a number for each of the best items (4 times `limit`, from 20 to
        100), which orders them anew and becomes their score. Needs the extra `search`.
        """
        if not isinstance(query, str):
            raise UsageError(f"search() wants a text, not {type(query).__name__}")
        most, skip = check_limit(limit), check_limit(offset) or 0
        if rerank is not None and skip:
            raise UsageError("search(rerank=…) has no pages: raise limit= instead of using offset=")
        scope = self._query(kind, valid_at)
        scope = scope if scope.valid_at else scope._replace(valid_at=scope.now)
        end = candidates(most) if rerank is not None else most and skip + most
        reader = self._reader(where)
        hits = search(self._context, scope, query, skip, end, relevant, reader)
        said = [query, where, kind, valid_at, limit, offset, relevant, explain]
        words = searcher_of(self._context).words if explain else None
        return self._read("memory.search", said, ranked(hits, reader, query, most, explain=words, rerank=rerank))

    asearch = awaited(search)

    @blocking
    def update(self, key: str, change: Callable[[Any], Any]) -> Flow[Item]:
        """Put what `change` returns for the current value, and return the new item.

        `change` gets None if there is no item. If another writer was faster, it is called again with the new value.
        Kind, pin, validity, context and expiry stay.
        """
        path = self._writable()
        [item] = yield from self._write(
            "memory.update", lambda: [key], lambda commit: flows.update(self._context, path, key, change, commit)
        )
        return item

    aupdate = awaited(update)

    @blocking
    def pin(self, key: str, *, who: str | None = None) -> Flow[Item]:
        """Pin an item, and return its new version: no cap and no `max_age` removes it. Raises NotFound.

        Its value stays as it is. It needs none of your classes. `who` is recorded in `store.ops.actions()`, as in
        `unpin` and `delete`.
        """
        return self._pin("memory.pin", key, True, who)

    apin = awaited(pin)

    @blocking
    def unpin(self, key: str, *, who: str | None = None) -> Flow[Item]:
        """Unpin an item, and return its new version. Caps count it from now on. Raises NotFound."""
        return self._pin("memory.unpin", key, False, who)

    aunpin = awaited(unpin)

    @blocking
    def forget(self, where: Mapping[str, Any], *, kind: str | None = None) -> Flow[int]:
        """Delete the matching items of this namespace and of all below it, and return how many.

        `where` is a filter as in `search`; `{}` matches all. The history of the items stays.
        """
        if where is None:
            raise UsageError("forget() wants a filter; {} matches all")
        reader = self._reader(where)
        # `{}` matches without decoding, so that items that this code cannot read are deleted too.
        matches = reader if where else lambda _: True
        return self._change("forget", reader.reported(flows.forget(self._context, self._query(kind), matches)))

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
        """Set the caps that are passed, and return the policy of this namespace.

        It holds for this namespace and for each below it that has no policy of its own. None means no limit. Durations
        are text ("90d") or a timedelta. Caps take effect at once: the oldest items that are not pinned are removed, and
        their history says "cap". The first policy of a namespace starts from `store.ops.retention`.

        `summarize` is called before caps remove items. It gets these items and the value of the item "summary" of their
        namespace, or None if there is none. Its result becomes that item, in the transaction that removes the others.
        The function is not stored: each process that writes sets its own.
        """
        if summarize is not KEEP:
            searcher_of(self._context).summarizers[self._context.tenant_name, self._writable()] = summarize
        caps = {"max_items": max_items, "max_bytes": max_bytes, "max_age": max_age, "ttl": ttl, "history": history}
        said = {name: value for name, value in caps.items() if value is not KEEP}
        flow = maintenance.policy(self._context, self._writable(), said)
        return self._change("policy", flow) if said else self._read("memory.policy", [], flow)

    apolicy = awaited(policy)

    @blocking
    def erase(self, key: str, *, full: bool = False) -> Flow[Erased]:
        """Erase an item for good with its history, also from snapshots and the store's own files.

        `may_remain` of the result names what may still hold it. `full` lets PostgreSQL rewrite its tables.
        """
        return self._change("erase", erase_item(self._context, self._here(), check_key(key), full))

    aerase = awaited(erase)

    @blocking
    def erase_all(self, *, full: bool = False) -> Flow[Erased]:
        """Erase this namespace and all below it, as `erase` does, with their labels and policies."""
        return self._change("erase_all", erase_namespace(self._context, self._here(), full))

    aerase_all = awaited(erase_all)

    @blocking
    def erase_label(self, label: str, *, full: bool = False) -> Flow[Erased]:
        """Erase every namespace at and below this one that has a label, as `erase_all` does.

        For example, `store.memory().erase_label("alice")` erases ("users", "alice") and ("orgs", "acme", "alice").
        """
        check_str(label, "a label of a namespace")
        return self._change("erase_label", erase_label(self._context, self._path, label, full))

    aerase_label = awaited(erase_label)

    @blocking
    def migrate(self, *, progress: Progress | None = None) -> Flow[int]:
        """Rewrite the items whose schema has a newer version, here and in all namespaces below. Return how many.

        `progress` is called with two numbers of items: done, and in total.
        """
        return self._change("migrate", flows.migrate(self._context, self._query(), progress))

    amigrate = awaited(migrate)

    @blocking
    def reembed(self, *, progress: Progress | None = None) -> Flow[int]:
        """Embed the items without a vector of the store's embedder, here and in all namespaces below. Return how many.

        Call it after the embedder was changed or has failed. Until then such items are found by their words. `progress`
        is called with two numbers of items: done, and in total.
        """
        return self._change("reembed", maintenance.reembed(self._context, self._path, progress))

    areembed = awaited(reembed)

    @blocking
    def reindex(self, *, progress: Progress | None = None) -> Flow[int]:
        """Cut the versions again that another analyzer has cut, here and in all namespaces below. Return how many.

        Call it after `words` of `perdure.open` was changed. Until then each process cuts what it searches for itself.
        """
        return self._change("reindex", maintenance.reindex(self._context, self._path, progress))

    areindex = awaited(reindex)

    @blocking
    def unreadable(self) -> Flow[list[Item]]:
        """Return the items of this namespace and of all below it that this code cannot read.

        Newer code wrote them. Instances of classes are dicts in them. `list`, `search` and `forget` leave such items
        out and log a warning.
        """
        return self._read("memory.unreadable", [], flows.unreadable(self._context, self._query(), self._reader()))

    aunreadable = awaited(unreadable)

    @blocking
    def stats(self) -> Flow[MemoryStats]:
        """Return how much this namespace and all below it hold."""
        return self._read("memory.stats", [], flows.stats(self._context, self._query()))

    astats = awaited(stats)

    @blocking
    def namespaces(self) -> Flow[list[Namespace]]:
        """Return the namespaces at and below this one that hold items, in the order of their labels."""
        return self._read("memory.namespaces", [], flows.namespaces(self._context, self._query()))

    anamespaces = awaited(namespaces)

    @blocking
    def history(self, key: str) -> Flow[list[Item]]:
        """Return all versions of a key, the oldest first. A deletion is a version without a value."""
        path, stored = self._here(), check_key(key)

        def read() -> Flow[list[Item]]:
            return self._items((yield from flows.query(self._context, rows.read_history, path, stored, self._as_of)))

        return self._read("memory.history", [key], read())

    ahistory = awaited(history)

    @blocking
    def delete(self, key: str, *, expect: int | None = None, who: str | None = None) -> Flow[bool]:
        """Delete an item and keep its history. Return False if there is none.

        With `expect`, only that version is deleted; if another one is there, Conflict is raised.
        """
        flows.check_expected(expect)
        gone, path, now = NewVersion(check_key(key), gone=DELETED, expect=expect), self._writable(), self._now()
        deleting = self._write(
            "memory.delete", lambda: [key, expect], lambda commit: commit(self._context, path, [gone], now)
        )
        return bool((yield from noted(self._context, who, "forget", subject_of(path), deleting, key=key)))

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

        return self._write(name, lambda: [journal.arguments(dict(items)), options, supersedes], put)

    def _get(self, name: str, keys: list[str]) -> Flow[list[Item | None]]:
        def read() -> Flow[list[Item | None]]:
            places, then = [(self._here(), check_key(key)) for key in keys], self._as_of is not None
            stored = yield from flows.query(self._context, rows.read_keys, places, self._now(), then)
            return (yield from flows.decoded(self._found_items, stored))

        return self._read(name, keys, read())

    def _pin(self, name: str, key: str, pinned: bool, who: str | None) -> Flow[Item]:
        path = self._writable()
        pinning = self._write(name, lambda: [key], lambda commit: flows.pin(self._context, path, key, pinned, commit))
        [item] = yield from noted(self._context, who, name.partition(".")[2], subject_of(path), pinning, key=key)
        return item

    def _read(self, name: str, said: list[Any], flow: Flow[T]) -> Flow[T]:
        said = [self.namespace, self._as_of, *said]
        if self._reading is not None:
            said, flow = [*said, *self._reading[:2]], sharing.checked(self._context, self._reading, flow)
        return journal.read(self._context, name, said, flow)

    def _write(
        self, name: str, said: Callable[[], list[Any]], make: Callable[[Commit], Flow[Written]]
    ) -> Flow[list[Item]]:
        return journal.write(self._context, name, lambda: [[*self.namespace], *said()], make, self._items)

    def _change(self, name: str, flow: Flow[T]) -> Flow[T]:
        """Return a flow that changes many items, in several transactions."""
        self._check_writable()
        journal.refuse(self._context, name)
        return flow

    def _items(self, written: Sequence[ItemRow | None]) -> list[Item]:
        return [item for item in self._found_items(written) if item is not None]

    def _found_items(self, stored: Sequence[ItemRow | None]) -> list[Item | None]:
        return [None if row is None else item_of(row, self._context.codec, raw=self._raw) for row in stored]

    def _newest(self, limit: int) -> Flow[list[Item]]:
        """Return the newest items that hold now."""
        scope, reader = self._query(), self._reader()
        listed = flows.listing(self._context, scope._replace(valid_at=scope.now), limit, 0, reader)
        return self._read("memory.newest", [limit], reader.shown(listed))

    def _now(self) -> int:
        return self._context.clock_us() if self._as_of is None else self._as_of

    def _query(self, kind: str | None = None, valid_at: datetime | None = None) -> ItemQuery:
        holds_at = microseconds(valid_at, "valid_at") or 0
        named = "" if kind is None else check_name(kind, "kind")
        return ItemQuery(self._path, self._now(), self._as_of is not None, named, holds_at)

    def _reader(self, where: Mapping[str, Any] | None = None) -> ItemReader:
        return ItemReader(self._context.codec, raw=self._raw, matches=None if where is None else matcher(where))

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

    # Defined last, because its name hides the type `list` in the class body.
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
        """Return the items of this namespace and of all below it, the newest first.

        `where` selects by value, as in `search`; `kind` selects one kind; `valid_at` selects what holds at that time.
        At most `limit` items are returned. None returns all.
        """
        scope, reader = self._query(kind, valid_at), self._reader(where)
        listed = flows.listing(self._context, scope, limit, offset, reader)
        return self._read("memory.list", [where, kind, valid_at, limit, offset], reader.shown(listed))

    alist = awaited(list)
