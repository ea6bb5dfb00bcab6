"""The words and vectors of a scope's items as arrays in immutable segments, which `ranking.py` ranks.

A scope is a namespace and all below it. A refresh returns a new scope that shares the old segments, so a scope never
changes while another thread ranks with it. There is no SQL and no clock here: the caller reads rows, and checks expiry
and validity of what it fetches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

from perdure.errors import ExtraMissing
from perdure.memory.ranking import Ranking, word_scores
from perdure.memory.words import query_terms

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise ExtraMissing("a search", "search") from error

MERGE_RATIO = 4

Array = NDArray[Any]


class IndexRow(NamedTuple):
    """A version of an item. `words` is what `words.pack` returns, or None for a deletion. `vector` is float16."""

    id: int
    key: Hashable
    words: bytes | None
    vector: bytes | None = None


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
        words, parts = word_scores(query_terms(query), self.parts, self.count, self.mean_length)
        return Ranking.fuse(self._live(ids), self._live(words), self._live(cosines), self._live(parts))

    def _live(self, arrays: Sequence[Array]) -> Array:
        """Return the live entries of the segments' arrays as one array."""
        if len(arrays) == 1 and self.parts[0].alive.all():
            return arrays[0]
        return numpy.concatenate([array[part.alive] for array, part in zip(arrays, self.parts, strict=True)])


def cosines(vector: bytes, stored: Iterable[tuple[int, bytes]]) -> dict[int, float]:
    """Return the cosines between a vector and stored ones by id. Vectors of another dimension are left out."""
    same = [IndexRow(id, id, b"", other) for id, other in stored]
    part = IndexSegment.build(same, len(vector) // 2)
    products = part.cosines(numpy.frombuffer(vector, "<f2").astype("f4")).tolist()
    return {row.id: cosine for row, cosine in zip(same, products, strict=True) if not math.isnan(cosine)}
