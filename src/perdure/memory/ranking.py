"""Ranking: the score of each item of a scope by words and by meaning, and the order of the best.

There is no SQL and no clock here: the caller reads rows, and checks expiry and validity of what it fetches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import ExtraMissing
from perdure.memory.words import TEXT_WEIGHT

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise ExtraMissing("a search", "search") from error

if TYPE_CHECKING:
    from perdure.memory.segments import IndexSegment

SATURATION = 1.2  # k1 of BM25: how much further occurrences of a word count
LENGTH_WEIGHT = 0.75  # b of BM25: how much the length of a text lowers its score
WORDS_SHARE = 0.5  # of a score; the other half is meaning
FIRST_PAGE = 64
# An item is relevant by its words if it has at least WORDS_FLOOR of the best score, and QUERY_FLOOR of the query: one
# common word of many says nothing.
WORDS_FLOOR = 0.5
QUERY_FLOOR = 0.2

Array = NDArray[Any]


class Hit(NamedTuple):
    """A ranked version. `words` is its BM25 score, `cosine` is None without a vector, `score` (0 to 1) fuses both."""

    id: int
    score: float
    words: float
    cosine: float | None


def word_scores(
    terms: Sequence[int], segments: Sequence[IndexSegment], count: int, mean_length: float
) -> tuple[list[Array], list[Array]]:
    """Return, per segment, the BM25 score of each item, and the part of the query's words that it has.

    That part is from 0 to 1, and rare words count more.
    """
    total = 0.0
    scores = [numpy.zeros(len(part.ids)) for part in segments]
    had = [numpy.zeros(len(part.ids)) for part in segments]
    places = [part.postings(terms) for part in segments]
    for number in range(len(terms)):
        chosen = [part.items[place[number]] for part, place in zip(segments, places, strict=True)]
        holders = sum(int(part.alive[items].sum()) for part, items in zip(segments, chosen, strict=True))
        rarity = math.log(1 + count / (holders or 0.5))
        total += rarity
        if not holders:
            continue
        for part, place, items, score, has in zip(segments, places, chosen, scores, had, strict=True):
            has[items] += rarity
            occurrences = part.counts[place[number]] / TEXT_WEIGHT
            length = part.lengths[items] / (mean_length or 1)
            spread = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length)
            score[items] += (SATURATION + 1) * rarity * occurrences / (occurrences + spread)
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

    def among(self, ids: Array) -> Ranking:
        """Return the hits that are among these items, with the same scores."""
        return self._where(numpy.isin(self.ids, ids))

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
