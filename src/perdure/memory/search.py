"""Search: the scope's index, refreshed inside the read transaction, and the items that it ranks, fetched in order.

The index is a cache of one process. Whether an item is there, holds and matches is decided by its row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from perdure.memory import rows
from perdure.memory.embed import Embedding
from perdure.memory.labels import below
from perdure.memory.rows import OPENS, ROW_COLUMNS, SEQUENCE_BITS, ItemQuery, ItemRow
from perdure.storage.columns import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, read
from perdure.threads.context import StoreContext

_FETCH = 16  # items in one statement
_SPACES = Sql(
    """SELECT space, last, generation, path FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY space"""
)


def _index_rows(holds: str) -> Sql:
    """What ranks the versions of a namespace whose numbers lie in a range."""
    text = f"""SELECT i.id, i.key, i.gone, i.words, v.vec FROM memory_item i
        LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id AND v.model = :model
        WHERE {{tenant}} = :tenant AND i.id > :after AND i.id <= :until AND {holds} ORDER BY i.id"""
    # SQLite would take an index that begins with the tenant, instead of the range of numbers.
    return Sql(
        sqlite=text.format(tenant="+i.tenant"),
        postgres=text.format(tenant="i.tenant"),
        opens={3: ITEM_WORDS.at(0), 4: ITEM_VECTOR.at(0)},
    )


_LIVE = _index_rows("i.ended_at IS NULL AND i.gone IS NULL")
_CHANGED = _index_rows("1 = 1")
_KNOWN_THEN = _index_rows("i.at <= :now AND (i.ended_at IS NULL OR i.ended_at > :now) AND i.gone IS NULL")
_RANKED = f"""SELECT {ROW_COLUMNS} FROM memory_item
    WHERE {{tenant}} = :tenant AND id IN ({", ".join(f":id{n}" for n in range(_FETCH))})"""
_ITEMS = Sql(sqlite=_RANKED.format(tenant="+tenant"), postgres=_RANKED.format(tenant="tenant"), opens=OPENS)


class _Mark(NamedTuple):
    """How new a scope is: of each namespace its newest number and its generation."""

    spaces: dict[int, tuple[int, int]]


class Searcher:
    """What a process keeps of the memory of one database: the embedder, and the indexes of scopes."""

    def __init__(self) -> None:
        self.embedding: Embedding | None = None
        self._scopes: Any = None
        self._lock = threading.Lock()

    @property
    def model(self) -> str:
        return self.embedding.id if self.embedding is not None else ""

    @property
    def scopes(self) -> Any:
        """The scopes used last. Made by the first search: nothing else needs numpy."""
        with self._lock:
            if self._scopes is None:
                from perdure.memory.segments import ScopeCache

                self._scopes = ScopeCache()
            return self._scopes

    def forget_tenant(self, tenant: int) -> None:
        """The key of a tenant is gone: what was read with it goes too."""
        with self._lock:
            self._scopes = None

    def know_tenant(self, tenant: int) -> None:
        """Its key is there again."""


_searchers: WeakKeyDictionary[Any, Searcher] = WeakKeyDictionary()
_making = threading.Lock()


def searcher_of(ctx: StoreContext) -> Searcher:
    """The searcher of this process for a store's database."""
    with _making:
        found = _searchers.get(ctx.driver)
        if found is None:
            found = _searchers[ctx.driver] = Searcher()
        return found


class Ranked(NamedTuple):
    """A row that was found, its score, and the parts of it."""

    row: ItemRow
    score: float
    words: float
    cosine: float | None


class SearchRequest(NamedTuple):
    """What is searched for."""

    query: str
    items: ItemQuery
    limit: int
    offset: int
    relevant: bool
    matches: Callable[[ItemRow], bool] | None


def search(ctx: StoreContext, wanted: SearchRequest) -> Flow[list[Ranked]]:
    """The best items of a scope."""
    searcher = searcher_of(ctx)
    searcher.scopes  # noqa: B018 - says what to install, before the embedder is asked
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    vector: Any = None
    if searcher.embedding is not None:
        vector = (yield from searcher.embedding.embed([wanted.query], queries=True)).vectors[0]
    return (yield from read(partial(_search, tenant, searcher, wanted, vector)))


def _search(tenant: int, searcher: Searcher, wanted: SearchRequest, vector: bytes | None) -> Program[list[Ranked]]:
    scope, paths = yield from (_scope_then if wanted.items.then else _scope_now)(tenant, searcher, wanted.items)
    ranking = scope.rank(wanted.query, vector)
    if wanted.relevant:
        ranking = ranking.relevant(searcher.embedding.floor if searcher.embedding is not None else None)
    end = wanted.offset + wanted.limit
    found: list[Ranked] = []
    size = _FETCH
    hits = iter(ranking)
    while len(found) < end and (page := list(islice(hits, size))):
        fetched = yield from _fetch(tenant, [hit.id for hit in page], paths)
        for hit in page:
            row = fetched.get(hit.id)
            if row is not None and _holds(row, wanted.items) and (wanted.matches is None or wanted.matches(row)):
                found.append(Ranked(row, hit.score, hit.words, hit.cosine))
        size = min(4 * size, 1024)
    return found[wanted.offset : end]


def _holds(row: ItemRow, items: ItemQuery) -> bool:
    """Whether a row that an index names is one that is wanted."""
    known = (
        row.at <= items.now and (row.ended_at is None or row.ended_at > items.now)
        if items.then
        else (row.ended_at is None)
    )
    return (
        known
        and row.is_there(items.now)
        and (not items.kind or row.kind == items.kind)
        and (not items.valid_at or (row.valid_from or 0) <= items.valid_at < (row.valid_to or items.valid_at + 1))
    )


def _fetch(tenant: int, ids: Sequence[int], paths: dict[int, str]) -> Program[dict[int, ItemRow]]:
    parts = [ids[start : start + _FETCH] for start in range(0, len(ids), _FETCH)]
    padded = [[*part, *[-1] * (_FETCH - len(part))] for part in parts]
    answers = yield Batch(*(_ITEMS(tenant=tenant, **{f"id{n}": one for n, one in enumerate(part)}) for part in padded))
    found = [rows.item_row(row, paths[row[0] >> SEQUENCE_BITS]) for answer in answers for row in answer]
    return {row.id: row for row in found}


# --- the index


def _scope_now(tenant: int, searcher: Searcher, items: ItemQuery) -> Program[tuple[Any, dict[int, str]]]:
    """The index of a scope as it is now: what is kept, and what was written since."""
    from perdure.memory.segments import IndexScope

    [spaces] = yield Batch(_SPACES(tenant=tenant, path=items.path, below=below(items.path)))
    key = (tenant, items.path, searcher.model, _dimension(searcher))
    mark = _Mark({space: (last, generation) for space, last, generation, _ in spaces})
    kept = searcher.scopes.get(key)
    if kept is None or any(
        space not in mark.spaces or mark.spaces[space][1] != generation or mark.spaces[space][0] < last
        for space, (last, generation) in kept[0].spaces.items()
    ):
        kept = _Mark({}), IndexScope(_dimension(searcher))
    before, scope = kept
    news = [(space, before.spaces.get(space, (0, 0))[0], last) for space, (last, _) in mark.spaces.items()]
    reads = [
        (_CHANGED if space in before.spaces else _LIVE)(
            tenant=tenant, model=searcher.model, after=_id(space, after), until=_id(space, last)
        )
        for space, after, last in news
        if after < last
    ]
    if reads:
        answers = yield Batch(*reads)
        scope = scope.refresh(_rows_of(answers))
    if reads or before.spaces.keys() != mark.spaces.keys():
        searcher.scopes.put(key, mark, scope)
    return scope, {space: path for space, _, _, path in spaces}


def _scope_then(tenant: int, searcher: Searcher, items: ItemQuery) -> Program[tuple[Any, dict[int, str]]]:
    """The index of a scope as it was known at a time: read anew, and not kept."""
    from perdure.memory.segments import IndexScope

    [spaces] = yield Batch(_SPACES(tenant=tenant, path=items.path, below=below(items.path)))
    answers = []
    if spaces:
        answers = yield Batch(
            *(
                _KNOWN_THEN(
                    tenant=tenant, model=searcher.model, after=_id(space, 0), until=_id(space, last), now=items.now
                )
                for space, last, _, _ in spaces
            )
        )
    scope = IndexScope(_dimension(searcher)).refresh(_rows_of(answers))
    return scope, {space: path for space, _, _, path in spaces}


def _dimension(searcher: Searcher) -> int:
    return (searcher.embedding.dimension or 0) if searcher.embedding is not None else 0


def _id(space: int, number: int) -> int:
    return int(space) << SEQUENCE_BITS | number


def _rows_of(answers: Sequence[Rows]) -> list[Any]:
    from perdure.memory.segments import IndexRow

    found = [
        IndexRow(id, (id >> SEQUENCE_BITS, key), (words or b"") if gone is None else None, vec)
        for rows_ in answers
        for id, key, gone, words, vec in rows_
    ]
    return sorted(found, key=lambda row: row.id)
