"""Search: the scope's index, refreshed inside the read transaction, and the items that it ranks, fetched in order.

The index is a cache of one process. Whether an item is there, holds and matches is decided by its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from perdure.log.cache import TenantCache
from perdure.memory import rows
from perdure.memory.embed import Embedding
from perdure.memory.rows import KNOWN_THEN, LIVE, OF_ITEM, SEQUENCE_BITS, WANTED, ItemQuery, ItemRow
from perdure.storage.columns import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Batch, Driver, Flow, Program, Sql, read
from perdure.threads.context import StoreContext

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import Hit, IndexScope

Matches = Callable[[ItemRow], bool]
_SCOPES_BYTES = 256 << 20
_FETCH = 16  # items in one statement
_SPACES = Sql(
    """SELECT space, last, generation, path FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY space"""
)


def _index_rows(which: str) -> Sql:
    """What ranks the versions of a namespace whose numbers lie in a range."""
    return Sql(
        f"""SELECT i.id, i.key, i.gone, i.words, v.vec FROM memory_item i
        LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id AND v.model = :model
        WHERE {{no_index}}i.tenant = :tenant AND i.id > :after AND i.id <= :until AND {which} ORDER BY i.id""",
        opens={3: ITEM_WORDS.at(0), 4: ITEM_VECTOR.at(0)},
    )


_LIVE, _CHANGED, _KNOWN_THEN = map(_index_rows, (LIVE, "1 = 1", KNOWN_THEN))
_RANKED = rows.when(
    f"""SELECT {OF_ITEM} FROM memory_item i WHERE {{no_index}}i.tenant = :tenant
    AND i.id IN ({", ".join(f":id{n}" for n in range(_FETCH))}) AND {WANTED}"""
)


class KeptScope(NamedTuple):
    """The index of a scope, and how new it is: of each namespace its newest number and its generation."""

    spaces: dict[int, tuple[int, int]]
    scope: IndexScope
    weight_bytes: int = 0


class Searcher:
    """What a process keeps of the memory of one database: the embedder, and the indexes of scopes."""

    def __init__(self, driver: Driver) -> None:
        self.embedding: Embedding | None = None
        self.scopes: TenantCache[tuple[int, str, str, int], KeptScope] = TenantCache(_SCOPES_BYTES)

    @property
    def model(self) -> str:
        return self.embedding.id if self.embedding is not None else ""

    @property
    def dimension(self) -> int:
        return (self.embedding.dimension or 0) if self.embedding is not None else 0


_searchers = PerDriver(Searcher)


def searcher_of(ctx: StoreContext) -> Searcher:
    """The searcher of this process for a store's database."""
    return _searchers.of(ctx.driver)


def search(
    ctx: StoreContext,
    wanted: ItemQuery,
    query: str,
    start: int,
    end: int | None,
    relevant: bool,
    matches: Matches | None,
) -> Flow[list[tuple[ItemRow, Hit]]]:
    """The best items of a scope, from one place to another."""
    import perdure.memory.segments  # noqa: F401 - says what to install, before the embedder is asked

    searcher, vector = searcher_of(ctx), None
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    if searcher.embedding is not None:
        [vector] = (yield from searcher.embedding.embed([query], queries=True)).vectors
    found = yield from read(partial(_search, tenant, searcher, wanted, query, vector, relevant, matches, end))
    return found[start:end]


def _search(
    tenant: int,
    searcher: Searcher,
    wanted: ItemQuery,
    query: str,
    vector: bytes | None,
    relevant: bool,
    matches: Matches | None,
    end: int | None,
) -> Program[list[tuple[ItemRow, Hit]]]:
    scope, paths = yield from _scope(tenant, searcher, wanted)
    ranking = scope.rank(query, vector)
    if relevant:
        ranking = ranking.relevant(searcher.embedding.floor if searcher.embedding is not None else None)
    found: list[tuple[ItemRow, Hit]] = []
    hits, size = iter(ranking), _FETCH
    while (end is None or len(found) < end) and (page := list(islice(hits, size))):
        fetched = yield from _fetch(tenant, wanted, [hit.id for hit in page], paths)
        there = [(fetched[hit.id], hit) for hit in page if hit.id in fetched]
        found += there if matches is None else [(row, hit) for row, hit in there if matches(row)]
        size = min(4 * size, 1024)
    return found


def _fetch(tenant: int, wanted: ItemQuery, ids: Sequence[int], paths: dict[int, str]) -> Program[dict[int, ItemRow]]:
    params = wanted.params(tenant)
    parts = [ids[start : start + _FETCH] for start in range(0, len(ids), _FETCH)]
    padded = [{f"id{n}": part[n] if n < len(part) else -1 for n in range(_FETCH)} for part in parts]
    answers = yield Batch(*(_RANKED[wanted.then](**params, **part) for part in padded))
    return {row[0]: rows.item_row(row, paths[row[0] >> SEQUENCE_BITS]) for answer in answers for row in answer}


def _scope(tenant: int, searcher: Searcher, wanted: ItemQuery) -> Program[tuple[IndexScope, dict[int, str]]]:
    """The index of a scope, and the paths of its namespaces: what is kept, and what was written since. As of a time it
    is read anew, and not kept."""
    from perdure.memory.segments import IndexRow, IndexScope

    params = wanted.params(tenant)
    [spaces] = yield Batch(_SPACES(**params))
    key = (tenant, wanted.path, searcher.model, searcher.dimension)
    newest = {space: (last, generation) for space, last, generation, _ in spaces}
    kept = None if wanted.then else searcher.scopes.get(key)
    if kept is None or not all(_follows(newest.get(space), mark) for space, mark in kept.spaces.items()):
        kept = KeptScope({}, IndexScope(searcher.dimension))
    reads = []
    for space, (last, _) in newest.items():
        after, first = kept.spaces.get(space, (0, 0))[0], space << SEQUENCE_BITS
        if after < last:
            sql = _KNOWN_THEN if wanted.then else _CHANGED if space in kept.spaces else _LIVE
            reads.append(sql(model=searcher.model, after=first | after, until=first | last, **params))
    scope = kept.scope
    if reads:
        found = [row for answer in (yield Batch(*reads)) for row in answer]
        scope = scope.refresh(
            IndexRow(id, (id >> SEQUENCE_BITS, key), (words or b"") if gone is None else None, vec)
            for id, key, gone, words, vec in sorted(found, key=lambda row: row[0])
        )
    if kept.spaces != newest and not wanted.then:
        searcher.scopes.put(key, KeptScope(newest, scope, scope.size_bytes))
    return scope, {space: path for space, _, _, path in spaces}


def _follows(newest: tuple[int, int] | None, mark: tuple[int, int]) -> bool:
    """Whether a namespace only had versions added since."""
    return newest is not None and newest[0] >= mark[0] and newest[1] == mark[1]
