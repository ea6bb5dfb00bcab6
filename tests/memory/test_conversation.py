"""A conversation: its turns in a thread, recent ones verbatim, old ones folded; no turn is lost or recorded twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from driver_proxy import WriteProxy

import perdure
from perdure.errors import OutcomeUnknown, UsageError
from perdure.log.cache import BaseCache
from perdure.memory import Conversation
from perdure.storage.urls import open_driver
from perdure.threads.context import StoreContext
from perdure.values.registry import Codec


def summarize(summary: str, turns: list[dict[str, str]]) -> str:
    return f"{summary}{len(turns)} "


def converse(store: perdure.Store, strategy: Any, **options: Any) -> Conversation:
    episodes = store.memory("users", "alice", "episodes")
    return Conversation(store.thread("alice"), strategy, memory=episodes, recent=3, **options)


@pytest.mark.parametrize(
    ("strategy", "in_session", "after", "episodes"),
    [
        ("verbatim", (8, ""), (8, ""), 0),
        ("summary", (5, "3 "), (0, "3 5 "), 0),
        ("hybrid", (5, "3 "), (0, "3 5 "), 8),
    ],
)
def test_what_becomes_of_old_turns(
    strategy: str, in_session: tuple[int, str], after: tuple[int, str], episodes: int, tmp_path: Path
) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        talk = converse(store, strategy, summarize=summarize)
        for n in range(8):
            talk.add(("user", "assistant")[n % 2], f"turn {n}")
        now = talk.load()
        assert (len(now.turns), now.summary, now.session) == (*in_session, 1)
        assert now.turns[-1] == {"role": "assistant", "text": "turn 7"}
        assert now.first + len(now.turns) == 8
        talk.end_session()
        ended = talk.load()
        assert (len(ended.turns), ended.summary, ended.session) == (*after, 2)
        assert len(store.memory("users").list(kind="episodic")) == episodes
        assert talk.load(now.checkpoint) == now, "what was folded is still in the history"
        if strategy == "hybrid":
            assert [item.value for item in store.memory("users").search("turn 2", limit=1)] == [
                {"role": "user", "text": "turn 2", "session": 1}
            ]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_no_turn_of_two_writers_is_lost(url: str) -> None:
    with perdure.open(url, durability="normal") as store, perdure.open(url, durability="normal") as other:
        talks = [converse(store, "verbatim"), converse(other, "verbatim")]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: talks[n % 2].add("user", str(n)), range(24)))
        assert sorted(int(turn["text"]) for turn in talks[0].load().turns) == list(range(24))
        assert len(store.thread("alice").branches()) == 1


def test_turns_that_another_process_has_folded_meanwhile_are_not_folded_again(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        other = converse(store, "summary", summarize=lambda summary, turns: f"{summary}other {len(turns)} ")

        def slow(summary: str, turns: list[dict[str, str]]) -> str:
            other.end_session()
            other.add("user", "new")
            return f"{summary}slow {len(turns)} "

        talk = converse(store, "summary", summarize=slow)
        for n in range(4):
            talk.add("user", str(n))
        talk.end_session()
        now = talk.load()
        assert (now.summary, now.turns, now.first) == ("other 4 ", ({"role": "user", "text": "new"},), 4)


def test_a_lost_answer_to_commit_records_no_turn_twice() -> None:
    class Lossy(WriteProxy):
        lose = False

        def write(self, do: Any) -> Any:
            answer = do()
            if self.lose:
                self.lose = False
                raise OutcomeUnknown("the connection broke during COMMIT.")
            return answer

    driver = Lossy(open_driver(":memory:", durability="full", timeout_s=5, create=True))
    with perdure.Store(StoreContext(driver, Codec(), BaseCache(1000), "default")) as store:
        talk = converse(store, "hybrid")
        for n in range(4):
            talk.add("user", str(n))
            driver.lose = True
        talk.end_session()
        assert talk.load().session == 2
        assert [len(store.memory("users", "alice", "episodes").history(f"alice:{n}")) for n in range(5)] == [
            1,
            1,
            1,
            1,
            0,
        ]


def test_a_replay_adds_no_turn_and_asks_no_model_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def model(summary: str, turns: list[dict[str, str]]) -> str:
        asked.append(len(turns))
        return summarize(summary, turns)

    with perdure.open(tmp_path / "a.db") as store:
        talk = converse(store, "hybrid", summarize=model)

        @perdure.durable(name="conversation.agent")
        def agent() -> Any:
            for n in range(7):
                talk.add("user", str(n))
            perdure.ask("More?")
            talk.end_session()
            return talk.load().summary

        run = store.run(agent, id="one")
        store.answer(run, "no")
        assert run.result() == "3 4 "
        assert asked == [3, 4]
        assert talk.load().first == 7
        assert "memory.summarize" in [step.name for step in run.steps()]


def test_memory_of_another_store_or_tenant_is_refused_before_a_turn_is_taken(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store, perdure.open(tmp_path / "b.db") as other:
        for elsewhere in (other, store.tenant("acme")):
            with pytest.raises(UsageError, match="another store or tenant"):
                Conversation(store.thread("alice"), memory=elsewhere.memory("episodes"))
        past = store.memory("episodes").as_of(datetime.now(UTC))
        with pytest.raises(UsageError, match="cannot be written to"):
            Conversation(store.thread("alice"), memory=past)


def test_the_memory_that_is_given_may_be_another_handle_of_the_store_and_its_embedder_counts(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store, perdure.open(tmp_path / "a.db", embedder="local") as other:
        talk = Conversation(store.thread("alice"), memory=other.memory("episodes"))
        talk.add("user", "Mia is my cat")
        talk.end_session()
        assert other.memory("episodes").stats().embedded == 1


def test_what_is_no_conversation_is_refused(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.thread("alice").save({"messages": []})
        with pytest.raises(UsageError, match="holds no conversation"):
            converse(store, "verbatim").add("user", "hi")
        with pytest.raises(UsageError, match="scratchpad"):
            converse(store, "verbatim").add("tool", "observed")
        with pytest.raises(UsageError, match="needs memory"):
            Conversation(store.thread("b"))
        with pytest.raises(UsageError, match="needs summarize"):
            Conversation(store.thread("b"), "summary")
