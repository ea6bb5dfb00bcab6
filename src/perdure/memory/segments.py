"""Ranking: the words and vectors of a scope's items as arrays in immutable segments.

A scope is what one search looks at: a namespace and all below it. It is made of all its live items once, and later
refreshed by the changes since; both give the same ranking, because what counts in it (items, their lengths, how many
have a term) counts live items of this scope only. A refresh makes a new scope that shares the old segments, so a scope
is never changed while another thread ranks with it. No SQL and no clock: the caller reads rows, and checks what it
fetches for expiry and validity.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from perdure.errors import UsageError
from perdure.memory.words import TEXT_WEIGHT, query_terms

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise UsageError("search needs the extra `search`: pip install 'perdure[search]'") from error

SATURATION = 1.2  # k1 of BM25: how much a word counts that occurs again
LENGTH_WEIGHT = 0.75  # b of BM25: how much a long text must say it more often
WORDS_SHARE = 0.5  # the rest of a score is meaning
FIRST_PAGE = 64
MERGE_RATIO = 4
WORDS_FLOOR = 0.5  # without a vector, an item is relevant whose words score at least this part of the best

Array = NDArray[Any]
Mark = TypeVar("Mark")


class IndexRow(NamedTuple):
    """A version of an item. `words` as packed by `words.pack`; None: the item was deleted. `vector`: float16."""

    id: int
    key: Hashable
    words: bytes | None
    vector: bytes | None = None


class Hit(NamedTuple):
    """A ranked version. `words` is its BM25 score, `cosine` None without a vector; `score` fuses them, at most 1."""

    id: int
    score: float
    words: float
    cosine: float | None


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """Versions of items. The postings are sorted by term: an item, and the weighted count of the term in it."""

    ids: Array
    keys: tuple[Hashable, ...]
    lengths: Array  # the sum of an item's weighted counts
    terms: Array
    items: Array
    counts: Array
    vectors: Array  # float32, a row per item; no columns where no item has one
    embedded: Array  # whether an item has a vector
    places: dict[Hashable, int]

    @classmethod
    def build(cls, rows: Sequence[IndexRow], dimension: int = 0) -> IndexSegment:
        """Rows with words, one per key. A vector of another dimension is another model's, and ignored."""
        packed = [row.words or b"" for row in rows]
        sizes = numpy.fromiter((len(words) // 5 for words in packed), "i8", len(rows))
        terms = numpy.frombuffer(b"".join([words[: len(words) // 5 * 4] for words in packed]), "<u4")
        counts = numpy.frombuffer(b"".join([words[len(words) // 5 * 4 :] for words in packed]), "u1")
        vectors = [row.vector if row.vector and len(row.vector) == 2 * dimension else None for row in rows]
        embedded = numpy.fromiter((vector is not None for vector in vectors), bool, len(rows))
        matrix = numpy.zeros((len(rows), dimension if embedded.any() else 0), "f4")
        if matrix.shape[1]:
            known = b"".join([vector for vector in vectors if vector is not None])
            matrix[embedded] = numpy.frombuffer(known, "<f2").reshape(-1, dimension)
        return cls._sorted(
            numpy.fromiter((row.id for row in rows), "i8", len(rows)),
            tuple(row.key for row in rows),
            terms,
            numpy.repeat(numpy.arange(len(rows), dtype="i4"), sizes),
            counts,
            matrix,
            embedded,
        )

    @classmethod
    def merge(cls, parts: Sequence[tuple[IndexSegment, Array]], dimension: int) -> IndexSegment:
        """One segment of what is alive in several."""
        terms, items, counts, vectors = [], [], [], []
        start = 0
        for segment, alive in parts:
            kept = alive[segment.items]
            place = numpy.cumsum(alive, dtype="i4") - 1 + start
            terms.append(segment.terms[kept])
            items.append(place[segment.items[kept]])
            counts.append(segment.counts[kept])
            vectors.append(segment.vectors[alive])
            start += int(alive.sum())
        width = dimension if any(part.shape[1] for part in vectors) else 0
        vectors = [part if part.shape[1] == width else numpy.zeros((len(part), width), "f4") for part in vectors]
        return cls._sorted(
            numpy.concatenate([segment.ids[alive] for segment, alive in parts]),
            tuple(key for segment, alive in parts for key, kept in zip(segment.keys, alive, strict=True) if kept),
            numpy.concatenate(terms),
            numpy.concatenate(items),
            numpy.concatenate(counts),
            numpy.concatenate(vectors),
            numpy.concatenate([segment.embedded[alive] for segment, alive in parts]),
        )

    @classmethod
    def _sorted(
        cls,
        ids: Array,
        keys: tuple[Hashable, ...],
        terms: Array,
        items: Array,
        counts: Array,
        vectors: Array,
        embedded: Array,
    ) -> IndexSegment:
        lengths = numpy.bincount(items, counts, len(ids)).astype("i8")
        order = numpy.argsort(terms)
        places = {key: place for place, key in enumerate(keys)}
        return cls(ids, keys, lengths, terms[order], items[order], counts[order], vectors, embedded, places)

    @property
    def size_bytes(self) -> int:
        arrays = (self.ids, self.lengths, self.terms, self.items, self.counts, self.vectors, self.embedded)
        return sum(array.nbytes for array in arrays) + 200 * len(self.keys)

    def postings(self, terms: Sequence[int]) -> list[slice]:
        """Where the postings of each term are."""
        wanted = numpy.array(terms, "u4")
        starts = numpy.searchsorted(self.terms, wanted, "left")
        ends = numpy.searchsorted(self.terms, wanted, "right")
        return [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


@dataclass(frozen=True)
class IndexScope:
    """What one search looks at: segments, and which of their versions are alive. `IndexScope(dimension)` is empty."""

    dimension: int = 0  # of the embedder's vectors; 0: words only
    parts: tuple[tuple[IndexSegment, Array], ...] = ()

    def refresh(self, rows: Iterable[IndexRow]) -> IndexScope:
        """The scope after these changes, ascending by id. A row ends what was known of its key."""
        newest = {row.key: row for row in rows}
        parts = [_without(part, newest) for part in self.parts]
        new = [row for row in newest.values() if row.words is not None]
        # Small segments are merged into their successors: searches see few, and an item is copied seldom.
        count = len(new)
        merged: list[tuple[IndexSegment, Array]] = []
        if new:
            merged.append(_all_of(IndexSegment.build(new, self.dimension)))
        while parts and (_live(parts[-1]) < MERGE_RATIO * count or 2 * _live(parts[-1]) < len(parts[-1][1])):
            count += _live(parts[-1])
            merged.insert(0, parts.pop())
        if len(merged) > 1 or count < sum(len(alive) for _, alive in merged):
            merged = [_all_of(IndexSegment.merge(merged, self.dimension))]
        return IndexScope(self.dimension, (*parts, *(part for part in merged if len(part[1]))))

    @cached_property
    def count(self) -> int:
        """How many items are alive."""
        return sum(map(_live, self.parts))

    @cached_property
    def mean_length(self) -> float:
        return sum(int(segment.lengths[alive].sum()) for segment, alive in self.parts) / max(self.count, 1)

    @cached_property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes + alive.nbytes for segment, alive in self.parts)

    def rank(self, query: str, vector: bytes | None = None) -> Ranking:
        """Rank the items that share a word with the query, and if its vector is given, all that have one."""
        words = self._words(query)
        kept = [alive for _, alive in self.parts]
        cosines, embedded = None, None
        if vector is not None:
            wanted = numpy.frombuffer(vector, "<f2").astype("f4")
            cosines = _joined([_cosines(segment, wanted) for segment, _ in self.parts], kept, "f4")
            embedded = _joined([segment.embedded for segment, _ in self.parts], kept, "?")
        ids = _joined([segment.ids for segment, _ in self.parts], kept, "i8")
        return Ranking.fuse(ids, _joined(words, kept, "f8"), cosines, embedded)

    def _words(self, query: str) -> list[Array]:
        """BM25, per segment."""
        terms = list(query_terms(query))
        scores = [numpy.zeros(len(segment.ids)) for segment, _ in self.parts]
        places = [segment.postings(terms) for segment, _ in self.parts]
        for number in range(len(terms)):
            found = [segment.items[place[number]] for (segment, _), place in zip(self.parts, places, strict=True)]
            holders = sum(int(alive[items].sum()) for (_, alive), items in zip(self.parts, found, strict=True))
            if not holders:
                continue
            rarity = math.log(1 + self.count / holders) * (SATURATION + 1)
            for (segment, _), place, items, score in zip(self.parts, places, found, scores, strict=True):
                count = segment.counts[place[number]] / TEXT_WEIGHT
                length = segment.lengths[items] / (self.mean_length or 1)
                score[items] += rarity * count / (count + SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length))
        return scores


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranked versions, sorted as far as they are read. The newer one of two with the same score is first."""

    ids: Array
    scores: Array
    words: Array
    cosines: Array | None
    embedded: Array | None

    @classmethod
    def fuse(cls, ids: Array, words: Array, cosines: Array | None, embedded: Array | None) -> Ranking:
        """Half words, half meaning, each as a part of the largest; items with neither are left out."""
        scores = words / (words.max(initial=0) or 1)
        if cosines is None or embedded is None or not embedded.any():
            return cls(ids, scores, words, None, None)._where(words > 0)
        largest = float(numpy.abs(cosines).max()) or 1
        scores = WORDS_SHARE * scores + (1 - WORDS_SHARE) * cosines / largest
        return cls(ids, scores, words, cosines, embedded)._where((words > 0) | embedded)

    def relevant(self, floor: float | None) -> Ranking:
        """Only what is about the query: a cosine of at least `floor`; without vector or floor, words near the best."""
        by_words = self.words >= WORDS_FLOOR * self.words.max(initial=0)
        if self.cosines is None or self.embedded is None or floor is None:
            return self._where(by_words)
        return self._where(numpy.where(self.embedded, self.cosines >= floor, by_words))

    def among(self, ids: Iterable[int]) -> Ranking:
        """Only these versions, with the scores they have among all."""
        return self._where(numpy.isin(self.ids, numpy.fromiter(ids, "i8")))

    def _where(self, kept: Array) -> Ranking:
        if kept.all():
            return self
        cosines = None if self.cosines is None else self.cosines[kept]
        embedded = None if self.embedded is None else self.embedded[kept]
        return Ranking(self.ids[kept], self.scores[kept], self.words[kept], cosines, embedded)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Hit]:
        """From the best on. Growing parts are sorted, so that ten hits among many cost no full sort."""
        done, size = 0, FIRST_PAGE
        while done < len(self):
            page = self._best(size)[done:].tolist()
            yield from map(self._hit, page)
            done, size = done + len(page), 4 * size

    def _best(self, size: int) -> Array:
        chosen = numpy.arange(len(self))
        if size < len(self):
            chosen = numpy.flatnonzero(self.scores >= numpy.partition(self.scores, -size)[-size])
        return chosen[numpy.lexsort((-self.ids[chosen], -self.scores[chosen]))][:size]

    def _hit(self, place: int) -> Hit:
        known = self.cosines is not None and self.embedded is not None and self.embedded[place]
        cosine = float(self.cosines[place]) if known and self.cosines is not None else None
        return Hit(int(self.ids[place]), float(self.scores[place]), float(self.words[place]), cosine)


class ScopeCache(Generic[Mark]):
    """The scopes used last, up to a size, each with a mark of the caller that says how new it is."""

    def __init__(self, bytes_max: int = 256 << 20) -> None:
        self._bytes_max = bytes_max
        self._known: OrderedDict[Hashable, tuple[Mark, IndexScope]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> tuple[Mark, IndexScope] | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: Hashable, mark: Mark, scope: IndexScope) -> None:
        with self._lock:
            self._drop(key)
            self._known[key] = (mark, scope)
            self._bytes += scope.size_bytes
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._known)))

    def discard(self, key: Hashable) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._bytes -= known[1].size_bytes


def _live(part: tuple[IndexSegment, Array]) -> int:
    return int(part[1].sum())


def _all_of(segment: IndexSegment) -> tuple[IndexSegment, Array]:
    return segment, numpy.ones(len(segment.ids), bool)


def _without(part: tuple[IndexSegment, Array], keys: Iterable[Hashable]) -> tuple[IndexSegment, Array]:
    segment, alive = part
    ended = [segment.places[key] for key in keys if key in segment.places]
    if not ended:
        return part
    alive = alive.copy()
    alive[ended] = False
    return segment, alive


def _cosines(segment: IndexSegment, vector: Array) -> Array:
    if not segment.vectors.shape[1]:
        return numpy.zeros(len(segment.ids), "f4")
    # Row by row, in one thread. A product of matrices would round a row differently in another segment.
    cosines: Array = numpy.vecdot(segment.vectors, vector)
    return cosines


def _joined(arrays: Sequence[Array], kept: Sequence[Array], kind: str) -> Array:
    """The live entries of each segment's array, one after the other."""
    if len(arrays) == 1 and kept[0].all():
        return arrays[0]
    return numpy.concatenate(
        [array[alive] for array, alive in zip(arrays, kept, strict=True)] or [numpy.empty(0, kind)]
    )
