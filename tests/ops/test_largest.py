"""What makes a state large: `thread.largest()`, and the warning that names the path. Never a value, only paths."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.values import largest_parts
from perdure.values.codec import encode
from perdure.values.largest_parts import SizedPart, culprit, largest
from perdure.values.registry import Codec

SECRET = "4111-1111-1111-1111"


@perdure.register("test_largest.Note")
@dataclass
class Note:
    title: str
    content: str = ""
    parts: tuple[Any, ...] = ()
    more: dict[Any, Any] = field(default_factory=dict)


def text_of(state: Any) -> bytes:
    return encode(state, Codec())


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[perdure.Store]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "a.db")
    with perdure.open(url, warn_bytes=10_000) as made:
        yield made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "its state is" in record.message]


# --- where it lies


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": 1, "messages": ["hi", "x" * 900]}, 'state["messages"][1]'),
        ({"plan": Note("t", "x" * 900)}, 'state["plan"].content'),
        ({"plan": [Note("t", parts=(1, {"deep": "x" * 900}))]}, 'state["plan"][0].parts[1]["deep"]'),
        ({"plan": Note("t", more={7: "x" * 900, (1, 2): 3})}, 'state["plan"].more[7]'),
        ({"plan": Note("t", more={(1, 2): "x" * 900})}, 'state["plan"].more[…]'),
        ({"raw": b"x" * 900}, 'state["raw"]'),
        ({"many": [f"item {n}" for n in range(200)], "few": 1}, 'state["many"]'),
        ({"set": {"x" * 900}}, 'state["set"][0]'),
        ({'say "hi"': "x" * 900}, 'state["say \\"hi\\""]'),
        (["x" * 900], "state[0]"),
        ("x" * 900, "state"),
        ({}, "state"),
        ({"a": "x" * 30, "b": "y" * 31, "c": "z" * 32}, 'state["c"]'),
    ],
)
def test_the_path_leads_to_what_is_large(state: Any, path: str) -> None:
    found = culprit(text_of(state))
    assert found.path == path
    assert found.bytes <= len(text_of(state))


def test_a_long_key_is_cut() -> None:
    [found] = largest(text_of({"a very long key that somebody made of a whole mail@example.com": "x" * 99}), 1)
    assert found.path == 'state["a very long key that somebody made of a…"]'


def test_the_largest_come_first_and_what_is_nearly_all_of_another_stands_for_it() -> None:
    text = text_of({"doc": {"pages": {"text": "d" * 5000}}, "log": ["l" * 1000, "m" * 1500, "n" * 10], "n": 1})
    assert largest(text, 4) == [
        SizedPart('state["doc"]["pages"]["text"]', 5002),
        SizedPart('state["log"]', 2520),
        SizedPart('state["log"][1]', 1502),
        SizedPart('state["log"][0]', 1002),
    ]
    assert largest(text, 0) == []
    assert len(largest(text, 100)) == 6


def test_a_list_of_very_many_is_looked_through_in_time() -> None:
    text = text_of({"rows": [{"n": n, "text": "x" * 20} for n in range(20_000)]})
    assert largest(text, 3)[0].path == 'state["rows"]'


def test_largest_reads_any_checkpoint_of_a_thread(store: perdure.Store) -> None:
    thread = store.thread("a")
    old = thread.save({"a": "x" * 100})
    thread.save({"a": "x" * 100, "b": Note("t", "y" * 5000)})
    assert thread.largest(1) == [SizedPart('state["b"].content', 5002)]
    assert thread.largest(1, at=old) == [SizedPart('state["a"]', 102)]
    with pytest.raises(perdure.NotFound):
        store.thread("none").largest()
    with pytest.raises(perdure.UsageError):
        thread.largest(-1)


async def test_largest_has_an_async_twin(tmp_path: Path) -> None:
    async with perdure.open(str(tmp_path / "a.db")) as store:
        await store.thread("a").asave({"a": "x" * 100})
        assert await store.thread("a").alargest(n=1) == [SizedPart('state["a"]', 102)]


# --- the warning


def test_a_large_state_is_told_of_once_and_again_when_it_has_doubled(
    store: perdure.Store, caplog: pytest.LogCaptureFixture
) -> None:
    for size in (5_000, 11_000, 12_000, 21_000, 30_000, 50_000):
        store.thread("a").save({"mail": {"body": SECRET * (size // len(SECRET))}})
    assert [warning.partition(". Keep")[0] for warning in warnings(caplog)] == [
        f'thread \'a\': its state is {size} KB; state["mail"]["body"] is {size} KB of it' for size in ("11.0", "30.0")
    ]
    assert SECRET not in caplog.text


def test_what_the_machine_reads_of_it(store: perdure.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.thread("a").save({"n": 1, "doc": "x" * 20_000})
    [record] = [record for record in caplog.records if "its state is" in record.message]
    assert (record.levelno, record.name) == (logging.WARNING, "perdure")
    assert vars(record)["perdure"] == {
        "event": "state.large",
        "thread": "a",
        "bytes": 20_016,
        "path": 'state["doc"]',
        "path_bytes": 20_002,
    }


def test_updates_autosaves_runs_and_other_threads_are_told_of_too(
    store: perdure.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.thread("b").save({})
    store.thread("b").update({"x": "x" * 20_000})
    with store.thread("c").autosave(perdure.autosave.every(1)) as state:
        state["x"] = "x" * 20_000

    @perdure.durable(name="largest.run")
    def agent() -> None:
        perdure.state({"x": "x" * 20_000})["n"] = 1
        store.thread("e").save({"x": "x" * 20_000})

    store.run(agent, id="r").result()
    told = [warning.partition(":")[0] for warning in warnings(caplog)]
    assert {*told} >= {"thread 'b'", "thread 'c'", "thread 'e'"}
    assert store.tenant("acme").thread("b").save({"x": "x" * 20_000})
    assert len(warnings(caplog)) == len(told) + 1  # another tenant's thread is another thread


def test_a_graphs_state_is_told_of(tmp_path: Path) -> None:
    """In a process of its own: not every test run has LangGraph."""
    code = """
import sys
from typing import TypedDict
import perdure
from perdure.langgraph import PerdureSaver
from langgraph.graph import StateGraph
class S(TypedDict):
    doc: str
store = perdure.open(sys.argv[1], warn_bytes=10_000)
builder = StateGraph(S)
builder.add_node("n", lambda state: {"doc": "x" * 20_000})
builder.set_entry_point("n")
builder.compile(checkpointer=PerdureSaver(store)).invoke({"doc": ""}, {"configurable": {"thread_id": "g"}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.db")], capture_output=True, text=True, timeout=100, check=True
    )
    assert "thread 'g': its state is 20." in done.stderr
    assert 'state["doc"] is 20.0 KB of it' in done.stderr


def test_a_warning_never_costs_a_save(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(text: bytes) -> SizedPart:
        raise LookupError

    monkeypatch.setattr(largest_parts, "culprit", lost)
    store.thread("a").save({"x": "x" * 11_000})
    assert [warning.partition(". Keep")[0] for warning in warnings(caplog)] == [
        "thread 'a': its state is 11.0 KB; state is 11.0 KB of it"
    ]


def test_below_the_limit_nothing_is_looked_at(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(text: bytes) -> SizedPart:
        raise AssertionError("looked into")

    monkeypatch.setattr(largest_parts, "culprit", never)
    store.thread("a").save({"x": "x" * 9_000})
    with pytest.raises(AssertionError):
        store.thread("a").save({"x": "x" * 11_000})
