"""The indexes that a process keeps: read from rows, refreshed with what was written since, and cached.

A scope is a namespace and all below it. Its index only proposes items: the row of an item decides whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.log.cache import TenantCache
from perdure.memory.embed import Embedding
from perdure.memory.filters import UNREAD
from perdure.memory.large import SearchIndex
from perdure.memory.reading import ItemReader
from perdure.memory.rows import KNOWN_THEN, LIVE, OF_ITEM, OPENS, SEQUENCE_BITS, ItemQuery, item_row
from perdure.memory.tables import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Batch, Driver, Program, Row, Sql
from perdure.threads.context import StoreContext

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import IndexRow, IndexScope

_CACHE_BYTES = 256 << 20
_MANY = 128  # items in one statement
_BATCH = 8 * _MANY
Newest = dict[int, tuple[int, int]]  # by namespace: its newest number and its generation


def _index_rows(which: str) -> Sql:
    """Return the statement that reads the index rows of a namespace in a range of numbers."""
    return Sql(
        f"""SELECT i.id, i.key, i.gone, i.words,
            (SELECT v.vec FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id AND v.model = :model),
            i.kind, i.at
        FROM memory_item i WHERE {{no_index}}i.tenant = :tenant AND i.id > :after AND i.id <= :until AND {which}
        ORDER BY i.id""",
        opens={3: ITEM_WORDS.at(0), 4: ITEM_VECTOR.at(0)},
    )


_LIVE, _CHANGED, _KNOWN_THEN = map(_index_rows, (LIVE, "1 = 1", KNOWN_THEN))
_ENDED_SINCE = _index_rows("i.at <= :now AND i.ended_at > :now AND i.gone IS NULL")
_ITEMS = Sql(
    f"""SELECT {OF_ITEM} FROM memory_item i WHERE {{no_index}}i.tenant = :tenant
    AND i.id IN ({", ".join(f":id{n}" for n in range(_MANY))})""",
    opens=OPENS,
)


class KeptScope(NamedTuple):
    """The index of a scope, and for each namespace the newest number and the generation that it covers."""

    spaces: Newest
    scope: IndexScope
    weight_bytes: int = 0
    is_steady: bool = False  # nothing was written between the last two searches
    at: int = 0  # the time in the past that it shows; 0: the present


class Searcher:
    """What a process keeps for the memory of one database: embedder, search index, hooks, indexes of scopes."""

    def __init__(self, driver: Driver) -> None:
        self.embedding: Embedding | None = None
        self.index: SearchIndex | None = None  # for scopes that are too large for the process
        self.summarizers: dict[tuple[str, str], Any] = {}  # `summarize` hooks, by tenant and path
        # By tenant, path, model, dimension, and whether it shows the past: of one time at most.
        self.scopes: TenantCache[tuple[int, str, str, int, bool], KeptScope] = TenantCache(_CACHE_BYTES)

    @property
    def model(self) -> str:
        return self.embedding.id if self.embedding is not None else ""

    @property
    def dimension(self) -> int:
        return (self.embedding.dimension or 0) if self.embedding is not None else 0

    @property
    def floor(self) -> float | None:
        return self.embedding.floor if self.embedding is not None else None


_searchers = PerDriver(Searcher)


def searcher_of(ctx: StoreContext) -> Searcher:
    """Return the searcher of this process for a store's database."""
    return _searchers.of(ctx.driver)


def search_alike(view: StoreContext, ctx: StoreContext) -> None:
    """Let a snapshot or a sandbox rank items as its store does."""
    searcher_of(view).embedding = searcher_of(ctx).embedding


class ScopeIndexes:
    """The indexes of one scope of a tenant, by one model."""

    def __init__(self, tenant: int, searcher: Searcher, query: ItemQuery, model: str, dimension: int) -> None:
        self._tenant, self._scopes, self._query = tenant, searcher.scopes, query
        self._model, self._dimension = model, dimension

    def kept(self, *, then: bool) -> KeptScope | None:
        """Return the cached index, of the past or of the present."""
        kept = self._scopes.get((self._tenant, self._query.path, self._model, self._dimension, then))
        return None if kept is None or (then and kept.at != self._query.now) else kept

    def keep(self, kept: KeptScope) -> None:
        key = (self._tenant, self._query.path, self._model, self._dimension, bool(kept.at))
        self._scopes.put(key, kept._replace(weight_bytes=kept.scope.size_bytes))

    def refreshed(self, newest: Newest) -> Program[KeptScope]:
        """Return the index as of the time of the query: the cached one with what was written since."""
        return (yield from self._refreshed(newest, self._query.then))

    def _refreshed(self, newest: Newest, then: bool) -> Program[KeptScope]:
        from perdure.memory.segments import IndexScope

        kept = self.kept(then=then)
        if kept is not None and not all(_follows(newest.get(space), mark) for space, mark in kept.spaces.items()):
            kept = None
        if kept is None and then and self.kept(then=False) is not None:
            kept = yield from self._past(newest)
        kept = kept or KeptScope({}, IndexScope(self._dimension))
        at = self._query.now if then else 0
        if kept.spaces == newest and kept.at == at and kept.is_steady:
            return kept
        changed = yield from self._read(
            lambda space: _KNOWN_THEN if then else _CHANGED if space in kept.spaces else _LIVE,
            [(space, kept.spaces.get(space, (0, 0))[0], last) for space, (last, _) in newest.items()],
        )
        scope = kept.scope.refresh(changed) if changed else kept.scope
        refreshed = KeptScope(newest, scope, is_steady=kept.spaces == newest, at=at)
        self.keep(refreshed)
        return refreshed

    def _past(self, newest: Newest) -> Program[KeptScope]:
        """Return the index of the past made from that of the present, without what was learned since."""
        present = yield from self._refreshed(newest, then=False)
        ended = yield from self._read(lambda _: _ENDED_SINCE, [(space, 0, last) for space, (last, _) in newest.items()])
        return KeptScope(newest, present.scope.as_of(self._query.now, ended), at=self._query.now)

    def _read(self, sql: Callable[[int], Sql], ranges: Iterable[tuple[int, int, int]]) -> Program[list[IndexRow]]:
        """Return the index rows between two numbers of each namespace, by its statement, in the order of their ids."""
        from perdure.memory.segments import IndexRow

        reads = [
            sql(space)(
                tenant=self._tenant, model=self._model, now=self._query.now,
                after=space << SEQUENCE_BITS | after, until=space << SEQUENCE_BITS | last,
            )
            for space, after, last in ranges if after < last
        ]  # fmt: skip
        fetched = [row for answer in (yield Batch(*reads)) for row in answer] if reads else []
        return [
            IndexRow(id, (id >> SEQUENCE_BITS, key), (words or b"") if gone is None else None, vec, kind, at)
            for id, key, gone, words, vec, kind, at in sorted(fetched, key=_number)
        ]

    def add_columns(self, kept: KeptScope, reader: ItemReader) -> Program[None]:
        """Add the columns that the filter of a reader needs. This decodes each item once."""
        from perdure.memory.columns import column_of

        conditions = {reader.column(test): test.names for test in reader.conditions}
        for part in kept.scope.without_columns(conditions):
            ids, values = part.ids.tolist(), dict[int, Any]()
            for start in range(0, len(ids), _BATCH):
                pages = pages_of(ids[start : start + _BATCH], _MANY)
                answers = yield Batch(*(_ITEMS(tenant=self._tenant, **page) for page in pages))
                values |= {row[0]: reader.value(item_row(row, "")) for answer in answers for row in answer}
            for key, names in conditions.items():
                part.columns[key] = column_of((values.get(id, UNREAD) for id in ids), names)
        self.keep(kept)


def pages_of(ids: Sequence[int], size: int) -> list[dict[str, int]]:
    """Return the parameters `id0`, `id1` … of statements that each take `size` ids."""
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [{f"id{n}": part[n] if n < len(part) else -1 for n in range(size)} for part in parts]


def _number(row: Row) -> int:
    number: int = row[0]
    return number


def _follows(newest: tuple[int, int] | None, mark: tuple[int, int]) -> bool:
    """Return whether a namespace only had versions added since `mark`."""
    return newest is not None and newest[0] >= mark[0] and newest[1] == mark[1]
