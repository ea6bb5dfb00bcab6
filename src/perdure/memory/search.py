"""Search: refreshes the index of a scope in the read transaction, ranks its items, and fetches them in order.

Every search calls `search`: those of the handle, of an agent's memory and of adapters. The index is a cache of
one process. The row of an item decides whether it is there, holds and matches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.log.cache import TenantCache
from perdure.memory import rows
from perdure.memory.embed import Embedding
from perdure.memory.large import LARGE_ITEMS, PROPOSED, NearestQuery, Proposal, SearchIndex
from perdure.memory.models import Item
from perdure.memory.reading import ItemReader
from perdure.memory.rows import KNOWN_THEN, LIVE, OF_ITEM, SEQUENCE_BITS, WANTED, ItemQuery, ItemRow
from perdure.memory.tables import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Batch, Driver, Flow, Program, Rows, Sql, Statement, read
from perdure.threads.context import StoreContext

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.ranking import Hit
    from perdure.memory.segments import IndexScope

Matches = Callable[[ItemRow], bool]
Found = list[tuple[ItemRow, "Hit"]]
_SCOPES_BYTES = 256 << 20
_FETCH = 16  # items in one statement
_PAGE_MAX = 1024
_SPACES = Sql(
    """SELECT space, last, generation, path, items FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY space"""
)


def _index_rows(which: str) -> Sql:
    """Return the statement that reads the index rows of a namespace in a range of numbers."""
    return Sql(
        f"""SELECT i.id, i.key, i.gone, i.words,
            (SELECT v.vec FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id AND v.model = :model)
        FROM memory_item i WHERE {{no_index}}i.tenant = :tenant AND i.id > :after AND i.id <= :until AND {which}
        ORDER BY i.id""",
        opens={3: ITEM_WORDS.at(0), 4: ITEM_VECTOR.at(0)},
    )


_LIVE, _CHANGED, _KNOWN_THEN = map(_index_rows, (LIVE, "1 = 1", KNOWN_THEN))
_FETCH_VECTORS = 128
_IDS, _MANY_IDS = (", ".join(f":id{n}" for n in range(count)) for count in (_FETCH, _FETCH_VECTORS))
_RANKED = rows.when(
    f"""SELECT {OF_ITEM} FROM memory_item i WHERE {{no_index}}i.tenant = :tenant
    AND i.id IN ({_IDS}) AND {WANTED}"""
)
_VECTORS = Sql(
    f"SELECT id, vec FROM memory_vector WHERE tenant = :tenant AND model = :model AND id IN ({_MANY_IDS})",
    opens={1: ITEM_VECTOR.at(0)},
)


class KeptScope(NamedTuple):
    """The index of a scope, and for each namespace the newest number and the generation that it covers."""

    spaces: dict[int, tuple[int, int]]
    scope: IndexScope
    weight_bytes: int = 0
    is_steady: bool = False  # nothing was written between the last two searches


class Searcher:
    """What a process keeps for the memory of one database: embedder, search index, hooks, indexes of scopes."""

    def __init__(self, driver: Driver) -> None:
        self.embedding: Embedding | None = None
        self.index: SearchIndex | None = None  # for scopes that are too large for the process
        self.summarizers: dict[tuple[str, str], Any] = {}  # `summarize` hooks, by tenant and path
        self.scopes: TenantCache[tuple[int, str, str, int], KeptScope] = TenantCache(_SCOPES_BYTES)

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


def search(
    ctx: StoreContext,
    scope: ItemQuery,
    query: str,
    start: int,
    end: int | None,
    relevant: bool,
    matches: Matches | None,
    by_meaning: bool = False,
) -> Flow[Found]:
    """Return the best items of a scope with their hits, from rank `start` up to `end`.

    With `by_meaning`, items are ranked by their cosine alone, and those without a vector are left out.
    """
    import perdure.memory.segments  # noqa: F401 - raises ExtraMissing before the embedder is called

    searcher, vector = searcher_of(ctx), None
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    if searcher.embedding is not None:
        [vector] = (yield from searcher.embedding.embed([query], queries=True)).vectors
    by_meaning = by_meaning and vector is not None  # if the embedder fails, words decide
    kept = None if scope.then else searcher.scopes.get((tenant, scope.path, searcher.model, searcher.dimension))
    if kept is not None and kept.is_steady and end is not None and end <= _PAGE_MAX:
        ranking = kept.scope.rank(query, vector)
        ranking = ranking.by_meaning() if by_meaning else ranking
        ranking = ranking.relevant(searcher.floor) if relevant else ranking
        best = list(islice(ranking, size := max(_FETCH, end)))
        hits = yield from read(partial(_search_kept, tenant, scope, kept, best, matches, end))
        if hits is not None and (len(hits) >= end or len(best) < size):
            return hits[start:end]
    once = partial(_search, tenant, searcher, scope, query, vector, relevant, matches, end, by_meaning=by_meaning)
    index = searcher.index if vector is not None and not (scope.then or by_meaning) else None
    hits = yield from read(partial(once, None if index is None else LARGE_ITEMS))
    count = PROPOSED
    while hits is None and index is not None:
        asked = NearestQuery(tenant, scope.path, searcher.model, vector or b"", count)
        near = yield from index.nearest(asked)
        hits = yield from read(partial(once, proposal=Proposal(asked, near)))
        count *= 4
    return (hits or [])[start:end]


def _search_kept(
    tenant: int, scope: ItemQuery, kept: KeptScope, best: Sequence[Hit], matches: Matches | None, end: int
) -> Program[Found | None]:
    """Return those of `best` that are there and match, in one exchange with the database.

    Return None if the scope was written to since the kept index was built.
    """
    spaces, *answers = yield Batch(
        _SPACES(**scope.params(tenant)), *_fetches(tenant, scope, [hit.id for hit in best]), last=True
    )
    if kept.spaces != {space: (last, generation) for space, last, generation, _, _ in spaces}:
        return None
    return _there(best, answers, {space: path for space, _, _, path, _ in spaces}, matches, end)


def _search(
    tenant: int,
    searcher: Searcher,
    selection: ItemQuery,
    query: str,
    vector: bytes | None,
    relevant: bool,
    matches: Matches | None,
    end: int | None,
    most: int | None = None,
    proposal: Proposal | None = None,
    by_meaning: bool = False,
) -> Program[Found | None]:
    """Return the best items of a scope.

    Return None if the scope has more items than `most`, or if an item that was not proposed could be among the hits.
    """
    [spaces] = yield Batch(_SPACES(**selection.params(tenant)))
    if most is not None and sum(items for *_, items in spaces) > most:
        return None
    paths = {space: path for space, _, _, path, _ in spaces}
    newest = {space: (last, generation) for space, last, generation, _, _ in spaces}
    kind = (searcher.model, searcher.dimension) if proposal is None else ("", 0)
    scope = yield from _scope(tenant, searcher, selection, newest, *kind)
    ranking, bound = scope.rank(query, vector if proposal is None else None), None
    if proposal is not None:
        best = list(islice(ranking, proposal.asked.limit))
        cosines = yield from _cosines(proposal, best, paths)
        ranking, bound = ranking.with_meaning(cosines), proposal.score_of_the_rest(best, relevant, searcher.floor)
    if by_meaning:
        ranking = ranking.by_meaning()
    if relevant:
        ranking = ranking.relevant(searcher.floor)
    ranked: Found = []
    hits, size = iter(ranking), _FETCH
    while (end is None or len(ranked) < end) and (page := list(islice(hits, size))):
        if bound is not None and page[-1].score <= bound:
            hits, page = iter(()), [hit for hit in page if hit.score > bound]
        answers = yield Batch(*_fetches(tenant, selection, [hit.id for hit in page]))
        ranked += _there(page, answers, paths, matches, None if end is None else end - len(ranked))
        size = min(4 * size, _PAGE_MAX)
    return None if bound is not None and (end is None or len(ranked) < end) else ranked


def _cosines(proposal: Proposal, best: Sequence[Hit], paths: dict[int, str]) -> Program[dict[int, float | None]]:
    """Return the cosines of the proposed items and of the best by words, with None for those without a vector."""
    from perdure.memory.segments import cosines

    asked = proposal.asked
    cosine_of = {one.id: one.cosine for one in proposal.near if one.id >> SEQUENCE_BITS in paths}
    others: dict[int, float | None] = {hit.id: None for hit in best if hit.id not in cosine_of}
    if others:
        pages = _pages([*others], _FETCH_VECTORS)
        answers = yield Batch(*(_VECTORS(tenant=asked.tenant, model=asked.model, **page) for page in pages))
        others |= cosines(asked.vector, [row for answer in answers for row in answer])
    return {**cosine_of, **others}


def _pages(ids: Sequence[int], size: int = _FETCH) -> list[dict[str, int]]:
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [{f"id{n}": part[n] if n < len(part) else -1 for n in range(size)} for part in parts]


def _fetches(tenant: int, scope: ItemQuery, ids: Sequence[int]) -> list[Statement]:
    params = scope.params(tenant)
    return [_RANKED[scope.then](**params, **page) for page in _pages(ids)]


def _there(
    hits: Sequence[Hit], answers: Sequence[Rows], paths: dict[int, str], matches: Matches | None, most: int | None
) -> Found:
    """Return the first hits, at most `most`, whose items are there and match. Matching decodes an item."""
    fetched = {row[0]: rows.item_row(row, paths[row[0] >> SEQUENCE_BITS]) for answer in answers for row in answer}
    there = ((fetched[hit.id], hit) for hit in hits if hit.id in fetched)
    return list(islice(((row, hit) for row, hit in there if matches is None or matches(row)), most))


def _scope(
    tenant: int,
    searcher: Searcher,
    query: ItemQuery,
    newest: dict[int, tuple[int, int]],
    model: str,
    dimension: int,
) -> Program[IndexScope]:
    """Return the index of a scope: the kept one, refreshed with what was written since.

    For a time in the past the index is read anew and not kept.
    """
    from perdure.memory.segments import IndexRow, IndexScope

    params = query.params(tenant)
    key = (tenant, query.path, model, dimension)
    kept = None if query.then else searcher.scopes.get(key)
    if kept is None or not all(_follows(newest.get(space), mark) for space, mark in kept.spaces.items()):
        kept = KeptScope({}, IndexScope(dimension))
    reads = []
    for space, (last, _) in newest.items():
        after, first = kept.spaces.get(space, (0, 0))[0], space << SEQUENCE_BITS
        if after < last:
            sql = _KNOWN_THEN if query.then else _CHANGED if space in kept.spaces else _LIVE
            reads.append(sql(model=model, after=first | after, until=first | last, **params))
    scope = kept.scope
    if reads:
        fetched = [row for answer in (yield Batch(*reads)) for row in answer]
        scope = scope.refresh(
            IndexRow(id, (id >> SEQUENCE_BITS, key), (words or b"") if gone is None else None, vec)
            for id, key, gone, words, vec in sorted(fetched, key=lambda row: row[0])
        )
    is_steady = kept.spaces == newest
    if not (query.then or (is_steady and kept.is_steady)):
        searcher.scopes.put(key, KeptScope(newest, scope, scope.size_bytes, is_steady))
    return scope


def _follows(newest: tuple[int, int] | None, mark: tuple[int, int]) -> bool:
    """Return whether a namespace only had versions added since `mark`."""
    return newest is not None and newest[0] >= mark[0] and newest[1] == mark[1]


def ranked(flow: Flow[Found], reader: ItemReader, explain: bool = False) -> Flow[list[Item]]:
    """Return the items that a search has found, with their scores, and with the parts of these."""
    found = yield from flow
    items = []
    for item, (_, hit) in zip(reader.items(row for row, _ in found), found, strict=True):
        parts = {"words": hit.words} | ({} if hit.cosine is None else {"cosine": hit.cosine})
        items.append(replace(item, score=hit.score, explain=parts if explain else None))
    return items
