"""Search in a scope of more than 50,000 items, where an index of vectors proposes the nearest and the database decides.

Words are still ranked in the process. Scores are the same as in a small scope. A hit is returned only when no item
outside of the proposal can have a higher score; until then a larger proposal is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perdure.storage.program import Flow

if TYPE_CHECKING:  # needs numpy
    from numpy.typing import NDArray

    from perdure.memory.ranking import Hit

LARGE_ITEMS = 50_000
PROPOSED = 256  # the size of the first proposal, by words and by meaning
SAMPLE = 512  # items that show what the vectors of a scope have in common, and how much their cosines differ


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
    """The items that an index proposes for a query. `noise` are the cosines of a sample of the scope's items."""

    asked: NearestQuery
    near: Sequence[Near]
    noise: NDArray[Any]

    def score_of_the_rest(self, best: Sequence[Hit], relevant: bool, floor: float | None) -> float | None:
        """Return the highest score that an item outside of the proposal and of the best by words can have.

        Return None if there is no such item.
        """
        from perdure.memory.ranking import WORDS_FLOOR, score_at

        words, near, limit = best[-1].words if best else 0.0, self.near, self.asked.limit
        more_words = len(best) >= limit and not (relevant and words < WORDS_FLOOR * best[0].words)
        more_meaning = len(near) >= limit and not (relevant and (floor is None or near[-1].cosine < floor))
        if not more_words and not more_meaning:
            return None
        return score_at(words if len(best) >= limit else 0, near[-1].cosine if len(near) >= limit else None, self.noise)
