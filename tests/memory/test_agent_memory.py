"""`AgentMemory`: a turn, its facts and its checkpoint are one; prompts can be rebuilt; what is learned is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from learning_process import agent_of

import perdure
from perdure import NotFound, UsageError
from perdure.memory import AgentMemory, Context, Scratchpad
from perdure.testing.processes import ForkServer

PROCESS = Path(__file__).parents[1] / "support" / "learning_process.py"


def state_of(agent: AgentMemory) -> tuple[Any, ...]:
    said = agent.conversation.load()
    facts = {item.key: (item.value, item.version) for item in agent.facts.list()}
    return len(said.turns) + said.first, said.summary, facts, len(agent.memory.list(kind="episodic"))


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_turn_facts_episodes_and_checkpoint_are_one_transaction(url: str) -> None:
    """A fault at each point of a record that also folds old turns: all of it is there, or none."""
    strike_at, points = 0, 0

    def hook(_: str) -> None:
        nonlocal points
        points += 1
        if points == strike_at:
            raise RuntimeError("injected")

    def record(user: str, strike: int) -> tuple[Any, ...]:
        nonlocal points, strike_at
        agent = agent_of(store, user=user)
        for n in range(3):
            agent.record(str(n), "answer")
        before, points, strike_at = state_of(agent), 0, strike
        try:
            agent.record("3", "answer")
        except RuntimeError:
            pass
        made, strike_at = points, 0
        return before, state_of(agent), made

    with perdure.open(url, durability="normal", hook=hook) as store:
        before, after, count = record("no strike", 0)
        assert (before[0], after[0], after[1], after[3], after[2]["last"]) == (6, 8, "3 ", 3, ("3", 4))
        assert count > 10
        ends = [record(f"strike {number}", number)[:2] for number in range(1, count + 1)]
        assert {end[1] == after for end in ends} == {True, False}
        assert all(end in [(before, before), (before, after)] for end in ends)
        assert store.ops.verify().ok


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("scripts:script") as started:
        yield started


def test_killed_at_any_time_a_turn_is_there_whole_or_not_at_all(url: str, fork_server: ForkServer) -> None:
    for after in (2, 9, 5):
        child = fork_server.start(str(PROCESS), url)
        said = [int(line) for line in islice(child.lines(), after)]
        said += [int(line) for line in child.kill()]
        with perdure.open(url) as store:
            turns, _, facts, episodes = state_of(agent_of(store))
            assert turns == 2 * facts["last"][1], "as many turns as versions of the fact that each puts"
            assert int(facts["last"][0]) == facts["last"][1] - 1 >= said[-1]
            assert episodes == agent_of(store).conversation.load().first
            assert store.ops.verify().ok


def test_killed_at_any_point_of_a_run_each_turn_is_recorded_once_and_hooks_are_steps(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    path, log = tmp_path / "a.db", tmp_path / "log"
    for kill_at in (3, 6, 9, 12, 0):
        said = list(fork_server.start(str(PROCESS), str(path), str(kill_at), str(log)).lines())
    assert said == ["['3 2 5 ', 6]"]
    with perdure.open(path) as store:
        agent = agent_of(store)
        assert [len(agent.facts.history(f"turn {n}")) for n in range(5)] == [1] * 5
        assert state_of(agent)[0] == 10
        names = [step.name for step in store.get_run("one").steps()]
        counts = [names.count(f"memory.{name}") for name in ("recall", "extract", "summarize", "record")]
        assert counts == [5, 5, 3, 5]
    called = log.read_text().splitlines()
    assert len(called) - len(set(called)) <= 4, "a hook is called again only where its own end was not recorded"


def test_a_prompt_is_rebuilt_byte_for_byte_until_something_of_it_is_erased(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        agent = AgentMemory(
            store, "alice", instructions="You are a guide.", summarize=lambda summary, turns: "They met."
        )
        agent.facts.put("hobby", {"fact": "Alice loves hiking"})
        agent.facts.put("theme", {"fact": "Alice prefers dark mode"}, pinned=True)
        agent.record("Hello", "Hi Alice")
        agent.end_session()
        agent.record("I am back", "Welcome")
        pad = Scratchpad(500)
        pad.add("observation", "sunny in the mountains", source="weather")
        prompt = agent.recall("Is hiking possible?", progress="Next: look at the map", scratchpad=pad)
        assert len(prompt.manifest["memories"]) == len(prompt.manifest["pinned"]) == 1
        saved = agent.record(prompt, "Yes")
        agent.facts.put("hobby", {"fact": "Alice prefers the sea"})
        agent.facts.delete("theme")
        agent.end_session()
        changed = AgentMemory(store, "alice", instructions="You are a pirate.")
        manifest = agent.conversation.load(saved).manifest
        assert manifest is not None, "it is stored with the turn"
        assert changed.rebuild(manifest) == prompt
        assert "Alice loves hiking" not in str(manifest), "stored once: what is erased is not in a manifest"
        agent.facts.erase("hobby")
        with pytest.raises(NotFound, match="'hobby' of users/alice/facts was erased"):
            changed.rebuild(manifest)


def test_facts_of_a_user_are_capped_and_pinned_ones_stay(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice")
        agent.facts.put("name", "Alice", pinned=True)
        for n in range(12):
            agent.record("hi", "hello", facts={f"fact {n}": "x" * 1000, "name": f"Alice {n}"})
        policy = agent.facts.policy()
        assert (policy.max_bytes, policy.max_age) == (8192, timedelta(days=90))
        keys = {item.key for item in agent.facts.list()}
        assert {"name", "fact 11", "fact 5"} <= keys
        assert "fact 3" not in keys
        assert agent.facts.history("fact 3")[-1].gone == "cap"
        name = agent.facts.get("name")
        assert name is not None
        assert (name.value, name.pinned) == ("Alice 11", True)
        agent.end_session()
        assert len(agent.memory.list(kind="episodic")) == 24, "only facts are capped"
        store.memory("users").policy(max_items=3)
        other = AgentMemory(store, "bob")
        other.record("hi", "hello", facts={"a": 1})
        assert other.facts.policy().max_bytes is None, "a policy of your own is kept"


def test_hooks_decide_what_is_learned(tmp_path: Path) -> None:
    asked: list[str] = []

    def extract(turn: dict[str, str]) -> dict[str, Any] | None:
        asked.append(turn["user"])
        return {"city": None} if "moved" in turn["user"] else {"city": "Rome"}

    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice", extract=extract, should_memorize=lambda turn: "weather" not in turn["user"])
        agent.record("How is the weather?", "Fine")
        assert agent.facts.list() == []
        agent.record("I live in Rome", "Nice")
        assert [item.key for item in agent.facts.list()] == ["city"]
        agent.facts.put("pet", "a cat")
        shown = agent.recall("Rome?").text()
        assert shown.index("Rome") < shown.index("a cat"), "other facts of the user follow what is about the query"
        agent.record("I moved away", "Where to?")
        assert agent.facts.get("city") is None
        assert asked == ["I live in Rome", "I moved away"]
        assert AgentMemory(store, "bob").recall("Rome?").text() == "user: Rome?", "of another user there is nothing"
        with pytest.raises(UsageError, match="changes with the fields"):
            AgentMemory(store, "alice", extract=lambda turn: ["Rome"]).record("a", "b")


def test_k_takes_the_nearest_facts_where_too_few_are_about_the_query() -> None:
    with perdure.open(":memory:", embedder="local") as store:
        agent = AgentMemory(store, "alice")
        facts = ["likes tea", "likes hiking in mountains", "works in Oslo", "has a cat", "plays chess", "hates fish"]
        agent.facts.put_many({fact: {"fact": f"Alice {fact}"} for fact in facts})
        for k in (1, 3):
            recalled = agent.recall("Which outdoor activities?", k=k).manifest["memories"]
            assert (len(recalled), recalled[0]["key"]) == (k, "likes hiking in mountains")
            assert agent.rebuild(agent.recall("Which outdoor activities?", k=k).manifest).text().count("\n- ") == k


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
async def test_k_bounds_what_is_recalled_and_a_long_session_stays_verbatim_if_asked(url: str) -> None:
    with perdure.open(url) as store:
        agent = AgentMemory(store, "alice", recent=None, summarize=lambda summary, turns: f"{len(turns)} turns")
        facts = {"cat": "a cat called Tom", "dog": "a dog called Rex", "bird": "a bird called Pip", "car": "a red car"}
        agent.facts.put_many(facts)
        agent.facts.put("name", "Alice", pinned=True)
        for k, lines in ((0, 1), (2, 3), (None, 5)):
            prompt = await agent.arecall("Tom, Rex or Pip?", k=k)
            assert prompt.text().count("\n- ") == lines, k
        assert "Rex" in agent.recall("What is called Rex?", k=1).text()
        for wrong in (-1, 51, 2.0):
            with pytest.raises(UsageError, match="0 to 50"):
                agent.recall("a", k=wrong)  # type: ignore[arg-type]
        for n in range(25):
            agent.record(f"question {n}", "answer")
        said = agent.conversation.load()
        assert (len(said.turns), said.summary) == (50, "")
        agent.end_session()
        assert (agent.conversation.load().turns, agent.conversation.load().summary) == ((), "50 turns")


async def test_async_hooks_and_methods(tmp_path: Path) -> None:
    async def extract(turn: dict[str, str]) -> dict[str, Any]:
        return {"last": turn["user"]}

    async with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice", extract=extract, summarize=lambda summary, turns: "short")

        @perdure.durable(name="learning.async")
        async def run() -> Any:
            await agent.arecord(await agent.arecall("hiking"), "fine")
            await perdure.ask("Well?")
            await agent.aend_session()
            return (await agent.arecall("hiking")).text()

        started = await store.arun(run, id="one")
        await store.aanswer(started, "well")
        text = await started.aresult()
        assert "short" in text
        assert "user: hiking" in text
        assert len(await agent.facts.ahistory("last")) == 1
        with pytest.raises(UsageError, match="extract\\(\\) is async"):
            agent.record("a", "b")


def test_a_run_that_succeeded_becomes_a_procedure(tmp_path: Path) -> None:
    @perdure.step(name="look_up")
    def look_up(city: str) -> str:
        return city

    @perdure.effect(name="reserve_seat")
    def reserve(city: str) -> str:
        if city == "Nowhere":
            raise ValueError("no such place")
        return city

    @perdure.durable(name="plan_a_trip")
    def plan(city: str) -> str:
        return reserve(look_up(city))

    with perdure.open(tmp_path / "a.db") as store:
        agent = AgentMemory(store, "alice")
        item = agent.promote(store.run(plan, "Rome", id="good"), when="the user has a passport")
        assert item.value == {
            "task": "plan a trip",
            "when": "the user has a passport",
            "arguments": {"city": "Rome"},
            "steps": ["look_up", "reserve_seat(city='Rome')"],
        }
        assert agent.procedures.get("plan a trip") == item
        line = "plan a trip (when the user has a passport): look_up, reserve_seat(city='Rome')"
        for query in ("Help me plan a trip to Oslo", "I have a new passport"):
            assert line in agent.recall(query).text()
        with pytest.raises(UsageError, match="is waiting"):
            agent.promote(store.run(plan, "Nowhere", id="bad"))


@pytest.mark.parametrize("place", ["sqlite", "postgres"])
async def test_a_decision_outlives_its_run_with_its_reason_and_the_alternatives(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "a.db") if place == "sqlite" else request.getfixturevalue("postgres_url")

    @perdure.durable(name="decides")
    def decides() -> None:
        memory = store.memory("projects", "atlas")
        memory.decide("database", "SQLite", because="one machine writes", instead_of=["PostgreSQL", "Redis"])
        memory.decide("language", "Python", because="the team knows it")

    with perdure.open(url) as store:
        run = store.run(decides, id="design")
        run.result()
        memory = store.memory("projects")
        for query in ("why did we choose SQLite?", "why not Redis?", "one machine"):
            [best] = memory.search(query, limit=1)
            assert (best.key, best.kind, best.source) == ("database", "decision", "run design"), query
        assert best.value == {
            "choice": "SQLite",
            "because": "one machine writes",
            "instead_of": ["PostgreSQL", "Redis"],
        }
        store.replay(run)
        again = await store.memory("projects", "atlas").adecide("database", "PostgreSQL", because="two machines write")
        history = store.memory("projects", "atlas").history("database")
        assert [item.value["choice"] for item in history] == ["SQLite", "PostgreSQL"]
        prompt = Context(500).build("Which database?", items=[best, again])
        assert "database: chose SQLite instead of PostgreSQL or Redis, because one machine writes" in prompt.text()
        with pytest.raises(UsageError, match="because"):
            memory.decide("database", "SQLite", because=" ")
        with pytest.raises(UsageError, match="instead_of"):
            memory.decide("database", "SQLite", because="one machine", instead_of=3)  # type: ignore[arg-type]
