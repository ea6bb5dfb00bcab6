"""Memory as tools: what a model saves is there once, answers are bounded, and its mistakes are answers it can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.measure import Run
from bench.memory_search import memory_search

import perdure
from perdure import UsageError
from perdure.agents.tokens import token_counter


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLS = [
    [call("1", "memory_save", key="hobby", fact="Alice loves hiking"), call("2", "memory_save", key="", fact="x")],
    [call("3", "memory_search", query="hikes"), call("4", "memory_forget", key="theme")],
    [call("5", "memory_save", key="profile", fact="x"), call("6", "memory_save", key="long", fact="long " * 2000)],
]
NOTHING = "nothing is remembered about this"
SAID = [
    "saved 'hobby'",
    "Error: a key has at least one character",
    '{"key":"hobby","saved":"DATE","value":{"fact":"Alice loves hiking"}}',
    "Error: nothing is remembered under 'theme'",
    "Error: what is under 'profile' was not saved by this tool: use another key",
    "Error: this fact has 2001 tokens, and 500 are the most: save a shorter one",
]


def contents(messages: list[dict[str, Any]], date: str) -> list[str]:
    return [message["content"].replace(date, "DATE") for message in messages]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_in_a_run_each_call_commits_with_the_journal(url: str) -> None:
    with perdure.open(url) as store:
        alice = store.memory("users", "alice")
        date = str(alice.put("profile", {"name": "Alice"}, pinned=True).at.date())
        tools = perdure.tools(alice.tools())

        @perdure.durable(name="memory_tools.agent")
        def agent() -> list[dict[str, Any]]:
            said = tools.call(CALLS[0])
            perdure.ask("Well?")
            return [*said, *(message for calls in CALLS[1:] for message in tools.call(calls))]

        run = store.run(agent, id="one")
        alice.delete("hobby")
        alice.put("hobby", {"fact": "Alice loves hiking"})
        store.answer(run, "well")
        assert contents(run.result(), date) == SAID
        assert len(alice.history("hobby")) == 3, "a replay saves nothing again"
        assert {step.name for step in run.steps()} >= {"memory.update", "memory.search", "memory.delete"}


async def test_async_and_pins_stay(tmp_path: Path) -> None:
    async with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        await alice.aput("hobby", {"fact": "chess"}, pinned=True)
        tools = perdure.tools(alice.atools())

        @perdure.durable(name="memory_tools.async")
        async def agent() -> Any:
            return await tools.call(CALLS[0])

        run = await store.arun(agent, id="one")
        assert contents(await run.aresult(), "-") == SAID[:2]
        hobby = await alice.aget("hobby")
        assert hobby is not None
        assert (hobby.version, hobby.pinned) == (2, True)


def test_langchain_takes_them_as_they_are(tmp_path: Path) -> None:
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool
    from langgraph.graph import MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        made = {one.name: one for one in map(tool, alice.tools())}
        assert made["memory_save"].args["fact"]["description"] == "one fact, in a sentence"
        assert made["memory_search"].description.startswith("Search what was remembered")
        calls = [{"id": "1", "name": "memory_save", "args": {"key": "hobby", "fact": "hiking"}, "type": "tool_call"}]
        calls += [{"id": "2", "name": "memory_save", "args": {"key": "", "fact": "x"}, "type": "tool_call"}]
        graph = StateGraph(MessagesState).add_node("tools", ToolNode(alice.tools())).set_entry_point("tools").compile()
        found = graph.invoke({"messages": [AIMessage(content="", tool_calls=calls)]})
        assert [message.content for message in found["messages"][1:]] == SAID[:2]
        assert [item.key for item in alice.list()] == ["hobby"]


def test_an_answer_keeps_its_budget_and_says_what_is_missing(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        alice.put_many({f"k{n}": {"fact": f"hiking number {n} " + "far " * 20} for n in range(40)})
        [search] = alice.tools(read_only=True, budget_tokens=300)
        found = search("hiking", limit=1000)
        assert token_counter()(found) <= 300
        *lines, last = found.splitlines()
        assert last == f"({40 - len(lines)} more did not fit: ask for less at once)"
        assert json.loads(lines[0])["value"]["fact"].startswith("hiking")
        keys = ", ".join(f"k{n}" for n in range(39, 19, -1))
        assert search("zebra") == f"{NOTHING}\nother facts have these keys; search for one if it may help: {keys}"
        [brief] = alice.tools(read_only=True, budget_tokens=50)
        assert token_counter()(brief("zebra")) <= 50
        assert search("hiking", limit=-1).startswith("Error: limit=-1")
        with pytest.raises(UsageError):
            alice.tools(budget_tokens=5)


FACTS = {
    "pet": "Alice has a cat named Mia",
    "diet": "Alice is vegetarian",
    "allergy": "Alice is allergic to nuts",
    "job": "Alice is a software engineer at ACME",
    "home": "Alice lives in Oslo",
    "spouse": "Alice is married to Bob",
    "car": "Alice drives a Tesla",
    "birthday": "Alice was born on 3 May 1990",
    "theme": "Alice prefers dark mode",
    "plan": "Alice has the premium subscription",
}
QUESTIONS = {
    "pets": "pet",
    "does the user have a pet?": "pet",
    "animals at home": "pet",
    "what can she eat": "diet",
    "food restrictions": "diet",
    "dietary preferences": "diet",
    "profession": "job",
    "employer": "job",
    "city of residence": "home",
    "where does the user live": "home",
    "address": "home",
    "husband": "spouse",
    "family": "spouse",
    "vehicle": "car",
    "age": "birthday",
    "date of birth": "birthday",
    "UI settings": "theme",
    "pricing tier": "plan",
    "which plan is the customer on": "plan",
    "medical conditions": "allergy",
}
WITHOUT_AN_ANSWER = ("shoe size", "favourite colour", "blood type", "last invoice amount", "gym membership")


def keys_of(answer: str) -> list[str]:
    """The keys of the facts that an answer has."""
    return [json.loads(line)["key"] for line in answer.splitlines() if line.startswith("{")]


def test_what_no_fact_is_about_is_not_remembered_and_other_facts_are_named(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        alice = store.memory("users", "alice")
        search = alice.tools()[0]
        assert search("pets") == "nothing is remembered yet"
        alice.put_many({key: {"fact": fact} for key, fact in FACTS.items()})
        for query in WITHOUT_AN_ANSWER:
            assert search(query).startswith(NOTHING)
        assert not search("diet", limit=0).startswith(NOTHING)
        missed = [query for query, key in QUESTIONS.items() if key not in keys_of(search(query))]
        assert len(missed) <= 1, "the fact itself is among the nearest five, marked as weak if nothing speaks for it"
        assert all(QUESTIONS[query] in search(query) for query in missed), "its key is named"
        for key in FACTS:
            first, *_ = search(key).splitlines()
            assert (json.loads(first)["key"], "match" in json.loads(first)) == (key, False)


def test_plain_questions_in_five_languages_are_answered_and_others_are_not(tmp_path: Path) -> None:
    rows = memory_search(Run(tmp_path))
    assert len(rows) == 6
    assert [(row.name.strip(), row.ours) for row in rows if row.passed is False] == []


def test_a_word_that_is_in_a_long_item_is_about_the_query_whatever_its_cosine(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        notes = store.memory("notes")
        notes.put(
            "ticket", {"text": "ticket ZX-4711: " + "the printer jams when paper is humid, vendor informed. " * 12}
        )
        notes.put("sales", {"text": "The quarterly revenue report lists sales by region, product and channel. " * 8})
        assert [item.key for item in notes.search("ZX-4711", relevant=True)] == ["ticket"]
        first, second = (json.loads(line) for line in notes.tools()[0]("ZX-4711").splitlines())
        assert (first["key"], "match" in first, second["match"]) == ("ticket", False, "weak")


def test_schemas_name_what_a_model_gives(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        search, save, _ = perdure.tools(store.memory("a").tools()).schemas()
    assert search["function"]["parameters"]["required"] == ["query"]
    assert save["function"]["parameters"]["properties"].keys() == {"key", "fact", "replaces"}
