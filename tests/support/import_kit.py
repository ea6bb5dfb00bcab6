"""What the import tests share: databases that LangGraph's own savers have written, and a comparison of two savers."""

from __future__ import annotations

import operator
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypedDict

import psycopg
import pydantic
from graph_kit import AnyGraph, AnySaver, asking, at, counting, human, inner, long_talking, outer, talking
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send
from samples import same

from perdure.langgraph import PerdureSaver

TRUST = ["import_kit."]


class Colour(Enum):
    RED = "red"


@dataclass
class Step:
    """A data class with one inside."""

    title: str
    colour: Colour
    after: Step | None = None


class Plan(pydantic.BaseModel):
    """A model with a data class inside."""

    goal: str
    steps: list[str] = []


class Outside:
    class Within(pydantic.BaseModel):
        """LangGraph stores the bare name of this."""

        n: int


class Typed(TypedDict, total=False):
    plan: Plan
    step: Step
    colours: set[Colour]
    within: Any
    raw: bytes
    nothing: None
    number: float
    results: Annotated[list[str], operator.add]


class OneItem(TypedDict):
    item: str


def typed(saver: AnySaver) -> AnyGraph:
    """A state with classes of one's own, bytes, None and numbers."""

    def think(state: Typed) -> dict[str, Any]:
        steps = [*state["plan"].steps, "more"] if "plan" in state else []
        return {
            "plan": Plan(goal="go", steps=steps),
            "step": Step("one", Colour.RED, Step("zero", Colour.RED)),
            "colours": {Colour.RED},
            "raw": b"\x00\xff",
            "nothing": None,
            "number": 0.5,
            "results": ["thought"],
        }

    builder = StateGraph(Typed)
    builder.add_node("think", think)
    builder.add_edge(START, "think")
    return builder.compile(checkpointer=saver)


def fanning(saver: AnySaver) -> AnyGraph:
    """Branches that run in parallel, one of which fails."""

    def one(state: OneItem) -> dict[str, Any]:
        if state["item"] == "bad":
            raise ValueError("bad item")
        return {"results": [state["item"]]}

    builder = StateGraph(Typed)
    builder.add_node("split", lambda state: {"results": ["split"]})
    builder.add_node("one", one)
    builder.add_edge(START, "split")
    builder.add_conditional_edges(
        "split", lambda state: [Send("one", {"item": item}) for item in ("a", "b", "bad", "c")], ["one"]
    )
    return builder.compile(checkpointer=saver)


def write_all(saver: AnySaver) -> None:
    """Threads of every kind."""
    chat = talking(saver)
    for turn in range(4):
        chat.invoke({"messages": [human(f"hello {turn} ✓", id=f"h{turn}")]}, at("chat", user="alice"))
    asking(saver).invoke({"items": []}, at("asking"))
    halfway = asking(saver)
    halfway.invoke({"items": []}, at("halfway"))
    halfway.invoke(Command(resume="Ann"), at("halfway"))
    sums = counting(saver, "a", "b")
    sums.invoke({"total": 1, "log": []}, at("forked"))
    history = list(sums.get_state_history(at("forked")))
    for _ in range(2):
        sums.update_state(history[2].config, {"total": 10, "log": ["fork"]})
    sums.invoke(None, sums.update_state(history[1].config, {"total": 5, "log": ["again"]}))
    outer(saver, inner(ask=True), inner()).invoke({"topic": "tides"}, at("nested"))
    outer(saver, inner(checkpointer=True)).invoke({"topic": "seas"}, at("kept"))
    try:
        fanning(saver).invoke({"results": []}, at("fanned"))
    except ValueError:
        pass
    long = long_talking(saver)
    for turn in range(5):
        long.invoke({"messages": [human(f"long {turn}", id=f"l{turn}")]}, at("long"))
    types = typed(saver)
    for _ in range(2):
        types.invoke({"results": ["begin"]}, at("typed"))


@contextmanager
def stock(url: str) -> Iterator[SqliteSaver | PostgresSaver]:
    """LangGraph's own saver on a path or URL."""
    if url.startswith("postgresql://"):
        with PostgresSaver.from_conn_string(url) as postgres:
            postgres.setup()
            yield postgres
    else:
        with SqliteSaver.from_conn_string(url) as sqlite:
            sqlite.setup()
            yield sqlite


Key = tuple[str, str, str]


def everything(saver: AnySaver) -> dict[Key, CheckpointTuple]:
    """All checkpoints of a saver, by thread, namespace and id."""
    found: dict[Key, CheckpointTuple] = {}
    for one in saver.list(None):
        where = one.config["configurable"]
        found[(where["thread_id"], where["checkpoint_ns"], where["checkpoint_id"])] = one
    return found


def raw_writes(url: str) -> dict[Key, set[tuple[str, str, int, str]]]:
    """The writes in a stock database: (task, path, index, channel) by checkpoint."""
    postgres = url.startswith("postgresql://")
    columns = "thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel"
    query = f"SELECT {columns} FROM {'checkpoint_writes' if postgres else 'writes'}"
    connection: Any = psycopg.connect(url) if postgres else sqlite3.connect(url)
    rows = connection.execute(query).fetchall()
    connection.close()
    found: dict[Key, set[tuple[str, str, int, str]]] = {}
    for thread, space, id_, *write in rows:
        found.setdefault((thread, space, id_), set()).add(tuple(write))
    return found


def kept_writes(saver: PerdureSaver, key: Key) -> set[tuple[str, str, int, str]]:
    """The same of a checkpoint in Perdure."""
    thread, space, id_ = key
    entry = saver.store.thread(thread).line(space).load(id_)
    assert entry is not None
    return {(write.task, write.path, write.idx, write.key) for write in entry.writes}


def ordered(checkpoint: Any) -> dict[str, Any]:
    """A checkpoint with its parts and channels in order: that of a dict in a database is nobody's."""
    return {
        **{key: checkpoint[key] for key in sorted(checkpoint)},
        "channel_values": dict(sorted(checkpoint["channel_values"].items())),
    }


def assert_equal(mine: AnySaver, theirs: AnySaver) -> None:
    """Every checkpoint of both is the same in every respect."""
    ours, stocks = everything(mine), everything(theirs)
    assert ours.keys() == stocks.keys()
    for key, expected in stocks.items():
        found = ours[key]
        assert found.config == expected.config
        assert found.parent_config == expected.parent_config
        assert found.metadata == expected.metadata
        assert same(ordered(found.checkpoint), ordered(expected.checkpoint)), key
        assert same(found.pending_writes, expected.pending_writes), key
    for thread, space in {key[:2] for key in stocks}:
        newest = mine.get_tuple(at(thread, checkpoint_ns=space))
        expected_newest = theirs.get_tuple(at(thread, checkpoint_ns=space))
        assert newest is not None
        assert expected_newest is not None
        assert newest.config == expected_newest.config
