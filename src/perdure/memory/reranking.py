"""What a search returns: items with their scores, what explains these, and the order that a user's function gives.

Such a function may be a model, or add boosts. It gets the best items, and never decides what else was found.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from string import punctuation
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import UsageError
from perdure.memory.hooks import ask_outside
from perdure.memory.models import Item
from perdure.memory.reading import ItemReader
from perdure.memory.words import Analyzer, IndexText
from perdure.storage.program import Flow
from perdure.values.durations import Duration, check_duration

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.ranking import Hit
    from perdure.memory.search import Found

Rerank = Callable[[str, list[Item]], Any]
CANDIDATES_MIN: Final = 20
CANDIDATES_MAX: Final = 100


def candidates(limit: int | None) -> int | None:
    """Return how many items a search of `limit` items gives to `rerank`. None: all."""
    return None if limit is None else max(limit, CANDIDATES_MIN, min(4 * limit, CANDIDATES_MAX))


def boosts(*, recency: Duration | None = None, importance: str | None = None) -> Rerank:
    """Return a function for `rerank=` that adds nats to those of words and meaning.

    With `recency`, a half-life, the newest of the candidates gets one nat, and one that was learned a half-life earlier
    gets half of it. `importance` names a field of the value whose number is added.
    """
    half_life = None if recency is None else check_duration(recency, "recency")

    def boosted(query: str, items: list[Item]) -> list[float]:
        newest = max(item.at for item in items)

        def nats(item: Item) -> float:
            parts = item.explain or {}
            fresh = 0.0 if half_life is None else 0.5 ** ((newest - item.at) / half_life)
            return sum((parts["words"], parts.get("meaning", 0), fresh, _number(item.value, importance)))

        return [nats(item) for item in items]

    return boosted


def _number(value: Any, field: str | None) -> float:
    """Return the number in a field of a value, or 0."""
    number = value.get(field) if field is not None and isinstance(value, Mapping) else None
    return number if isinstance(number, int | float) else 0


def ranked(
    flow: Flow[Found],
    reader: ItemReader,
    query: str,
    limit: int | None,
    *,
    explain: Analyzer | None = None,
    rerank: Rerank | None = None,
) -> Flow[list[Item]]:
    """Return the best `limit` items that a search has found, with their scores. `explain` adds the parts of these."""
    hits = yield from flow
    rows = [row for row, _ in hits]
    items = reader.items(rows)
    places, scores = [*range(len(items))], [hit.score for _, hit in hits]
    if rerank is not None and items:
        shown = [
            replace(item, text=_text(reader.indexed(row)), score=hit.score, explain=_parts(hit))
            for item, (row, hit) in zip(items, hits, strict=True)
        ]
        scores = yield from _scores(rerank, query, shown)
        places.sort(key=lambda place: -scores[place])
    best = []
    for place in places[:limit]:
        explained = None
        if explain is not None:
            before = {} if rerank is None else {"before": hits[place][1].score}
            matched = _matched(query, reader.indexed(rows[place]), explain)
            explained = {"matched": matched, **_parts(hits[place][1]), **before}
        best.append(replace(items[place], score=scores[place], explain=explained))
    return best


def _text(indexed: IndexText) -> str:
    return indexed.text or f"{indexed.key} {indexed.labels}".strip()


def _parts(hit: Hit) -> dict[str, float]:
    meaning = {} if hit.cosine is None else {"meaning": hit.meaning, "cosine": hit.cosine}
    return {"words": hit.words, **meaning, "evidence": hit.evidence}


def _matched(query: str, text: IndexText, analyzer: Analyzer) -> list[str]:
    """Return the words of a query, as they were written, that an item has."""
    packed = analyzer.pack(text)
    count = len(packed) // 5
    counted = {*struct.unpack_from(f"<{count}I", packed)}.intersection(analyzer.query_terms(query))
    words = dict.fromkeys(word.strip(punctuation) for word in query.split())
    return [word for word in words if counted.intersection(analyzer.query_terms(word))]


def _scores(rerank: Rerank, query: str, items: list[Item]) -> Flow[list[float]]:
    """Call a user's function, and return its numbers. Raises UsageError if they are not one finite number per item."""
    try:
        answer = yield from ask_outside(rerank, query, items)
    except Exception as error:
        error.add_note(f"while rerank() ordered the best {len(items)} items of a search: nothing was returned")
        raise
    try:
        scores = [float(one) for one in answer]
    except (TypeError, ValueError):
        scores = []
    if len(scores) != len(items) or not all(map(math.isfinite, scores)):
        raise UsageError(f"rerank() returns a number for each of the {len(items)} items, not {answer!r:.200}")
    return scores
