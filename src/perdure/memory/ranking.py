"""Ranking: the score of each item of a scope by words and by meaning, and the order of the best.

There is no SQL and no clock here: the caller reads rows, and checks expiry and validity of what it fetches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from perdure.memory.arrays import Array, numpy
from perdure.memory.words import TEXT_WEIGHT

if TYPE_CHECKING:
    from perdure.memory.segments import IndexSegment

# A word counts by its density. In a text of PASSAGE_WORDS it counts about half; SMOOTHING bounds it in very short ones.
SMOOTHING = 0.3
PASSAGE_WORDS = 40
MEANING_SHARE = 0.5  # of the nats of a cosine: words and meaning of a text are not independent
# Of a scope's cosines before any is known: PRIOR_ITEMS items with a mean of 0 and a deviation of PRIOR_SPREAD.
PRIOR_ITEMS = 10
PRIOR_SPREAD = 0.12
HALF_NATS = 5  # a score of 0.5
FIRST_PAGE = 64
# An item is relevant by its words if it has at least WORDS_FLOOR of the best score, and QUERY_FLOOR of the query: one
# common word of many says nothing.
WORDS_FLOOR = 0.5
QUERY_FLOOR = 0.2
# A cosine is evidence if a scope would have one as large by chance in one of a thousand searches.
BY_CHANCE = 0.001

_ALL = slice(None)


class Hit(NamedTuple):
    """A ranked version. `words` and `meaning` are in nats, and `score` (0 to 1) is their sum.

    `cosine` is None without a vector. `evidence` is 1 if words or meaning say that the item is about the query, 0.5 if
    it only has a word in common, and 0 if what similarity there is can be chance.
    """

    id: int
    score: float
    words: float
    meaning: float
    cosine: float | None
    evidence: float


def word_scores(
    terms: Mapping[int, float], segments: Sequence[IndexSegment], count: int
) -> tuple[list[Array], list[Array]]:
    """Return, per segment, the nats of each item's words, and the part of the query's words that it has.

    `terms` are those of the query, with the part of a word that each counts. A word that h of n items have has
    log(1 + n / h) nats. A text gets the more of them the denser the word is in it. The part is from 0 to 1, and rare
    words count more.
    """
    total = 0.0
    scores = [numpy.zeros(len(part.ids)) for part in segments]
    had = [numpy.zeros(len(part.ids)) for part in segments]
    places = [part.postings([*terms]) for part in segments]
    for number, share in enumerate(terms.values()):
        chosen = [part.items[place[number]] for part, place in zip(segments, places, strict=True)]
        holders = sum(numpy.count_nonzero(part.alive[items]) for part, items in zip(segments, chosen, strict=True))
        rarity = share * math.log(1 + count / (holders or 0.5))
        total += rarity
        for part, place, items, score, has in zip(segments, places, chosen, scores, had, strict=True):
            numpy.add.at(has, items, rarity)
            numpy.add.at(score, items, numpy.float64(rarity) * part.densities[place[number]])
    return scores, [has / (total or 1) for has in had]


def densities(items: Array, counts: Array, count: int) -> Array:
    """Return how dense the word of each posting is in its item, 0 to 1. `counts` are weighted, of `count` items."""
    others = numpy.bincount(items, counts, count) / PASSAGE_WORDS + SMOOTHING * TEXT_WEIGHT
    dense: Array = (counts / (counts + others[items])).astype("f4")
    return dense


def score_of(nats: Array) -> Array:
    """Return scores from 0 to 1."""
    scores: Array = nats / (nats + HALF_NATS)
    return scores


def score_at(words: float, cosine: float | None, noise: Array) -> float:
    """Return the score of an item with these nats of words and this cosine."""
    meaning = 0.0 if cosine is None else MEANING_SHARE * surprises(numpy.array([cosine]), noise)[0]
    return float(score_of(numpy.array(words + meaning)))


def specific(vector: bytes, total: Array, count: int) -> bytes:
    """Return a query's vector without what it shares with every item: the mean of a scope's vectors."""
    target = numpy.frombuffer(vector, "<f2").astype("f8") - total / (count + PRIOR_ITEMS)
    return (target / max(float(numpy.linalg.norm(target)), 1e-9)).astype("<f2").tobytes()


def surprises(cosines: Array, noise: Array) -> Array:
    """Return the nats of cosines: how improbable each is among those of a scope, `noise`, taken as normal.

    A scope of n items does not show what is rarer than 1 in n: no cosine has more than log(1 + n) nats.
    """
    count = len(noise)
    # Rounded, so that a sum in another order, of the same items in other segments, ranks them the same.
    mean = round(float(noise.sum(dtype="f8")) / (count + PRIOR_ITEMS), 6)
    squares = float(numpy.square(noise - mean, dtype="f8").sum()) + PRIOR_ITEMS * PRIOR_SPREAD**2
    z = (cosines - mean) / round(math.sqrt(squares / (count + PRIOR_ITEMS)), 6)
    chance = 1 / (1 + numpy.exp(numpy.clip(z * (1.5976 + 0.07056 * z * z), -50, 50)))  # that noise is at least as near
    return nats_of(chance, count)


def nats_of(chance: Array, count: int) -> Array:
    """Return the nats of what has these chances, in a scope with so many vectors."""
    nats: Array = math.log(1 + 1 / (count + 1)) - numpy.log(chance + 1 / (count + 1))
    return nats


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranked versions, sorted only as far as they are read. Of two with the same score the newer is first."""

    ids: Array
    scores: Array
    words: Array
    meaning: Array
    cosines: Array  # NaN: no vector
    parts: Array  # the part of the query's words that each has, 0 to 1
    improbable: float  # the nats of a cosine that is hardly noise

    @classmethod
    def fuse(cls, ids: Array, words: Array, cosines: Array, parts: Array, noise: Array | None = None) -> Ranking:
        """Return a ranking by words and meaning. Items with neither are left out.

        `noise` are the cosines of the scope's items, or of a sample of them; by default `cosines`.
        """
        embedded = ~numpy.isnan(cosines)
        meaning = numpy.zeros(len(ids))
        improbable = math.inf
        if embedded.any():
            if noise is None:
                noise = cosines if embedded.all() else cosines[embedded]
            meaning = numpy.where(embedded, MEANING_SHARE * surprises(cosines, noise), 0)
            improbable = MEANING_SHARE * float(nats_of(numpy.array(BY_CHANCE / max(1, len(noise))), len(noise)))
        ranking = cls(ids, score_of(words + meaning), words, meaning, cosines, parts, improbable)
        return ranking._where((words > 0) | embedded)

    def relevant(self, floor: float | None) -> Ranking:
        """Return the items that are about the query: by their words, or with a cosine of at least `floor`."""
        near = self._by_words()
        return self._where(near if floor is None else near | (self.cosines >= floor))

    def by_meaning(self) -> Ranking:
        """Return the items that have a vector, ranked by their cosine alone."""
        return replace(self, scores=self.cosines)._where(~numpy.isnan(self.cosines))

    def among(self, ids: Array) -> Ranking:
        """Return the hits that are among these items, with the same scores."""
        return self._where(numpy.isin(self.ids, ids))

    def with_meaning(self, cosines: Mapping[int, float | None], noise: Array) -> Ranking:
        """Return a ranking by words and meaning of the items in `cosines`. None: an item without a vector."""
        numbers = numpy.sort(numpy.fromiter(cosines, "i8"))
        kept = numbers[numpy.minimum(numpy.searchsorted(numbers, self.ids), len(numbers) - 1)] == self.ids
        without_words = numpy.setdiff1d(numbers, self.ids[kept])
        ids = numpy.concatenate([self.ids[kept], without_words])
        zeros = numpy.zeros(len(without_words))
        words, parts = (numpy.concatenate([values[kept], zeros]) for values in (self.words, self.parts))
        return Ranking.fuse(ids, words, numpy.array([cosines[id] for id in ids.tolist()], "f4"), parts, noise)

    def _where(self, kept: Array) -> Ranking:
        if kept.all():
            return self
        places = numpy.flatnonzero(kept)  # ten times as fast as a mask
        arrays = (self.ids, self.scores, self.words, self.meaning, self.cosines, self.parts)
        ids, scores, words, meaning, cosines, parts = (array[places] for array in arrays)
        return Ranking(ids, scores, words, meaning, cosines, parts, self.improbable)

    def _by_words(self, places: Array | slice = _ALL) -> Array:
        """Return which items are about the query by their words."""
        near: Array = self.words[places] >= WORDS_FLOOR * self.words.max(initial=0)
        return near & (self.parts[places] >= QUERY_FLOOR)

    def _evidence(self, places: Array) -> Array:
        about = self._by_words(places) | (self.meaning[places] >= self.improbable)
        return numpy.where(about, 1, 0.5 * (self.words[places] > 0))

    def __iter__(self) -> Iterator[Hit]:
        """Yield hits from the best on. Growing parts are sorted, so that ten hits among many cost no full sort."""
        done, size = 0, FIRST_PAGE
        while done < len(self.ids):
            page = self._best(size)[done:]
            yield from map(self._hit, page.tolist(), self._evidence(page).tolist())
            done, size = done + len(page), 4 * size

    def _best(self, size: int) -> Array:
        chosen = numpy.arange(len(self.ids))
        if size < len(self.ids):
            chosen = numpy.flatnonzero(self.scores >= numpy.partition(self.scores, -size)[-size])
        return chosen[numpy.lexsort((-self.ids[chosen], -self.scores[chosen]))][:size]

    def _hit(self, place: int, evidence: float) -> Hit:
        cosine = float(self.cosines[place])
        known = None if math.isnan(cosine) else cosine
        score, words, meaning = (float(array[place]) for array in (self.scores, self.words, self.meaning))
        return Hit(int(self.ids[place]), score, words, meaning, known, evidence)
