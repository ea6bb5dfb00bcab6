"""Search in a scope of more than 50,000 items, where an index of vectors proposes the nearest and the database decides.

Words are still ranked in the process. Scores are the same as in a small scope. A hit is returned only when no item
outside of the proposal can have a higher score; until then a larger proposal is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perdure.storage.program import Flow

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.ranking import Hit

LARGE_ITEMS = 50_000
PROPOSED = 256  # the size of the first proposal, by words and by meaning


class Near(NamedTuple):
    """An item that an index proposes: its number, and the cosine between its vector and that of the query."""

    id: int
    cosine: float


class NearestQuery(NamedTuple):
    """A query for the items at and below a path that are nearest to a vector (float16, little-endian) of a model."""

    tenant: int
    path: str
    model: str
    vector: bytes
    limit: int


class SearchIndex(Protocol):
    """An index of item vectors outside of the database.

    It only proposes items. They may have ended, so the caller looks up their rows.
    """

    def nearest(self, query: NearestQuery) -> Flow[list[Near]]:
        """Return the nearest items in order, among all that were committed before the call.

        Return fewer than the limit only if no more exist. An index that fails returns none: items are then found by
        their words.
        """

    def forget(self, tenant: int, ids: Sequence[int]) -> Flow[list[str]]:
        """Remove items that were erased from the database.

        Return sentences that name what may still hold them.
        """


class Proposal(NamedTuple):
    """The items that an index proposes for a query."""

    asked: NearestQuery
    near: Sequence[Near]

    def score_of_the_rest(self, best: Sequence[Hit], relevant: bool, floor: float | None) -> float | None:
        """Return the highest score that an item outside of the proposal and of the best by words can have.

        Return None if there is no such item.
        """
        from perdure.memory.ranking import WORDS_FLOOR, WORDS_SHARE

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
