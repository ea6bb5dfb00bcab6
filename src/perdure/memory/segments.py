"""Ranking: the words and vectors of a scope's items as arrays in immutable segments.

A scope is a namespace and all below it. A refresh returns a new scope that shares the old segments, so a scope never
changes while another thread ranks with it. There is no SQL and no clock here: the caller reads rows, and checks expiry
and validity of what it fetches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

from perdure.errors import ExtraMissing
from perdure.memory.words import TEXT_WEIGHT, query_terms

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise ExtraMissing("a search", "search") from error

SATURATION = 1.2  # k1 of BM25: how much further occurrences of a word count
LENGTH_WEIGHT = 0.75  # b of BM25: how much the length of a text lowers its score
WORDS_SHARE = 0.5  # of a score; the other half is meaning
FIRST_PAGE = 64
MERGE_RATIO = 4
# An item is relevant by its words if it has at least WORDS_FLOOR of the best score, and QUERY_FLOOR of the query: one
# common word of many says nothing.
WORDS_FLOOR = 0.5
QUERY_FLOOR = 0.2

Array = NDArray[Any]


class IndexRow(NamedTuple):
    """A version of an item. `words` is what `words.pack` returns, or None for a deletion. `vector` is float16."""

    id: int
    key: Hashable
    words: bytes | None
    vector: bytes | None = None


class Hit(NamedTuple):
    """A ranked version. `words` is its BM25 score, `cosine` is None without a vector, `score` (0 to 1) fuses both."""

    id: int
    score: float
    words: float
    cosine: float | None


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """Versions of items as arrays.

    The postings are sorted by term. Each is an item and the weighted count of the term in it.
    """

    ids: Array
    keys: tuple[Hashable, ...]
    terms: Array
    items: Array
    counts: Array
    vectors: Array  # float32, a row per item; NaN: no vector
    more: Array  # the further vectors of items with several, …
    more_items: Array  # … and their items
    lengths: Array  # the sum of an item's weighted counts
    places: dict[Hashable, int]
    alive: Array  # whether a version is still the newest of its item

    @classmethod
    def build(cls, rows: Sequence[IndexRow], dimension: int) -> IndexSegment:
        """Return a segment of rows with words, one per key. A row can have several vectors, one after the other.

        A vector of another dimension belongs to another model and is ignored.
        """
        packed = [row.words or b"" for row in rows]
        sizes = numpy.fromiter((len(words) // 5 for words in packed), "i8", len(rows))
        vectors = numpy.full((len(rows), dimension), numpy.nan, "f4")
        size = 2 * dimension
        embedded = [row.vector if size and row.vector and len(row.vector) % size == 0 else b"" for row in rows]
        known = numpy.frombuffer(b"".join(embedded), "<f2").reshape(-1, max(dimension, 1))
        owners = numpy.repeat(numpy.arange(len(rows)), [len(vector) // max(size, 1) for vector in embedded])
        is_first = numpy.diff(owners, prepend=-1) > 0
        vectors[owners[is_first]] = known[is_first]
        return cls._sorted(
            numpy.fromiter((row.id for row in rows), "i8", len(rows)),
            tuple(row.key for row in rows),
            numpy.frombuffer(b"".join([words[: len(words) // 5 * 4] for words in packed]), "<u4"),
            numpy.repeat(numpy.arange(len(rows), dtype="i4"), sizes),
            numpy.frombuffer(b"".join([words[len(words) // 5 * 4 :] for words in packed]), "u1"),
            vectors,
            known[~is_first].astype("f4"),
            owners[~is_first],
        )

    @classmethod
    def merge(cls, parts: Sequence[IndexSegment]) -> IndexSegment:
        """Return one segment with the live versions of several."""
        postings: list[tuple[Array, Array, Array]] = []
        further: list[tuple[Array, Array]] = []
        start = 0
        for part in parts:
            kept = part.alive[part.items]
            places = numpy.cumsum(part.alive, dtype="i4") - 1 + start
            postings.append((part.terms[kept], places[part.items[kept]], part.counts[kept]))
            kept = part.alive[part.more_items]
            further.append((part.more[kept], places[part.more_items[kept]]))
            start += part.live
        terms, items, counts = map(numpy.concatenate, zip(*postings, strict=True))
        return cls._sorted(
            numpy.concatenate([part.ids[part.alive] for part in parts]),
            tuple(key for part in parts for key in compress(part.keys, part.alive.tolist())),
            terms,
            items,
            counts,
            numpy.concatenate([part.vectors[part.alive] for part in parts]),
            *map(numpy.concatenate, zip(*further, strict=True)),
        )

    @classmethod
    def _sorted(
        cls, ids: Array, keys: tuple[Hashable, ...], terms: Array, items: Array, counts: Array, *vectors: Any
    ) -> IndexSegment:
        lengths = numpy.bincount(items, counts, len(ids)).astype("i8")
        order = numpy.argsort(terms)
        places = {key: place for place, key in enumerate(keys)}
        alive = numpy.ones(len(ids), bool)
        own, more, more_items = vectors
        postings = terms[order], items[order], counts[order]
        return cls(ids, keys, *postings, own, more, more_items, lengths, places, alive)

    @property
    def live(self) -> int:
        return int(self.alive.sum())

    @property
    def size_bytes(self) -> int:
        arrays = (self.ids, self.lengths, self.terms, self.items, self.counts, self.vectors, self.more, self.alive)
        return sum(array.nbytes for array in arrays) + 200 * len(self.keys)

    def without(self, keys: Iterable[Hashable]) -> IndexSegment:
        ended = [self.places[key] for key in keys if key in self.places]
        if not ended:
            return self
        alive = self.alive.copy()
        alive[ended] = False
        return replace(self, alive=alive)

    def cosines(self, target: Array) -> Array:
        """Return the cosine of each item, that of its nearest vector."""
        # Row by row, in one thread: a product of matrices would round a row differently in another segment.
        nearest: Array = numpy.vecdot(self.vectors, target)
        if len(self.more):
            numpy.maximum.at(nearest, self.more_items, numpy.vecdot(self.more, target))
        return nearest

    def postings(self, terms: Sequence[int]) -> list[slice]:
        """Return the slice of postings of each term."""
        sought = numpy.array(terms, "u4")
        starts = numpy.searchsorted(self.terms, sought, "left")
        ends = numpy.searchsorted(self.terms, sought, "right")
        return list(map(slice, starts.tolist(), ends.tolist()))


@dataclass(frozen=True)
class IndexScope:
    """The index that one search ranks. `IndexScope(dimension)` is empty."""

    dimension: int = 0  # of the embedder's vectors; 0: words only
    parts: tuple[IndexSegment, ...] = ()

    def refresh(self, rows: Iterable[IndexRow]) -> IndexScope:
        """Return the scope after changes, in the order of their ids. A row replaces the version of its key."""
        newest = {row.key: row for row in rows}
        parts = [part.without(newest) for part in self.parts]
        new = [row for row in newest.values() if row.words is not None]
        # Merge small segments into their successors: there are few to search, and items are rarely copied.
        merged = [IndexSegment.build(new, self.dimension)] if new else []
        count = len(new)
        while parts and (parts[-1].live < MERGE_RATIO * count or 2 * parts[-1].live < len(parts[-1].ids)):
            count += parts[-1].live
            merged.insert(0, parts.pop())
        if len(merged) > 1 or count < sum(len(part.ids) for part in merged):
            merged = [IndexSegment.merge(merged)]
        return IndexScope(self.dimension, (*parts, *(part for part in merged if len(part.ids))))

    @cached_property
    def count(self) -> int:
        return sum(part.live for part in self.parts)

    @cached_property
    def mean_length(self) -> float:
        return sum(int(part.lengths[part.alive].sum()) for part in self.parts) / max(self.count, 1)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def rank(self, query: str, vector: bytes | None = None) -> Ranking:
        """Rank the items that share a word with the query and, with the query's vector, all that have a vector."""
        if not self.parts:
            return Ranking.fuse(*numpy.zeros((4, 0)))
        if vector is None:
            cosines = [numpy.full(len(part.ids), numpy.nan, "f4") for part in self.parts]
        else:
            target = numpy.frombuffer(vector, "<f2").astype("f4")
            cosines = [part.cosines(target) for part in self.parts]
        ids = [part.ids for part in self.parts]
        words, parts = self._words(query)
        return Ranking.fuse(self._live(ids), self._live(words), self._live(cosines), self._live(parts))

    def _live(self, arrays: Sequence[Array]) -> Array:
        """Return the live entries of the segments' arrays as one array."""
        if len(arrays) == 1 and self.parts[0].alive.all():
            return arrays[0]
        return numpy.concatenate([array[part.alive] for array, part in zip(arrays, self.parts, strict=True)])

    def _words(self, query: str) -> tuple[list[Array], list[Array]]:
        """Return, per segment, the BM25 score of each item, and the part of the query's words that it has.

        That part is from 0 to 1, and rare words count more.
        """
        terms, total = query_terms(query), 0.0
        scores = [numpy.zeros(len(part.ids)) for part in self.parts]
        had = [numpy.zeros(len(part.ids)) for part in self.parts]
        places = [part.postings(terms) for part in self.parts]
        for number in range(len(terms)):
            chosen = [part.items[place[number]] for part, place in zip(self.parts, places, strict=True)]
            holders = sum(int(part.alive[items].sum()) for part, items in zip(self.parts, chosen, strict=True))
            rarity = math.log(1 + self.count / (holders or 0.5))
            total += rarity
            if not holders:
                continue
            for part, place, items, score, has in zip(self.parts, places, chosen, scores, had, strict=True):
                has[items] += rarity
                count = part.counts[place[number]] / TEXT_WEIGHT
                length = part.lengths[items] / (self.mean_length or 1)
                spread = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length)
                score[items] += (SATURATION + 1) * rarity * count / (count + spread)
        return scores, [has / (total or 1) for has in had]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranked versions, sorted only as far as they are read. Of two with the same score the newer is first."""

    ids: Array
    scores: Array
    words: Array
    cosines: Array  # NaN: no vector
    parts: Array  # the part of the query's words that each has, 0 to 1

    @classmethod
    def fuse(cls, ids: Array, words: Array, cosines: Array, parts: Array) -> Ranking:
        """Return a ranking by words and meaning, half each and relative to the highest.

        Items with neither are left out.
        """
        scores = words / (words.max(initial=0) or 1)
        embedded = ~numpy.isnan(cosines)
        if embedded.any():
            meaning = numpy.where(embedded, numpy.maximum(cosines, 0), 0)
            scores = WORDS_SHARE * scores + (1 - WORDS_SHARE) * meaning / (float(meaning.max()) or 1)
        return cls(ids, scores, words, cosines, parts)._where((words > 0) | embedded)

    def relevant(self, floor: float | None) -> Ranking:
        """Return the items that are about the query: by their words, or with a cosine of at least `floor`."""
        near = (self.parts >= QUERY_FLOOR) & (self.words >= WORDS_FLOOR * self.words.max(initial=0))
        return self._where(near if floor is None else near | (self.cosines >= floor))

    def by_meaning(self) -> Ranking:
        """Return the items that have a vector, ranked by their cosine alone."""
        return replace(self, scores=self.cosines)._where(~numpy.isnan(self.cosines))

    def with_meaning(self, cosines: Mapping[int, float | None]) -> Ranking:
        """Return a ranking by words and meaning of the items in `cosines`. None: an item without a vector."""
        numbers = numpy.sort(numpy.fromiter(cosines, "i8"))
        kept = numbers[numpy.minimum(numpy.searchsorted(numbers, self.ids), len(numbers) - 1)] == self.ids
        without_words = numpy.setdiff1d(numbers, self.ids[kept])
        ids = numpy.concatenate([self.ids[kept], without_words])
        zeros = numpy.zeros(len(without_words))
        words, parts = (numpy.concatenate([values[kept], zeros]) for values in (self.words, self.parts))
        return Ranking.fuse(ids, words, numpy.array([cosines[id] for id in ids.tolist()], "f4"), parts)

    def _where(self, kept: Array) -> Ranking:
        if kept.all():
            return self
        arrays = (self.ids, self.scores, self.words, self.cosines, self.parts)
        return Ranking(*(array[kept] for array in arrays))

    def __iter__(self) -> Iterator[Hit]:
        """Yield hits from the best on. Growing parts are sorted, so that ten hits among many cost no full sort."""
        done, size = 0, FIRST_PAGE
        while done < len(self.ids):
            page = self._best(size)[done:].tolist()
            yield from map(self._hit, page)
            done, size = done + len(page), 4 * size

    def _best(self, size: int) -> Array:
        chosen = numpy.arange(len(self.ids))
        if size < len(self.ids):
            chosen = numpy.flatnonzero(self.scores >= numpy.partition(self.scores, -size)[-size])
        return chosen[numpy.lexsort((-self.ids[chosen], -self.scores[chosen]))][:size]

    def _hit(self, place: int) -> Hit:
        cosine = float(self.cosines[place])
        known = None if math.isnan(cosine) else cosine
        return Hit(int(self.ids[place]), float(self.scores[place]), float(self.words[place]), known)


def cosines(vector: bytes, stored: Iterable[tuple[int, bytes]]) -> dict[int, float]:
    """Return the cosines between a vector and stored ones by id. Vectors of another dimension are left out."""
    same = [IndexRow(id, id, b"", other) for id, other in stored]
    part = IndexSegment.build(same, len(vector) // 2)
    products = part.cosines(numpy.frombuffer(vector, "<f2").astype("f4")).tolist()
    return {row.id: cosine for row, cosine in zip(same, products, strict=True) if not math.isnan(cosine)}
