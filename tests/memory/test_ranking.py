"""Ranking: what it finds and in which order, whatever way a scope came about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.memory.ranking import Hit
from perdure.memory.segments import IndexRow, IndexScope
from perdure.memory.words import ENGLISH, IndexText

WORDS = ("fish", "bird", "tree", "stone", "river")


def vector_of(numbers: Sequence[float]) -> bytes:
    return numpy.array(numbers, "<f2").tobytes()


terms = ENGLISH.query_terms
# Sums of these are exact in any order, so that equal means equal.
numbers = st.sampled_from((-1.0, -0.5, 0.0, 0.5, 1.0))
vectors = st.lists(numbers, min_size=4, max_size=4).map(vector_of)
texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
changes = st.tuples(st.integers(0, 9), st.none() | texts, st.none() | vectors)
histories = st.lists(st.lists(changes, max_size=6), max_size=8)


def row(id: int, text: str | None, numbers: Sequence[float] = (), *, key: object = None) -> IndexRow:
    return IndexRow(
        id, key or id, None if text is None else ENGLISH.pack(IndexText(text)), vector_of(numbers) if numbers else None
    )


def scope_of(*texts: str) -> IndexScope:
    return IndexScope().refresh(row(id, text) for id, text in enumerate(texts, 1))


def ids(hits: Iterable[Hit]) -> list[int]:
    return [hit.id for hit in hits]


@given(histories, texts, st.none() | vectors)
def test_a_refreshed_scope_ranks_like_a_fresh_one(
    history: list[list[tuple[int, str | None, bytes | None]]], query: str, vector: bytes | None
) -> None:
    refreshed = IndexScope(4)
    live: dict[object, IndexRow] = {}
    id = 0
    for batch in history:
        rows = []
        for key, text, meaning in batch:
            id += 1
            rows.append(IndexRow(id, key, None if text is None else ENGLISH.pack(IndexText(text)), meaning))
        before, earlier = refreshed, list(refreshed.rank(terms(query), vector))
        refreshed = refreshed.refresh(rows)
        assert list(before.rank(terms(query), vector)) == earlier, "a scope in use does not change"
        live.update({each.key: each for each in rows})
        live = {key: each for key, each in live.items() if each.words is not None}
        fresh = IndexScope(4).refresh(sorted(live.values()))
        assert refreshed.count == fresh.count == len(live)
        assert list(refreshed.rank(terms(query), vector)) == list(fresh.rank(terms(query), vector))


def test_the_cosine_of_an_item_is_the_same_in_any_segment() -> None:
    random = numpy.random.default_rng(1)
    meanings = random.normal(size=(300, 37)) / 6
    rows = [row(id, "fish", meaning.tolist()) for id, meaning in enumerate(meanings, 1)]
    refreshed = IndexScope(37)
    for each in rows:
        refreshed = refreshed.refresh([each])
    query = vector_of((random.normal(size=37) / 6).tolist())
    assert list(refreshed.rank(terms(""), query)) == list(IndexScope(37).refresh(rows).rank(terms(""), query))


@given(st.lists(texts, max_size=20), texts)
def test_words_are_scored_by_rarity_and_density(documents: list[str], query: str) -> None:
    expected: dict[int, float] = {}
    counts = {id: [text.split().count(word) for word in WORDS] for id, text in enumerate(documents, 1)}
    for place, word in enumerate(WORDS):
        holders = [id for id in counts if counts[id][place]]
        for id in holders if word in query.split() else ():
            count, rarity = counts[id][place], math.log(1 + len(counts) / len(holders))
            expected[id] = expected.get(id, 0) + rarity * count / (count + 0.3 + sum(counts[id]) / 40)
    found = {hit.id: hit.words for hit in scope_of(*documents).rank(terms(query))}
    assert found == pytest.approx(expected)


@given(st.integers(1, 200), st.integers(1, 5))
def test_ties_are_ordered_by_age_in_every_page(count: int, kinds: int) -> None:
    """Pages of a ranking with equal scores neither repeat nor lose an item: the newest is first."""
    scope = scope_of(*(" ".join(WORDS[: 1 + id % kinds]) for id in range(count)))
    hits = list(scope.rank(terms("fish")))
    assert len(hits) == count
    assert hits == sorted(hits, key=lambda hit: (-hit.score, -hit.id))
    assert list(islice(scope.rank(terms("fish")), 70)) == hits[:70]


def test_a_deleted_item_counts_no_more() -> None:
    scope = scope_of("fish bird", "fish tree", "fish stone")
    gone = scope.refresh([row(4, None, key=2), row(5, "river", key=3)])
    assert ids(gone.rank(terms("fish"))) == [1]
    assert gone.count == 2
    assert next(iter(gone.rank(terms("fish")))).words > next(iter(scope.rank(terms("fish")))).words, (
        "a rarer word says more"
    )
    assert ids(gone.refresh([row(6, None, key=1), row(7, None, key=3)]).rank(terms("fish river"))) == []


def test_nats_of_words_and_meaning_add_up_to_a_score() -> None:
    scope = IndexScope(2).refresh([row(1, "fish", [0, 1]), row(2, "bird", [1, 0]), row(3, "fish"), row(4, "tree")])
    hits = list(scope.rank(terms("fish"), vector_of([0.8, 0.6])))
    assert ids(hits) == [1, 3, 2]
    for hit in hits:
        nats = hit.words + hit.meaning
        assert hit.score == pytest.approx(nats / (nats + 5))
        assert 0 <= hit.meaning < 0.5 * math.log(1 + scope.count), "a scope of n items shows no more"
    assert (hits[1].cosine, hits[1].meaning) == (None, 0)
    assert ids(scope.rank(terms(""), vector_of([0.8, 0.6]))) == [2, 1], "what has a vector is found without a word"
    assert ids(scope.rank(terms("fish"))) == [3, 1], "without the query's vector only words count"


def test_noise_is_no_match_for_a_word() -> None:
    random = numpy.random.default_rng(1)
    rows = [row(id, WORDS[id % 4], (random.normal(size=64) / 8).tolist()) for id in range(2, 200)]
    scope = IndexScope(64).refresh([row(1, "river", (random.normal(size=64) / 8).tolist()), *rows])
    for _ in range(20):
        assert ids(scope.rank(terms("river"), vector_of((random.normal(size=64) / 8).tolist())))[0] == 1


def test_what_all_items_share_says_nothing() -> None:
    """Facts about one person have a part of their vectors in common, and so has each question about her."""
    alone = [[0.0] * at + [0.4] + [0.0] * (9 - at) for at in range(10)]
    scope = IndexScope(11).refresh(row(id, "", [0.9, *numbers]) for id, numbers in enumerate(alone, 1))
    [best, *others] = scope.rank(terms(""), vector_of([0.9, 0.0, 0.0, 0.0, 0.4, *[0.0] * 6]))
    assert best.id == 4
    assert (best.cosine or 0) > 0.2 + max(hit.cosine or 0 for hit in others)
    plain = scope.rank(terms(""), vector_of([1.0] + [0.0] * 10), by_meaning=True)
    assert [hit.cosine for hit in plain] == [pytest.approx(0.9, abs=1e-3)] * 10


def test_a_vector_of_another_model_is_ignored() -> None:
    scope = IndexScope(2).refresh([row(1, "fish", [0, 1]), row(2, "fish", [1, 0, 0])])
    assert [hit.cosine for hit in scope.rank(terms("fish"), vector_of([0, 1]))] == [1.0, None]


def test_relevant_hits_have_a_cosine_above_the_floor_or_words_near_the_best() -> None:
    scope = IndexScope(2).refresh([row(1, "fish", [0, 1]), row(2, "fish", [1, 0]), row(3, "fish"), row(4, "bird")])
    scope = scope.refresh([row(5, "tree", [0, 1]), row(6, "tree", [1, 0])])
    ranking = scope.rank(terms("fish"), vector_of([0, 1]))
    assert ids(ranking) == [1, 2, 5, 3, 6]
    assert ids(ranking.relevant(0.3)) == [1, 2, 5, 3], "words or meaning are enough"
    assert ids(ranking.relevant(None)) == [1, 2, 3]
    long = scope_of("fish fish", "fish " + "bird tree stone river " * 20)
    assert ids(long.rank(terms("fish"))) == [1, 2]
    assert ids(long.rank(terms("fish")).relevant(0.3)) == [1]
    common = scope_of(*(f"alice {word}" for word in ("cat", "nuts", "oslo", "tesla")))
    assert ids(common.rank(terms("alice passport number")).relevant(None)) == [], "a word that all have says nothing"
    assert ids(common.rank(terms("alice cat")).relevant(None)) == [1]


def test_an_empty_scope_finds_nothing() -> None:
    assert list(IndexScope(4).rank(terms("fish"), vector_of([1, 1, 1, 1]))) == []
    assert list(IndexScope().refresh([row(1, None)]).rank(terms("fish"))) == []
    assert list(scope_of("fish").rank(terms("the"))) == []


def test_many_small_changes_make_few_segments() -> None:
    scope = IndexScope()
    for id in range(500):
        scope = scope.refresh([row(id, WORDS[id % 5], key=id)])
        assert len(scope.parts) <= 1 + math.log(id + 1, 4)
    assert scope.count == 500
    for id in range(500):
        scope = scope.refresh([row(500 + id, WORDS[id % 5], key=id)])
    assert sum(len(part.ids) for part in scope.parts) <= 2 * scope.count, "ended versions do not pile up"


def test_the_stems_of_these_words_are_the_words() -> None:
    assert ENGLISH.stems(" ".join(WORDS)) == list(WORDS)
