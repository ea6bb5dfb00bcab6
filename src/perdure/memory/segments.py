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

from perdure.memory.arrays import Array, large_array, numpy
from perdure.memory.columns import FieldColumn
from perdure.memory.ranking import Ranking, densities, specific, word_scores
from perdure.memory.reading import ItemReader
from perdure.memory.rows import SEQUENCE_BITS
from perdure.values import accelerator

MERGE_RATIO = 4
_BLOCK = 2048  # vectors that are compared with a query at a time
_FORMAT = 4  # of a dumped segment
_ARRAYS = ("ids", "more_items", "at", "total", "terms", "items", "densities", "kinds")
_NO_IDS = numpy.zeros(0, "i8")


class IndexRow(NamedTuple):
    """A version of an item. `words` is what `Analyzer.pack` returns, or None for a deletion. `vector` is float16."""

    id: int
    key: Hashable
    words: bytes | None
    vector: bytes | None = None
    kind: str = ""
    at: int = 0  # when it was learned


def _where(array: Array, kept: Array) -> Array:
    return array if kept.all() else array[numpy.flatnonzero(kept)]


def _joined(arrays: list[Array]) -> Array:
    """Return arrays as one. The list is emptied on the way."""
    joined = large_array((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    start = 0
    while arrays:
        array = arrays.pop(0)
        joined[start : (start := start + len(array))] = array
    return joined


class Vectors(NamedTuple):
    """Vectors with 16 bits per number, exact but for numbers that are far smaller than the largest of their vector."""

    numbers: Array
    scales: Array  # a power of two for each vector; NaN: there is none

    @classmethod
    def of(cls, known: Array, places: Array, count: int) -> Vectors:
        """Return `count` vectors, of which those at `places` are known (float16)."""
        numbers, scales = large_array((count, known.shape[1]), "i2"), numpy.full(count, numpy.nan, "f4")
        for start in range(0, len(known), _BLOCK):
            block, where = known[start : start + _BLOCK].astype("f4"), places[start : start + _BLOCK]
            _, powers = numpy.frexp(numpy.abs(block).max(1, initial=0))
            numbers[where] = numpy.rint(numpy.ldexp(block, 15 - powers[:, None]))
            scales[where] = numpy.ldexp(numpy.float32(1), powers - 15)
        return cls(numbers, scales)

    def where(self, kept: Array) -> Vectors:
        return Vectors(_where(self.numbers, kept), _where(self.scales, kept))

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
        if (speed := accelerator.speed) is not None:
            speed.products(self.numbers, self.scales, target, products)
            return products
        for start in range(0, len(products), _BLOCK):
            part = slice(start, start + _BLOCK)
            numpy.vecdot(self.numbers[part].astype("f4"), target, out=products[part])
        return products * self.scales


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """Versions of items as arrays.

    The postings are sorted by term. Each is an item and how dense the term is in it.
    """

    ids: Array
    keys: tuple[Hashable, ...]
    terms: Array
    items: Array
    densities: Array
    vectors: Vectors  # one per item
    more: Vectors  # the further vectors of items with several, …
    more_items: Array  # … and their items
    kinds: Array  # the crc32 of each item's kind
    at: Array  # when each was learned
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
        items = numpy.repeat(numpy.arange(len(rows), dtype="i4"), sizes)
        counts = b"".join([words[len(words) // 5 * 4 : len(words) // 5 * 5] for words in packed])
        size = 2 * dimension
        embedded = [row.vector if size and row.vector and len(row.vector) % size == 0 else b"" for row in rows]
        known = numpy.frombuffer(b"".join(embedded), "<f2").reshape(-1, max(dimension, 1))
        owners = numpy.repeat(numpy.arange(len(rows)), [len(vector) // max(size, 1) for vector in embedded])
        is_first = numpy.diff(owners, prepend=-1) > 0
        further = int((~is_first).sum())
        vectors = Vectors.of(known[is_first], owners[is_first], len(rows))
        more = Vectors.of(known[~is_first], numpy.arange(further), further)
        columns = {
            "ids": numpy.fromiter((row.id for row in rows), "i8", len(rows)),
            "kinds": numpy.fromiter((crc32(row.kind.encode()) for row in rows), "u4", len(rows)),
            "at": numpy.fromiter((row.at for row in rows), "i8", len(rows)),
            "terms": numpy.frombuffer(b"".join([words[: len(words) // 5 * 4] for words in packed]), "<u4"),
            "items": items,
            "densities": densities(items, numpy.frombuffer(counts, "u1"), len(rows)),
            "more_items": owners[~is_first],
        }
        return cls._sorted(tuple(row.key for row in rows), vectors.total(), columns, vectors, more)

    @classmethod
    def merge(cls, parts: list[IndexSegment]) -> IndexSegment:
        """Return one segment with the live versions of several.

        The list is emptied on the way, so that arrays without another owner are not in memory twice.
        """
        columns: dict[str, list[Array]] = {}
        keys: list[Hashable] = []
        total = numpy.sum([part.total for part in parts], 0)
        while parts:
            part = parts.pop(0)
            for name, array in part._live_columns(len(keys)).items():
                columns.setdefault(name, []).append(array)
            keys += compress(part.keys, part.alive.tolist())
        joined = {name: _joined(arrays) for name, arrays in columns.items()}
        vectors, more = (Vectors(*(joined.pop(name + each) for each in Vectors._fields)) for name in ("", "more_"))
        return cls._sorted(tuple(keys), total, joined, vectors, more)

    def _live_columns(self, start: int) -> dict[str, Array]:
        """Return the arrays of live versions, whose items are counted from `start`."""
        places = numpy.cumsum(self.alive, dtype="i4") - 1 + start
        postings, further = self.alive[self.items], self.alive[self.more_items]
        columns = {name: _where(getattr(self, name), self.alive) for name in ("ids", "kinds", "at")}
        columns |= {name: _where(getattr(self, name), postings) for name in ("terms", "items", "densities")}
        columns |= {"more_items": _where(self.more_items, further)}
        columns |= {name: places[columns[name]] for name in ("items", "more_items")}
        columns |= self.vectors.where(self.alive)._asdict()
        return columns | {"more_" + name: array for name, array in self.more.where(further)._asdict().items()}

    def dumped(self) -> list[Any]:
        """Return the segment as buffers for `loaded`. Its keys are pairs of a namespace and a key, all of one."""
        arrays = self._dumped
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        keys = cast("tuple[tuple[int, str], ...]", self.keys)
        header = msgspec.msgpack.encode((_FORMAT, shapes, [key for _, key in keys]))
        start = len(header).to_bytes(8, "little") + header + bytes(-len(header) % 8)
        return [start, *(array.reshape(-1).view("u1").data for array in arrays)]

    @property
    def _dumped(self) -> list[Array]:
        """The arrays of a dump, those of large numbers first: numpy copies one that is not aligned at every use."""
        (numbers, scales), (more_numbers, more_scales) = self.vectors, self.more
        return [*(getattr(self, name) for name in _ARRAYS), scales, more_scales, numbers, more_numbers]

    @classmethod
    def loaded(cls, data: bytearray, space: int) -> IndexSegment | None:
        """Return the segment of `dumped`, on the same memory, or None if another version has dumped it."""
        start = 8 + int.from_bytes(data[:8], "little")
        version, shapes, names = msgspec.msgpack.decode(memoryview(data)[8:start])
        if version != _FORMAT:
            return None
        start += -start % 8
        arrays: list[Array] = []
        for kind, shape in shapes:
            count = math.prod(shape)
            arrays.append(numpy.frombuffer(data, kind, count, start).reshape(shape))
            start += arrays[-1].nbytes
        *known, scales, more_scales, numbers, more_numbers = arrays
        keys: tuple[Hashable, ...] = tuple(zip(repeat(space), names))
        columns: dict[str, Any] = dict(zip(_ARRAYS, known, strict=True))
        return cls._of(keys, columns, Vectors(numbers, scales), Vectors(more_numbers, more_scales))

    @classmethod
    def _sorted(
        cls, keys: tuple[Hashable, ...], total: Array, columns: dict[str, Any], vectors: Vectors, more: Vectors
    ) -> IndexSegment:
        order = numpy.argsort(columns["terms"])
        for name in ("terms", "items", "densities"):
            column = columns[name]
            columns[name] = column.take(order, out=large_array(column.shape, column.dtype), mode="clip")
        return cls._of(keys, {**columns, "total": total}, vectors, more)

    @classmethod
    def _of(cls, keys: tuple[Hashable, ...], columns: dict[str, Any], vectors: Vectors, more: Vectors) -> IndexSegment:
        places = {key: place for place, key in enumerate(keys)}
        alive = numpy.ones(len(keys), bool)
        return cls(keys=keys, vectors=vectors, more=more, places=places, alive=alive, **columns)

    @property
    def live(self) -> int:
        return int(self.alive.sum())

    @property
    def size_bytes(self) -> int:
        arrays = (self.ids, self.terms, self.items, self.densities, self.kinds, self.at, self.alive)
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
