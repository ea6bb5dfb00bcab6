"""A user's function orders the best items of a search anew: it gets them once, and what it returns is checked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
from memory_fixtures import BOTH, MemoryHarness

import perdure
from perdure import UsageError
from perdure.memory import AgentMemory, Item, boosts

TEXTS = {"a": "tea with milk", "b": "green tea from Uji", "c": "tea", "d": "coffee"}


class LikeCrossEncoder:
    """Has the `predict` of a CrossEncoder of sentence-transformers: pairs of texts in, an array of float32 out."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str | None]]] = []

    def predict(self, pairs: list[tuple[str, str | None]]) -> Any:
        self.calls.append(pairs)
        return numpy.array([float(len(text)) for _, text in pairs if text], "f4")


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_a_cross_encoder_orders_the_candidates_in_one_call(memory: MemoryHarness) -> None:
    alice, encoder = memory.store.memory("users", "alice"), LikeCrossEncoder()
    await memory.do(alice, "put_many", {key: {"fact": text} for key, text in TEXTS.items()})

    def rerank(query: str, items: list[Item]) -> Any:
        return encoder.predict([(query, item.text) for item in items])

    async def arerank(query: str, items: list[Item]) -> Any:
        return rerank(query, items)

    plain = await memory.do(alice, "search", "tea")
    for hook in (rerank, arerank):
        found = await memory.do(alice, "search", "tea", limit=2, rerank=hook, explain=True)
        assert [(item.key, item.score, item.text) for item in found] == [("b", 18.0, None), ("a", 13.0, None)]
        assert found[0].explain["before"] == next(item.score for item in plain if item.key == "b")
        assert set(encoder.calls.pop()) == {("tea", TEXTS[key]) for key in "abc"}
    assert encoder.calls == []
    assert await memory.do(alice, "search", "nothing", rerank=hook) == []
    assert encoder.calls == []
    with pytest.raises(UsageError, match="limit="):
        await memory.do(alice, "search", "tea", offset=1, rerank=rerank)


def test_four_times_the_limit_is_reranked_from_20_to_100(tmp_path: Path) -> None:
    counts: list[int] = []

    def rerank(query: str, items: list[Item]) -> Any:
        counts.append(len(items))
        return range(len(items))

    with perdure.open(tmp_path / "a.db") as store:
        memory = store.memory("m")
        memory.put_many({str(n): f"tea {n}" for n in range(130)})
        for limit in (1, 10, 50, 120):
            found = memory.search("tea", limit=limit, rerank=rerank)
            assert found[0].score == counts[-1] - 1
            assert len(found) == limit
    assert counts == [20, 40, 100, 120]


def fails(query: str, items: list[Item]) -> Any:
    raise RuntimeError("no model")


@pytest.mark.parametrize("answer", [[1.0], None, [[1.0, 2.0]] * 3, ["a", "b", "c"], [1.0, 2.0, float("nan")]], ids=repr)
def test_a_wrong_answer_is_refused(answer: Any, tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.memory("m").put_many(TEXTS)
        with pytest.raises(UsageError, match="a number for each of the 3 items"):
            store.memory("m").search("tea", rerank=lambda query, items: answer)


def test_an_error_of_the_function_reaches_the_caller(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.memory("m").put_many(TEXTS)
        with pytest.raises(RuntimeError, match="no model") as raised:
            store.memory("m").search("tea", rerank=fails)
        assert "best 3 items" in raised.value.__notes__[0]


def test_a_replay_does_not_rerank_again(tmp_path: Path) -> None:
    encoder = LikeCrossEncoder()
    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(
            store, "alice", rerank=lambda query, items: encoder.predict([(query, item.text) for item in items])
        )
        agent.facts.put_many({key: {"fact": text} for key, text in TEXTS.items()})

        @perdure.durable(name="reranking.recalls")
        def recalls() -> list[Any]:
            found = agent.memory.search("tea", rerank=agent._rerank)
            prompt = agent.recall("tea", k=2)
            perdure.ask("Well?")
            return [[item.key for item in found], [one["key"] for one in prompt.manifest["memories"]]]

        run = store.run(recalls, id="one")
        assert len(encoder.calls) == 2
        store.answer(run, "well")
        assert run.result() == [["b", "a", "c"], ["b", "a"]]
        assert len(encoder.calls) == 2


def test_recency_and_importance_add_nats(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        memory = store.memory("m")
        memory.put_many(
            {"old": {"fact": "tea", "weight": 3}, "new": {"fact": "tea"}, "odd": {"fact": "tea", "weight": "x"}}
        )
        plain = {item.key: item for item in memory.search("tea", explain=True)}
        nats = {key: item.explain["words"] for key, item in plain.items() if item.explain}
        by_weight = {item.key: item.score for item in memory.search("tea", rerank=boosts(importance="weight"))}
        assert by_weight == {"old": nats["old"] + 3, "new": nats["new"], "odd": nats["odd"]}
        new = plain["new"]
        ages = [replace(new, at=new.at - timedelta(days=days)) for days in (0, 30, 60)]
        assert boosts(recency="30d")("tea", ages) == [nats["new"] + part for part in (1, 0.5, 0.25)]
        with pytest.raises(UsageError, match="recency"):
            boosts(recency="soon")


def test_explain_names_the_words_that_matched(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        memory = store.memory("m")
        memory.put("hobby", {"fact": "Alice loves hiking in the mountains"})
        memory.put("room", {"number": 4711})
        memory.put("band", {"fact": "Will heard The Who"})
        memory.put("山", "富士山に登る")
        for query, words in {
            "Does Alice like a mountain, or the sea?": ["Alice", "mountain"],
            "who is in room 4711": ["room", "4711"],
            "had Will heard The Who?": ["Will", "heard", "The", "Who"],
            "富士山": ["富士山"],
        }.items():
            [item] = memory.search(query, explain=True, limit=1)
            assert item.explain is not None
            assert item.explain["matched"] == words
