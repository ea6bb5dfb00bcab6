"""The words and vectors of a scope's items as arrays in immutable segments, which `ranking.py` ranks.

A scope is a namespace and all below it. A refresh returns a new scope that shares the old segments, so a scope never
changes while another thread ranks with it. There is no SQL and no clock here: the caller reads rows, and checks expiry
and validity of what it fetches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, repeat
from typing import Any, NamedTuple, cast
from zlib import crc32

import msgspec

from perdure.memory.arrays import Array, numpy
from perdure.memory.columns import FieldColumn
from perdure.memory.ranking import Ranking, specific, word_scores
from perdure.memory.reading import ItemReader
from perdure.memory.rows import SEQUENCE_BITS

MERGE_RATIO = 4
_BLOCK = 2048  # vectors that are compared with a query at a time
_FORMAT = 3  # of a dumped segment
_ARRAYS = ("ids", "terms", "items", "counts", "more_items", "kinds", "at", "lengths", "total")
_NO_IDS = numpy.zeros(0, "i8")


class IndexRow(NamedTuple):
    """A version of an item. `words` is what `Analyzer.pack` returns, or None for a deletion. `vector` is float16."""

    id: int
    key: Hashable
    words: bytes | None
    vector: bytes | None = None
    kind: str = ""
    at: int = 0  # when it was learned


class Vectors(NamedTuple):
    """Vectors with 16 bits per number, exact but for numbers that are far smaller than the largest of their vector."""

    numbers: Array
    scales: Array  # a power of two for each vector; NaN: there is none

    @classmethod
    def of(cls, known: Array, places: Array, count: int) -> Vectors:
        """Return `count` vectors, of which those at `places` are known (float16)."""
        numbers, scales = numpy.zeros((count, known.shape[1]), "i2"), numpy.full(count, numpy.nan, "f4")
        for start in range(0, len(known), _BLOCK):
            block, where = known[start : start + _BLOCK].astype("f4"), places[start : start + _BLOCK]
            _, powers = numpy.frexp(numpy.abs(block).max(1, initial=0))
            numbers[where] = numpy.rint(numpy.ldexp(block, 15 - powers[:, None]))
            scales[where] = numpy.ldexp(numpy.float32(1), powers - 15)
        return cls(numbers, scales)

    def where(self, kept: Array) -> Vectors:
        return Vectors(self.numbers[kept], self.scales[kept])

    @classmethod
    def concatenate(cls, parts: Iterable[Vectors]) -> Vectors:
        return cls(*map(numpy.concatenate, zip(*parts, strict=True)))

    def total(self) -> Array:
        """Return the sum of all vectors. It is exact, and so the same in any order."""
        total = numpy.zeros(self.numbers.shape[1])
        for start in range(0, len(self.scales), _BLOCK):
            scales = numpy.nan_to_num(self.scales[start : start + _BLOCK]).astype("f8")
            total += scales @ self.numbers[start : start + _BLOCK].astype("f8")
        return total

    def products(self, target: Array) -> Array:
        # Row by row, in one thread: a product of matrices would round a row differently in another segment.
        products = numpy.empty(len(self.numbers), "f4")
        for start in range(0, len(products), _BLOCK):
            part = slice(start, start + _BLOCK)
            numpy.vecdot(self.numbers[part].astype("f4"), target, out=products[part])
        return products * self.scales


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
    vectors: Vectors  # one per item
    more: Vectors  # the further vectors of items with several, …
    more_items: Array  # … and their items
    kinds: Array  # the crc32 of each item's kind
    at: Array  # when each was learned
    lengths: Array  # the sum of an item's weighted counts
    places: dict[Hashable, int]
    total: Array  # the sum of the first vectors of live items
    alive: Array  # whether a version is still the newest of its item
    columns: dict[Hashable, FieldColumn] = field(default_factory=dict)  # of the fields that filters have asked for

    @classmethod
    def build(cls, rows: Sequence[IndexRow], dimension: int) -> IndexSegment:
        """Return a segment of rows with words, one per key. A row can have several vectors, one after the other.

        A vector of another dimension belongs to another model and is ignored.
        """
        packed = [row.words or b"" for row in rows]
        sizes = numpy.fromiter((len(words) // 5 for words in packed), "i8", len(rows))
        size = 2 * dimension
        embedded = [row.vector if size and row.vector and len(row.vector) % size == 0 else b"" for row in rows]
        known = numpy.frombuffer(b"".join(embedded), "<f2").reshape(-1, max(dimension, 1))
        owners = numpy.repeat(numpy.arange(len(rows)), [len(vector) // max(size, 1) for vector in embedded])
        is_first = numpy.diff(owners, prepend=-1) > 0
        further = int((~is_first).sum())
        vectors = Vectors.of(known[is_first], owners[is_first], len(rows))
        return cls._sorted(
            numpy.fromiter((row.id for row in rows), "i8", len(rows)),
            tuple(row.key for row in rows),
            numpy.frombuffer(b"".join([words[: len(words) // 5 * 4] for words in packed]), "<u4"),
            numpy.repeat(numpy.arange(len(rows), dtype="i4"), sizes),
            numpy.frombuffer(b"".join([words[len(words) // 5 * 4 : len(words) // 5 * 5] for words in packed]), "u1"),
            vectors,
            Vectors.of(known[~is_first], numpy.arange(further), further),
            owners[~is_first],
            numpy.fromiter((crc32(row.kind.encode()) for row in rows), "u4", len(rows)),
            numpy.fromiter((row.at for row in rows), "i8", len(rows)),
            vectors.total(),
        )

    @classmethod
    def merge(cls, parts: Sequence[IndexSegment]) -> IndexSegment:
        """Return one segment with the live versions of several."""
        postings: list[tuple[Array, Array, Array]] = []
        further: list[tuple[Vectors, Array]] = []
        start = 0
        for part in parts:
            kept = part.alive[part.items]
            places = numpy.cumsum(part.alive, dtype="i4") - 1 + start
            postings.append((part.terms[kept], places[part.items[kept]], part.counts[kept]))
            kept = part.alive[part.more_items]
            further.append((part.more.where(kept), places[part.more_items[kept]]))
            start += part.live
        terms, items, counts = map(numpy.concatenate, zip(*postings, strict=True))
        return cls._sorted(
            numpy.concatenate([part.ids[part.alive] for part in parts]),
            tuple(key for part in parts for key in compress(part.keys, part.alive.tolist())),
            terms,
            items,
            counts,
            Vectors.concatenate(part.vectors.where(part.alive) for part in parts),
            Vectors.concatenate(more for more, _ in further),
            numpy.concatenate([owners for _, owners in further]),
            numpy.concatenate([part.kinds[part.alive] for part in parts]),
            numpy.concatenate([part.at[part.alive] for part in parts]),
            numpy.sum([part.total for part in parts], 0),
        )

    def dumped(self) -> bytes:
        """Return the segment as bytes for `loaded`. Its keys are pairs of a namespace and a key, all of one."""
        arrays = (*self.vectors, *self.more, *(getattr(self, name) for name in _ARRAYS))
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        keys = cast("tuple[tuple[int, str], ...]", self.keys)
        header = msgspec.msgpack.encode((_FORMAT, shapes, [key for _, key in keys]))
        return b"".join(
            [len(header).to_bytes(8, "little"), header, *(array.reshape(-1).view("u1") for array in arrays)]
        )

    @classmethod
    def loaded(cls, data: bytearray, space: int) -> IndexSegment | None:
        """Return the segment of `dumped`, on the same memory, or None if another version has dumped it."""
        start = 8 + int.from_bytes(data[:8], "little")
        version, shapes, names = msgspec.msgpack.decode(memoryview(data)[8:start])
        if version != _FORMAT:
            return None
        arrays: list[Array] = []
        for kind, shape in shapes:
            count = math.prod(shape)
            arrays.append(numpy.frombuffer(data, kind, count, start).reshape(shape))
            start += arrays[-1].nbytes
        keys: tuple[Hashable, ...] = tuple(zip(repeat(space), names))
        known: dict[str, Any] = dict(zip(_ARRAYS, arrays[4:], strict=True))
        known |= {"vectors": Vectors(*arrays[:2]), "more": Vectors(*arrays[2:4])}
        places = {key: place for place, key in enumerate(keys)}
        return cls(keys=keys, places=places, alive=numpy.ones(len(keys), bool), **known)

    @classmethod
    def _sorted(
        cls,
        ids: Array,
        keys: tuple[Hashable, ...],
        terms: Array,
        items: Array,
        counts: Array,
        vectors: Vectors,
        more: Vectors,
        more_items: Array,
        kinds: Array,
        at: Array,
        total: Array,
    ) -> IndexSegment:
        lengths = numpy.bincount(items, counts, len(ids)).astype("i8")
        order = numpy.argsort(terms)
        postings = terms[order], items[order], counts[order]
        places = {key: place for place, key in enumerate(keys)}
        alive = numpy.ones(len(ids), bool)
        return cls(ids, keys, *postings, vectors, more, more_items, kinds, at, lengths, places, total, alive)

    @property
    def live(self) -> int:
        return int(self.alive.sum())

    @property
    def size_bytes(self) -> int:
        arrays = (self.ids, self.lengths, self.terms, self.items, self.counts, self.kinds, self.at, self.alive)
        size = sum(array.nbytes for array in (*arrays, *self.vectors, *self.more)) + 200 * len(self.keys)
        return size + sum(column.weight_bytes for column in self.columns.values())

    def without(self, keys: Iterable[Hashable]) -> IndexSegment:
        ended = [self.places[key] for key in keys if key in self.places]
        if not ended:
            return self
        alive = self.alive.copy()
        alive[ended] = False
        return self.only(alive)

    def only(self, kept: Array) -> IndexSegment:
        """Return the segment with fewer live items."""
        total = self.total - self.vectors.where(self.alive & ~kept).total()
        return replace(self, alive=self.alive & kept, total=total)

    def cosines(self, target: Array) -> Array:
        """Return the cosine of each item, that of its nearest vector."""
        nearest = self.vectors.products(target)
        if len(self.more_items):
            numpy.maximum.at(nearest, self.more_items, self.more.products(target))
        return nearest

    def matching(self, kind: str, reader: ItemReader | None) -> Array:
        """Return which items are alive, and can be of a kind and match the filter of a reader."""
        chosen = self.alive & (self.kinds == crc32(kind.encode())) if kind else self.alive
        if reader is None or reader.filter is None:
            return chosen
        columns = {test.names: self.columns[reader.column(test)] for test in reader.conditions}
        everything = numpy.ones(len(self.ids), bool)
        matches: Array = reader.filter.select(lambda test: columns[test.names].select(test), everything)
        for column in columns.values():
            matches = matches if column.unread is None else matches | column.unread
        return chosen & matches

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
    def total(self) -> tuple[Array, int]:
        """Return the sum of the vectors of live items, and their number."""
        known = sum(int((part.alive & ~numpy.isnan(part.vectors.scales)).sum()) for part in self.parts)
        return numpy.sum([part.total for part in self.parts], 0), known

    def sample(self, most: int) -> list[int]:
        """Return the ids of at most so many live items, evenly spread."""
        ids = [id for part in self.parts for id in part.ids[part.alive].tolist()]
        return ids[:: -(-len(ids) // most)] if ids else []

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def rank(self, terms: Mapping[int, float], vector: bytes | None = None, *, by_meaning: bool = False) -> Ranking:
        """Rank the items that have one of the query's terms and, with the query's vector, all that have a vector.

        With `by_meaning`, rank by the plain cosine alone, and leave out items without a vector.
        """
        if not self.parts:
            return Ranking.fuse(*numpy.zeros((4, 0)))
        if vector is None:
            cosines = [numpy.full(len(part.ids), numpy.nan, "f4") for part in self.parts]
        else:
            target = numpy.frombuffer(vector if by_meaning else specific(vector, *self.total), "<f2").astype("f4")
            cosines = [part.cosines(target) for part in self.parts]
        ids = [part.ids for part in self.parts]
        words, parts = word_scores(terms, self.parts, self.count)
        ranking = Ranking.fuse(self._live(ids), self._live(words), self._live(cosines), self._live(parts))
        return ranking.by_meaning() if by_meaning else ranking

    def as_of(self, then: int, ended: Iterable[IndexRow]) -> IndexScope:
        """Return the scope as it was at a time in the past. `ended`: the versions that were there and ended since."""
        parts = (part.only(part.at <= then) for part in self.parts)
        return IndexScope(self.dimension, tuple(parts)).refresh(ended)

    def with_segment(self, part: IndexSegment) -> IndexScope:
        """Return the scope with the items of a namespace that it had none of."""
        return IndexScope(self.dimension, (part, *self.parts))

    def of_space(self, space: int) -> IndexSegment:
        """Return one segment of the items of a namespace."""
        parts = [part.only(part.ids >> SEQUENCE_BITS == space) for part in self.parts]
        parts = [part for part in parts if part.alive.any()] or parts
        return parts[0] if len(parts) == 1 and parts[0].alive.all() else IndexSegment.merge(parts)

    def without_columns(self, keys: Iterable[Hashable]) -> list[IndexSegment]:
        """Return the segments that lack one of the columns."""
        needed = {*keys}
        return [part for part in self.parts if not part.columns.keys() >= needed]

    def matching(self, kind: str, reader: ItemReader | None) -> Array:
        """Return the ids of the items that can be of a kind and match the filter of a reader."""
        return numpy.concatenate([part.ids[part.matching(kind, reader)] for part in self.parts] or [_NO_IDS])

    def newest_matching(self, kind: str, reader: ItemReader, without: Iterable[int]) -> list[int]:
        """Return the ids of `matching`, the newest first, without some."""
        chosen = [part.matching(kind, reader) for part in self.parts]
        ids = numpy.concatenate(
            [part.ids[places] for part, places in zip(self.parts, chosen, strict=True)] or [_NO_IDS]
        )
        at = numpy.concatenate([part.at[places] for part, places in zip(self.parts, chosen, strict=True)] or [_NO_IDS])
        others = ~numpy.isin(ids, numpy.fromiter(without, "i8"))
        ids, at = ids[others], at[others]
        newest: list[int] = ids[numpy.lexsort((-ids, -at))].tolist()
        return newest

    def _live(self, arrays: Sequence[Array]) -> Array:
        """Return the live entries of the segments' arrays as one array."""
        if len(arrays) == 1 and self.parts[0].alive.all():
            return arrays[0]
        return numpy.concatenate([array[part.alive] for array, part in zip(arrays, self.parts, strict=True)])


def cosines(vector: bytes, stored: Iterable[tuple[int, bytes]]) -> dict[int, float]:
    """Return the cosines between a vector and stored ones by id. Vectors of another dimension are left out."""
    part = IndexSegment.build([IndexRow(id, id, b"", other) for id, other in stored], len(vector) // 2)
    products = part.cosines(numpy.frombuffer(vector, "<f2").astype("f4")).tolist()
    return {id: cosine for id, cosine in zip(part.ids.tolist(), products, strict=True) if not math.isnan(cosine)}


def specific_to(vector: bytes, stored: Iterable[tuple[int, bytes]]) -> tuple[bytes, Array]:
    """Return a query's vector without what it shares with a sample of vectors, and its cosines with these."""
    scope = IndexScope(len(vector) // 2).refresh(IndexRow(id, id, b"", other) for id, other in sorted(stored))
    target = specific(vector, *scope.total) if scope.parts else vector
    return target, numpy.array([*cosines(target, stored).values()], "f4")
