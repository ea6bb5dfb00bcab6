"""The indexes that a process keeps: read from rows, refreshed with what was written since, and cached.

A scope is a namespace and all below it. Its index only proposes items: the row of an item decides whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from perdure.log.cache import TenantCache
from perdure.memory.embed import Embedding
from perdure.memory.filters import UNREAD
from perdure.memory.large import SearchIndex
from perdure.memory.models import indexed
from perdure.memory.reading import ItemReader
from perdure.memory.rows import KNOWN_THEN, LIVE, OF_ITEM, OPENS, SEQUENCE_BITS, ItemQuery, ItemRow, item_row
from perdure.memory.tables import ITEM_VECTOR, ITEM_WORDS
from perdure.memory.words import ENGLISH, Analyzer
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Batch, Driver, Program, Rows, Sql, Statement
from perdure.threads.context import StoreContext
from perdure.values.registry import Codec

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import IndexRow, IndexScope, IndexSegment

INDEX_BYTES = 256 << 20  # of the indexes in memory, unless `open` says otherwise
_CODEC = Codec()  # for the readable form of values
_MANY = 128  # items in one statement
_BATCH = 8 * _MANY
_LARGE = 4_096  # versions of a namespace that are read at a time
T = TypeVar("T")
Newest = dict[int, tuple[int, int]]  # by namespace: its newest number and its generation


def _index_rows(which: str) -> Sql:
    """Return the statement that reads the index rows of a namespace in a range of numbers."""
    return Sql(
        f"""SELECT i.id, i.key, i.gone, i.words,
            (SELECT v.vec FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id AND v.model = :model),
            i.kind, i.at
        FROM memory_item i WHERE {{no_index}}i.tenant = :tenant AND i.id > :after AND i.id <= :until AND {which}
        ORDER BY i.id LIMIT :limit""",
        opens={3: ITEM_WORDS.at(0), 4: ITEM_VECTOR.at(0)},
    )


_LIVE, _CHANGED, _KNOWN_THEN = map(_index_rows, (LIVE, "1 = 1", KNOWN_THEN))
_ENDED_SINCE = _index_rows("i.at <= :now AND i.ended_at > :now AND i.gone IS NULL")
_ITEMS = Sql(
    f"""SELECT {OF_ITEM} FROM memory_item i WHERE {{no_index}}i.tenant = :tenant
    AND i.id IN ({", ".join(f":id{n}" for n in range(_MANY))})""",
    opens=OPENS,
    tolerant=True,
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
        self.words: Analyzer = ENGLISH
        self.index: SearchIndex | None = None  # for scopes that are too large for the process
        self.summarizers: dict[tuple[str, str], Any] = {}  # `summarize` hooks, by tenant and path
        self.stores_indexes = False  # a read-only store or a view does not
        self.stored: dict[tuple[int, int], tuple[int, int]] = {}  # by tenant and namespace: what a stored index covers
        # By tenant, path, model, dimension, and whether it shows the past: of one time at most.
        self.scopes: TenantCache[tuple[int, str, str, int, bool], KeptScope] = TenantCache(INDEX_BYTES)

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
    searcher_of(view).embedding, searcher_of(view).words = searcher_of(ctx).embedding, searcher_of(ctx).words


class ScopeIndexes:
    """The indexes of one scope of a tenant, by one model."""

    def __init__(self, tenant: int, searcher: Searcher, query: ItemQuery, model: str, dimension: int) -> None:
        self._tenant, self._scopes, self._words = tenant, searcher.scopes, searcher.words
        self.query, self.model, self.dimension = query, model, dimension
        self.stored_as = f"{model} {searcher.words.id}"

    def kept(self, *, then: bool) -> KeptScope | None:
        """Return the cached index, of the past or of the present."""
        kept = self._scopes.get((self._tenant, self.query.path, self.model, self.dimension, then))
        return None if kept is None or (then and kept.at != self.query.now) else kept

    def keep(self, kept: KeptScope) -> None:
        key = (self._tenant, self.query.path, self.model, self.dimension, bool(kept.at))
        present = self.kept(then=False) if kept.at else None  # the past shares its arrays with the present
        shared = 0 if present is None else present.scope.size_bytes
        self._scopes.put(key, kept._replace(weight_bytes=max(0, kept.scope.size_bytes - shared)))

    def refreshed(self, newest: Newest) -> Program[KeptScope]:
        """Return the index as of the time of the query: the cached one with what was written since."""
        return (yield from self._refreshed(newest, self.query.then))

    def _refreshed(self, newest: Newest, then: bool) -> Program[KeptScope]:
        from perdure.memory.segments import IndexScope

        kept = self.kept(then=then)
        if kept is not None and not all(_follows(newest.get(space), mark) for space, mark in kept.spaces.items()):
            kept = None
        if kept is None and then and self.kept(then=False) is not None:
            kept = yield from self._past(newest)
        kept = kept or KeptScope({}, IndexScope(self.dimension))
        at = self.query.now if then else 0
        if kept.spaces == newest and kept.at == at and kept.is_steady:
            return kept
        known = {space: (kept.spaces.get(space, (0, 0))[0], last) for space, (last, _) in newest.items()}
        scope = kept.scope
        for space in [space for space, (after, last) in known.items() if not after and last > _LARGE]:
            scope = scope.with_segment(
                (yield from self._built(_KNOWN_THEN if then else _LIVE, space, known.pop(space)))
            )
        changed = yield from self._read(
            lambda space: _KNOWN_THEN if then else _CHANGED if space in kept.spaces else _LIVE, known
        )
        scope = scope.refresh(changed) if changed else scope
        refreshed = KeptScope(newest, scope, is_steady=kept.spaces == newest, at=at)
        self.keep(refreshed)
        return refreshed

    def _past(self, newest: Newest) -> Program[KeptScope]:
        """Return the index of the past made from that of the present, without what was learned since."""
        present = yield from self._refreshed(newest, then=False)
        ended = yield from self._read(lambda _: _ENDED_SINCE, {space: (0, last) for space, (last, _) in newest.items()})
        return KeptScope(newest, present.scope.as_of(self.query.now, ended), at=self.query.now)

    def _read(self, sql: Callable[[int], Sql], ranges: Mapping[int, tuple[int, int]]) -> Program[list[IndexRow]]:
        """Return the index rows between two numbers of each namespace, by its statement, in the order of their ids."""
        reads = [
            self._statement(sql(space), space, after, last, last - after)
            for space, (after, last) in ranges.items()
            if after < last
        ]
        fetched = [row for answer in (yield Batch(*reads)) for row in answer] if reads else []
        return (yield from self._rows(fetched))

    def _built(self, sql: Sql, space: int, numbers: tuple[int, int]) -> Program[IndexSegment]:
        """Return the segment of a large namespace. Its rows are read in pages, which never are in memory together."""
        from perdure.memory.segments import IndexSegment

        after, last = numbers
        segments = [IndexSegment.build([], self.dimension)]
        while page := (yield Batch(self._statement(sql, space, after, last, _LARGE)))[0]:
            segments.append(IndexSegment.build((yield from self._rows(page)), self.dimension))
            after = page[-1][0] - (space << SEQUENCE_BITS)
        return IndexSegment.merge(segments)

    def _rows(self, fetched: Rows) -> Program[list[IndexRow]]:
        """Return fetched rows, in the order of their ids. Those that another analyzer has packed are cut again."""
        from perdure.memory.segments import IndexRow

        others = [id for id, _, gone, words, *_ in fetched if gone is None and not self._words.has_packed(words or b"")]
        packed = yield from self._of_items(others, self._packed)
        return [
            IndexRow(id, (id >> SEQUENCE_BITS, key), None if gone else packed.get(id, words or b""), vec, kind, at)
            for id, key, gone, words, vec, kind, at in sorted(fetched, key=itemgetter(0))
        ]

    def _packed(self, row: ItemRow) -> bytes:
        is_damaged = type(row.body) is not bytes  # if the item is a hit, reading it raises
        return b"" if is_damaged else self._words.pack(indexed(row.content(), row.key, _CODEC))

    def _of_items(self, ids: Sequence[int], make: Callable[[ItemRow], T]) -> Program[dict[int, T]]:
        """Return what `make` makes of items, by their id."""
        results: dict[int, T] = {}
        for start in range(0, len(ids), _BATCH):
            pages = pages_of(ids[start : start + _BATCH], _MANY)
            answers = yield Batch(*(_ITEMS(tenant=self._tenant, **page) for page in pages))
            results |= {row[0]: make(item_row(row, "")) for answer in answers for row in answer}
        return results

    def _statement(self, sql: Sql, space: int, after: int, last: int, limit: int) -> Statement:
        first = space << SEQUENCE_BITS
        params = {"tenant": self._tenant, "model": self.model, "now": self.query.now, "limit": limit}
        return sql(**params, after=first | after, until=first | last)

    def add_columns(self, kept: KeptScope, reader: ItemReader) -> Program[None]:
        """Add the columns that the filter of a reader needs. This decodes each item once."""
        from perdure.memory.columns import column_of

        conditions = {reader.column(test): test.names for test in reader.conditions}
        for part in kept.scope.without_columns(conditions):
            ids = part.ids.tolist()
            values = yield from self._of_items(ids, reader.value)
            for key, names in conditions.items():
                part.columns[key] = column_of((values.get(id, UNREAD) for id in ids), names)
        self.keep(kept)


def pages_of(ids: Sequence[int], size: int) -> list[dict[str, int]]:
    """Return the parameters `id0`, `id1` … of statements that each take `size` ids."""
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [{f"id{n}": part[n] if n < len(part) else -1 for n in range(size)} for part in parts]


def _follows(newest: tuple[int, int] | None, mark: tuple[int, int]) -> bool:
    """Return whether a namespace only had versions added since `mark`."""
    return newest is not None and newest[0] >= mark[0] and newest[1] == mark[1]
