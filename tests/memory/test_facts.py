"""Facts that change: known facts reach `extract`, superseded ones leave the prompt, and facts that repeat are one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import UsageError
from perdure.memory import AgentMemory

GRAZ, OSLO = {"fact": "The user lives in Graz"}, {"fact": "The user lives in Oslo now"}


def prompt_of(agent: AgentMemory, query: str) -> str:
    return agent.recall(query).messages[0]["content"]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_extract_sees_known_facts_and_a_superseded_one_leaves_the_prompt_and_stays_in_memory(url: str) -> None:
    seen: list[dict[str, Any]] = []
    since = datetime(2026, 5, 1, tzinfo=UTC)

    def extract(turn: dict[str, str], known: dict[str, Any]) -> Any:
        seen.append(known)
        if "moved" not in turn["user"]:
            return [{"do": "add", "key": "home", "value": GRAZ}, {"do": "nothing"}]
        old = next(key for key, value in known.items() if "lives in" in value["fact"])
        moved = {"key": "home in Oslo", "value": OSLO, "supersedes": old, "valid_from": "2026-05-01T00:00:00+00:00"}
        return [{"do": "supersede", **moved}]

    with perdure.open(url) as store:
        agent = AgentMemory(store, "alice", extract=extract)
        agent.record("I live in Graz", "Nice")
        agent.record("I moved, where do I live?", "In Oslo")
        assert seen == [{}, {"home": GRAZ}]
        assert "Oslo" in prompt_of(agent, "where does the user live?")
        assert "lives in Graz" not in prompt_of(agent, "where does the user live?").partition("remember")[2]
        home, new = agent.facts.get("home"), agent.facts.get("home in Oslo")
        assert home is not None
        assert new is not None
        assert (home.value, home.valid_to, new.valid_from) == (GRAZ, since, since)
        before = agent.facts.search("where does the user live", valid_at=datetime(2026, 4, 1, tzinfo=UTC))
        assert [item.key for item in before] == ["home"]
        agent.record("forget it", "ok", facts={"home in Oslo": None})
        assert agent.facts.get("home in Oslo") is None
        assert store.ops.verify().ok


def test_in_a_run_what_extract_saw_is_recorded(tmp_path: Path) -> None:
    calls: list[Any] = []

    def extract(turn: dict[str, str], known: dict[str, Any]) -> dict[str, Any]:
        calls.append(known)
        return {"home": GRAZ}

    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice", extract=extract)
        agent.facts.put("name", {"fact": "The user is called Alice"})

        @perdure.durable(name="facts.learns")
        def learns() -> int:
            agent.record("The user says where they live", "ok")
            perdure.ask("Well?")
            return len(calls)

        run = store.run(learns, id="one")
        agent.facts.put("more", {"fact": "The user likes tea"})
        store.answer(run, "well")
        assert run.result() == 1
        assert calls == [{"name": {"fact": "The user is called Alice"}}]


SAME = {"fact": "In Graz the user lives!"}


@pytest.mark.parametrize(
    ("policy", "keys", "versions"), [("merge", ["home"], 2), ("link", ["where"], 2), ("keep", ["home", "where"], 1)]
)
def test_facts_that_say_the_same_become_one(policy: Any, keys: list[str], versions: int, tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice", duplicates=policy)
        agent.record("a", "b", facts={"home": GRAZ})
        agent.record("a", "b", facts={"where": SAME})
        now = datetime.now(UTC)
        assert sorted(item.key for item in agent.facts.list(valid_at=now)) == keys
        assert len(agent.facts.history("home")) == versions
        others = {
            "not": {"fact": "The user does not live in Graz"},
            "flat": {"fact": "The user lives in Graz at 5"},
            "work": "The user lives in Graz",  # no sentence by itself: its key is a part of it
            "city": {"fact": "Graz"},
            "town": {"fact": "Graz"},
        }
        agent.record("a", "b", facts=others)
        assert {item.key for item in agent.facts.list()} >= others.keys()


def test_an_embedder_finds_facts_that_say_the_same_in_other_words(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        agent = AgentMemory(store, "alice")
        agent.record("a", "b", facts={"home": GRAZ})
        agent.record(
            "a", "b", facts={"two": {"fact": "The user is living in Graz"}, "tea": {"fact": "He likes tea a lot"}}
        )
        agent.record(
            "a", "b", facts={"tea2": {"fact": "He likes coffee a lot"}, "oslo": {"fact": "The user lives in Oslo"}}
        )
        assert sorted(item.key for item in agent.facts.list()) == ["home", "oslo", "tea", "tea2"]


@pytest.mark.parametrize(
    ("known", "new"),
    [
        ("Alice can eat cheese made from goat milk", "Alice can't eat cheese made from goat milk"),
        ("Alice mag ihren neuen Kollegen aus Graz", "Alice mag ihren neuen Kollegen aus Graz nicht"),
        ("Алиса пьёт кофе каждое утро в офисе", "Алиса не пьёт кофе каждое утро в офисе"),
        ("爱丽丝每天早上在办公室喝咖啡", "爱丽丝每天早上在办公室不喝咖啡"),
        ("アリスは毎朝オフィスでコーヒーを飲む", "アリスは毎朝オフィスでコーヒーを飲まない"),
        ("Bob is the manager of Alice in the team", "Alice is the manager of Bob in the team"),
        ("The flight leaves Rome for Paris on Monday", "The flight leaves Paris for Rome on Monday"),
        ("Her appointment is on Monday at the dentist", "Her appointment is on Tuesday at the dentist"),
        (
            "Tuesday is the day on which the user goes swimming with his children in the public pool",
            "Thursday is the day on which the user goes swimming with his children in the public pool",
        ),
    ],
)
def test_facts_that_differ_in_a_name_or_a_denial_are_two(known: str, new: str, tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        agent = AgentMemory(store, "alice")
        agent.record("a", "b", facts={"one": {"fact": known}})
        agent.record("a", "b", facts={"two": {"fact": new}})
        assert {item.key: item.value["fact"] for item in agent.facts.list()} == {"one": known, "two": new}


def test_a_fact_is_found_again_among_many_that_resemble_it(tmp_path: Path) -> None:
    cities = ("Oslo", "Rome", "Bonn", "Lyon", "Cork", "Bern", "Riga", "Porto", "Lille", "Basel")
    friends = ("Ann", "Bob", "Carl", "Dora", "Fay")
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        agent = AgentMemory(store, "alice")
        sentence = "The user lives in the city of {} with {}"
        agent.facts.put_many({f"{a} {b}": {"fact": sentence.format(a, b)} for a in cities for b in friends})
        agent.facts.put("home", {"fact": sentence.format("Graz", "Mia")})
        agent.record("a", "b", facts={"two": {"fact": "The user really lives in the city of Graz with Mia"}})
        assert agent.facts.get("two") is None
        assert len(agent.facts.history("home")) == 2


def test_a_fact_without_a_vector_is_found_by_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.memory.embed.RETRY_DELAYS_S", ())
    is_down = True

    def embed(texts: list[str]) -> list[list[float]]:
        if is_down:
            raise RuntimeError("down")
        return [[float(len(text)), 1.0] for text in texts]

    with perdure.open(tmp_path / "a.db", embedder=embed) as store:
        agent = AgentMemory(store, "alice")
        agent.facts.put("home", GRAZ)
        is_down = False
        agent.record("a", "b", facts={"where": SAME})
        assert [item.key for item in agent.facts.list()] == ["home"]


def test_wrong_answers_of_extract_are_refused(tmp_path: Path) -> None:
    wrong: list[Any] = [
        [{"do": "invent", "key": "a", "value": 1}],
        [{"do": "add", "value": 1}],
        [{"do": "add", "key": "a"}],
        [{"do": "forget", "key": "a", "value": 1}],
        [{"do": "supersede", "key": "a", "value": 1}],
        [{"do": "add", "key": "a", "value": 1, "valid_from": "soon"}],
        [{"do": "add", "key": "a", "value": 1, "other": 2}],
        ["a"],
    ]
    with perdure.open(tmp_path / "a.db") as store:
        for answer in wrong:
            agent = AgentMemory(store, "alice", extract=lambda turn, answer=answer: answer)
            with pytest.raises(UsageError):
                agent.record("a", "b")
        agent = AgentMemory(
            store, "alice", extract=lambda turn: [{"do": "supersede", "key": "a", "value": GRAZ, "supersedes": "none"}]
        )
        agent.record("a", "b")  # a model may name a fact that is not there
        assert [item.key for item in agent.facts.list()] == ["a"]
        with pytest.raises(UsageError, match="merge, link, keep"):
            AgentMemory(store, "alice", duplicates="drop")  # type: ignore[arg-type]


def test_scopes_of_agent_run_and_everyone_are_recalled_if_chosen(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice", agent="guide", run="r1", shared=True)
        assert [memory.namespace for memory in agent.scopes.values()] == [
            ("users", "alice"),
            ("agents", "guide"),
            ("runs", "r1"),
            ("shared",),
        ]
        for name, memory in agent.scopes.items():
            memory.put("hike", {"fact": f"A hike that the {name} knows"})
        store.memory("agents", "other").put("hike", {"fact": "A hike that another agent knows"})
        text = prompt_of(agent, "which hike?")
        assert [f"the {name} knows" in text for name in agent.scopes] == [True] * 4
        assert "another agent" not in text
        chosen = agent.recall("which hike?", scopes=["user", "shared"])
        assert "shared knows" in chosen.text()
        assert "agent knows" not in chosen.text()
        assert agent.rebuild(chosen.manifest) == chosen
        with pytest.raises(UsageError, match="'team' is not among user, agent, run, shared"):
            agent.recall("which hike?", scopes=["team"])


def test_a_model_edits_blocks_and_replaces_facts(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice")
        tools = {tool.__name__: tool for tool in agent.facts.tools(blocks=["persona"])}
        assert [*tools] == ["memory_search", "memory_save", "memory_forget", "memory_append", "memory_replace"]
        append, replace, save = (tools[f"memory_{name}"] for name in ("append", "replace", "save"))
        assert append("persona", "Speaks German") == "block 'persona' now reads:\nSpeaks German"
        append("persona", "Likes tea, hot tea")
        assert replace("persona", "German", "French") == (
            "block 'persona' now reads:\nSpeaks French\nLikes tea, hot tea"
        )
        assert "the old text is not in it; the block reads: Speaks French" in replace("persona", "German", "x")
        assert "is in it 2 times: quote more of it" in replace("persona", "tea", "coffee")
        assert "there is no block 'other', only persona" in append("other", "x")
        assert "tokens, and 500 are the most" in append("persona", "long " * 600)
        item = agent.facts.get("persona")
        assert item is not None
        assert item.pinned
        assert item.kind == "block"
        assert "Speaks French" in prompt_of(agent, "anything")
        assert [tool.__name__ for tool in agent.facts.tools(read_only=True, blocks=["persona"])] == ["memory_search"]

        assert save("home", GRAZ["fact"]) == "saved 'home'"
        assert save("where", SAME["fact"]) == "saved as 'home', which said the same"
        assert save("new home", OSLO["fact"]).splitlines()[1:] == [
            "Similar facts are known. If one is no longer true, save this one again with its key in `replaces`:",
            '{"key":"home","value":{"fact":"In Graz the user lives!"}}',
        ]
        assert save("new home", OSLO["fact"], replaces="home") == "saved 'new home', which replaces 'home'"
        assert "Graz" not in prompt_of(agent, "where does the user live?")
        assert "nothing is remembered under 'nowhere'" in save("new home", OSLO["fact"], replaces="nowhere")
        with pytest.raises(UsageError, match=r"\['persona'\]"):
            agent.facts.tools(blocks="persona")
