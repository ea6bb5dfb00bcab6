"""Search in a scope of more than 50,000 items: an index of vectors proposes the nearest, the database decides.

Words are still ranked in the process. Of the best by words and the nearest by meaning the scores are the same as in a
small scope; a hit is returned when no item that was not proposed can have a higher score, else more are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perdure.storage.program import Flow

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import Hit

LARGE_ITEMS = 50_000
PROPOSED = 256  # by words and by meaning, at first


class Near(NamedTuple):
    """An item that an index proposes: its number, and the cosine between its vector and the one that is wanted."""

    id: int
    cosine: float


class NearestQuery(NamedTuple):
    """Which items are wanted: the nearest to a vector (float16, little-endian) of a model, at and below a path."""

    tenant: int
    path: str
    model: str
    vector: bytes
    limit: int


class SearchIndex(Protocol):
    """Vectors of items, kept elsewhere. It only proposes: what it names may have ended, and is looked up."""

    def nearest(self, wanted: NearestQuery) -> Flow[list[Near]]:
        """The nearest items, in order, among all that were committed before the call. Never fewer than exist."""

    def forget(self, tenant: int, ids: Sequence[int]) -> Flow[list[str]]:
        """These items were erased from the database: remove them. What may still hold them, as sentences."""


class Proposal(NamedTuple):
    """What an index was asked for, and what it proposes."""

    asked: NearestQuery
    near: Sequence[Near]

    def score_of_the_rest(self, best: Sequence[Hit], relevant: bool, floor: float | None) -> float | None:
        """The highest score that an item can have that is neither proposed nor among the best by words; None: there is
        no such item."""
        from perdure.memory.segments import WORDS_FLOOR, WORDS_SHARE

        words, meaning, near = 0.0, 0.0, self.near
        more_words, more_meaning = len(best) >= self.asked.limit, len(near) >= self.asked.limit
        if more_words:
            words = best[-1].words / best[0].words
            more_words = not relevant or words >= WORDS_FLOOR
        if more_meaning:
            meaning = max(0.0, near[-1].cosine) / (max(0.0, near[0].cosine) or 1)
            more_meaning = not relevant or (floor is not None and near[-1].cosine >= floor)
        if not more_words and not more_meaning:
            return None
        return WORDS_SHARE * words + (1 - WORDS_SHARE) * meaning
