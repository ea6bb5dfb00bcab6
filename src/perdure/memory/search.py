"""Search: ranks the items of a scope by its index, and fetches them in order.

Every search calls `search`: those of the handle, of an agent's memory and of adapters. The index of `scopes.py` is a
cache of one process. The row of an item decides whether it is there, holds and matches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

from perdure.memory import rows, stored_indexes
from perdure.memory.large import LARGE_ITEMS, PROPOSED, SAMPLE, NearestQuery, Proposal
from perdure.memory.reading import ItemReader
from perdure.memory.rows import OF_ITEM, SEQUENCE_BITS, WANTED, ItemQuery, ItemRow
from perdure.memory.scopes import KeptScope, ScopeIndexes, Searcher, pages_of, searcher_of
from perdure.memory.tables import ITEM_VECTOR
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, Statement, aside, read
from perdure.threads.context import StoreContext

if TYPE_CHECKING:  # needs numpy
    from numpy.typing import NDArray

    from perdure.memory.ranking import Hit, Ranking
    from perdure.memory.segments import IndexScope

Matches = Callable[[ItemRow], bool]
Found = list[tuple[ItemRow, "Hit"]]
_RANKS = "perdure.memory.segments"  # imported late: it needs numpy
_FETCH = 16  # items in one statement
_PAGE_MAX = 1024
_DECODED_MAX = 256  # the largest page whose items are decoded for a filter; for more of them columns are made
_SPACES = Sql(
    """SELECT space, last, generation, path, items FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY space"""
)
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


def search(
    ctx: StoreContext,
    scope: ItemQuery,
    query: str,
    start: int,
    end: int | None,
    relevant: bool,
    matches: Matches,
    by_meaning: bool = False,
) -> Flow[Found]:
    """Return the best items of a scope that match with their hits, from rank `start` up to `end`.

    If `matches` is an `ItemReader`, its filter is applied before items are ranked. With `by_meaning`, items are ranked
    by their cosine alone, and those without a vector are left out.
    """
    if _RANKS not in sys.modules:  # raises ExtraMissing before the embedder is called
        yield from aside(partial(import_module, _RANKS))  # too slow for an event loop
    searcher, vector = searcher_of(ctx), None
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    if searcher.embedding is not None:
        [vector] = (yield from searcher.embedding.embed([query], queries=True)).vectors
    by_meaning = by_meaning and vector is not None  # if the embedder fails, words decide
    asked = _Search(
        tenant, searcher, scope, searcher.words.query_terms(query), vector, end, relevant, matches, by_meaning
    )
    indexes = asked.indexes()
    kept, ranking = indexes.kept(then=scope.then), None
    if kept is not None and kept.is_steady and end is not None and end <= _PAGE_MAX:
        ranking = asked.ranking(kept.scope)
        best = list(islice(asked.among(ranking, kept.scope), size := max(_FETCH, end)))
        hits = yield from read(partial(asked.kept, kept, best, end))
        if hits is not None and (len(hits) >= end or len(best) < size):
            return hits[start:end]
    index = searcher.index if vector is not None and not (scope.then or by_meaning) else None
    if index is None and indexes.kept(then=False) is None:
        yield from stored_indexes.load(tenant, searcher, indexes)
    known = (kept.scope, ranking) if kept is not None and ranking is not None else None
    hits = yield from read(partial(asked.run, None if index is None else LARGE_ITEMS, known=known))
    if index is None:
        yield from stored_indexes.store(tenant, searcher, indexes)
    if hits is None and index is not None:
        nearest = NearestQuery(tenant, scope.path, searcher.model, vector or b"", PROPOSED)
        target, noise = yield from read(partial(asked.sample, nearest))
        while hits is None:
            near = yield from index.nearest(nearest := nearest._replace(vector=target))
            hits = yield from read(partial(asked.run, proposal=Proposal(nearest, near, noise)))
            nearest = nearest._replace(limit=4 * nearest.limit)
    return (hits or [])[start:end]


def unranked(
    ctx: StoreContext, scope: ItemQuery, ranked: Collection[int], reader: ItemReader, start: int, end: int
) -> Flow[list[ItemRow] | None]:
    """Return the items of a scope that match a filter and were not ranked, the newest first.

    Return None if the index cannot tell: it has no columns for the filter, or the scope was written to.
    """
    tenant, searcher = (yield from ctx.tenant()), searcher_of(ctx)
    asked = _Search(tenant or 0, searcher, scope, {}, None, end, False, reader, True)
    kept = asked.indexes().kept(then=scope.then)
    if kept is None or not reader.conditions or asked.lacks_columns(kept.scope):
        return None
    ids = kept.scope.newest_matching(scope.kind, reader, ranked)
    return (yield from read(partial(asked.listed, kept, ids, start, end)))


@dataclass(frozen=True, slots=True)
class _Search:
    """One search, and the programs that answer it."""

    tenant: int
    searcher: Searcher
    scope: ItemQuery
    terms: Mapping[int, float]  # of the query
    vector: bytes | None
    end: int | None
    relevant: bool
    matches: Matches
    by_meaning: bool

    def indexes(self, *, vectors: bool = True) -> ScopeIndexes:
        model = (self.searcher.model, self.searcher.dimension) if vectors else ("", 0)
        return ScopeIndexes(self.tenant, self.searcher, self.scope, *model)

    def ranking(self, scope: IndexScope) -> Ranking:
        return self._relevant(scope.rank(self.terms, self.vector, by_meaning=self.by_meaning))

    def _relevant(self, ranking: Ranking) -> Ranking:
        return ranking.relevant(self.searcher.floor) if self.relevant else ranking

    @property
    def _reader(self) -> ItemReader | None:
        """The reader whose filter needs columns."""
        reader = self.matches
        return reader if isinstance(reader, ItemReader) and reader.conditions else None

    def lacks_columns(self, scope: IndexScope) -> bool:
        reader = self._reader
        return reader is not None and bool(scope.without_columns(map(reader.column, reader.conditions)))

    def among(self, ranking: Ranking, scope: IndexScope) -> Ranking:
        """Return the hits that can be of the kind and match the filter, as far as there are columns for it."""
        reader = None if self.lacks_columns(scope) else self._reader
        if reader is None and not self.scope.kind:
            return ranking
        return ranking.among(scope.matching(self.scope.kind, reader))

    def kept(self, kept: KeptScope, best: Sequence[Hit], end: int) -> Program[Found | None]:
        """Return those of `best` that are there and match, in one exchange with the database.

        Return None if the scope was written to since the kept index was built.
        """
        spaces, *answers = yield Batch(
            _SPACES(**self.scope.params(self.tenant)), *self._fetches([hit.id for hit in best]), last=True
        )
        if kept.spaces != {space: (last, generation) for space, last, generation, _, _ in spaces}:
            return None
        return self._there(best, answers, {space: path for space, _, _, path, _ in spaces}, end)

    def run(
        self,
        most: int | None = None,
        proposal: Proposal | None = None,
        known: tuple[IndexScope, Ranking] | None = None,
    ) -> Program[Found | None]:
        """Return the best items of a scope. `known` is a ranking that need not be made again if its scope is current.

        Return None if the scope has more items than `most`, or if an item that was not proposed could be among the
        hits.
        """
        [spaces] = yield Batch(_SPACES(**self.scope.params(self.tenant)))
        if most is not None and sum(items for *_, items in spaces) > most:
            return None
        paths = {space: path for space, _, _, path, _ in spaces}
        indexes = self.indexes(vectors=proposal is None)
        kept = yield from indexes.refreshed({space: (last, generation) for space, last, generation, _, _ in spaces})
        bound = None
        if proposal is None:
            ranking = known[1] if known is not None and known[0] is kept.scope else self.ranking(kept.scope)
        else:
            by_words = kept.scope.rank(self.terms)
            best = list(islice(by_words, proposal.asked.limit))
            cosines = yield from _cosines(proposal, best, paths)
            ranking = self._relevant(by_words.with_meaning(cosines, proposal.noise))
            bound = proposal.score_of_the_rest(best, self.relevant, self.searcher.floor)
        ranked: Found = []
        hits, size = iter(self.among(ranking, kept.scope)), _FETCH
        while (self.end is None or len(ranked) < self.end) and (page := list(islice(hits, size))):
            if bound is not None and page[-1].score <= bound:
                hits, page = iter(()), [hit for hit in page if hit.score > bound]
            answers = yield Batch(*self._fetches([hit.id for hit in page]))
            ranked += self._there(page, answers, paths, None if self.end is None else self.end - len(ranked))
            size = min(4 * size, _PAGE_MAX)
            if size > _DECODED_MAX and (reader := self._reader) is not None and self.lacks_columns(kept.scope):
                yield from indexes.add_columns(kept, reader)
                ranked, hits = [], iter(self.among(ranking, kept.scope))
        return None if bound is not None and (self.end is None or len(ranked) < self.end) else ranked

    def listed(self, kept: KeptScope, ids: Sequence[int], start: int, end: int) -> Program[list[ItemRow] | None]:
        """Return those of the items that are there and match, from place `start` up to `end`.

        Return None if the scope was written to since the kept index was built.
        """
        [spaces] = yield Batch(_SPACES(**self.scope.params(self.tenant)))
        if kept.spaces != {space: (last, generation) for space, last, generation, _, _ in spaces}:
            return None
        paths = {space: path for space, _, _, path, _ in spaces}
        items: list[ItemRow] = []
        for at in range(0, len(ids), _PAGE_MAX):
            answers = yield Batch(*self._fetches(ids[at : at + _PAGE_MAX]))
            rows_of = self._rows(answers, paths)
            items += [rows_of[id] for id in ids[at : at + _PAGE_MAX] if id in rows_of and self.matches(rows_of[id])]
            if len(items) >= end:
                break
        return items[start:end]

    def sample(self, asked: NearestQuery) -> Program[tuple[bytes, NDArray[Any]]]:
        """Return what is specific in a query's vector within the scope, and its cosines with a sample of the items."""
        from perdure.memory.segments import specific_to

        [spaces] = yield Batch(_SPACES(**self.scope.params(self.tenant)))
        newest = {space: (last, generation) for space, last, generation, _, _ in spaces}
        kept = yield from self.indexes(vectors=False).refreshed(newest)
        return specific_to(asked.vector, (yield from _vectors(asked, kept.scope.sample(SAMPLE))))

    def _fetches(self, ids: Sequence[int]) -> list[Statement]:
        params = self.scope.params(self.tenant)
        return [_RANKED[self.scope.then](**params, **page) for page in pages_of(ids, _FETCH)]

    def _there(self, hits: Sequence[Hit], answers: Sequence[Rows], paths: dict[int, str], most: int | None) -> Found:
        """Return the first hits, at most `most`, whose items are there and match. Matching decodes an item."""
        fetched = self._rows(answers, paths)
        there = ((fetched[hit.id], hit) for hit in hits if hit.id in fetched)
        return list(islice(((row, hit) for row, hit in there if self.matches(row)), most))

    def _rows(self, answers: Sequence[Rows], paths: dict[int, str]) -> dict[int, ItemRow]:
        return {row[0]: rows.item_row(row, paths[row[0] >> SEQUENCE_BITS]) for answer in answers for row in answer}


def _vectors(asked: NearestQuery, ids: Sequence[int]) -> Program[Rows]:
    pages = pages_of(ids, _FETCH_VECTORS)
    answers = yield Batch(*(_VECTORS(tenant=asked.tenant, model=asked.model, **page) for page in pages))
    return [row for answer in answers for row in answer]


def _cosines(proposal: Proposal, best: Sequence[Hit], paths: dict[int, str]) -> Program[dict[int, float | None]]:
    """Return the cosines of the proposed items and of the best by words, with None for those without a vector."""
    from perdure.memory.segments import cosines

    cosine_of = {one.id: one.cosine for one in proposal.near if one.id >> SEQUENCE_BITS in paths}
    others: dict[int, float | None] = {hit.id: None for hit in best if hit.id not in cosine_of}
    if others:
        others |= cosines(proposal.asked.vector, (yield from _vectors(proposal.asked, [*others])))
    return {**cosine_of, **others}
