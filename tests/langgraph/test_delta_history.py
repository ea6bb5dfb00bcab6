"""The history of delta channels: which writes and which seed a checkpoint's line adds up to, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest
from checkpoints import aput, config_of, numbered_id, put
from langchain_core.runnables import RunnableConfig
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.graph import START, StateGraph
from soak import SOAK

from perdure.langgraph import PerdureSaver

History = dict[str, Any]
MISSING = numbered_id(999_999)


def history(saver: BaseCheckpointSaver[Any], config: RunnableConfig, *channels: str) -> History:
    """The history, as the saver tells it; the base class, by its slow way over get_tuple, must tell the same."""
    found = dict(saver.get_delta_channel_history(config=config, channels=channels))
    slow = BaseCheckpointSaver.get_delta_channel_history(saver, config=config, channels=channels)
    assert found == dict(slow)
    return found


def values(saver: BaseCheckpointSaver[Any], config: RunnableConfig, channel: str = "log") -> list[Any]:
    """Only the written values of one channel."""
    return [value for _, _, value in history(saver, config, channel)[channel]["writes"]]


def line(saver: BaseCheckpointSaver[Any], length: int, *, seeds: Sequence[int] = ()) -> list[RunnableConfig]:
    """A line of checkpoints, each with a write of its number; those in `seeds` hold a value too."""
    made: list[RunnableConfig] = []
    for number in range(length):
        kept = {"log": f"seed {number}"} if number in seeds else {}
        made.append(put(saver, "t", kept, parent=made[-1] if made else None, step=number))
        saver.put_writes(made[-1], [("log", number)], f"task {number}", "path")
    return made


def test_writes_come_oldest_first_without_those_of_the_target(saver: PerdureSaver) -> None:
    made = line(saver, 5)
    assert history(saver, made[4], "log") == {"log": {"writes": [(f"task {n}", "log", n) for n in range(4)]}}
    assert history(saver, made[0], "log") == {"log": {"writes": []}}
    # Without an id the latest is the target.
    assert values(saver, config_of("t")) == [0, 1, 2, 3]


def test_the_walk_ends_at_the_nearest_seed_and_takes_its_writes_along(saver: PerdureSaver) -> None:
    made = line(saver, 7, seeds=[1, 3])
    assert history(saver, made[6], "log")["log"]["seed"] == "seed 3"
    assert values(saver, made[6]) == [3, 4, 5]
    assert history(saver, made[3], "log")["log"]["seed"] == "seed 1"  # its own value is not its ancestors'
    assert values(saver, made[3]) == [1, 2]
    assert "seed" not in history(saver, made[1], "log")["log"]


def test_a_seed_may_be_none_or_false_or_a_snapshot(saver: PerdureSaver) -> None:
    seeds: list[Any] = [None, 0, "", [], {}, _DeltaSnapshot(["a", "b"])]
    for number, seed in enumerate(seeds):
        first = put(saver, f"t{number}", {"log": seed})
        second = put(saver, f"t{number}", parent=first)
        found = history(saver, second, "log")["log"]
        assert found == {"writes": [], "seed": seed}
        assert type(found["seed"]) is type(seed)


def test_each_channel_ends_at_a_seed_of_its_own(saver: PerdureSaver) -> None:
    made: list[RunnableConfig] = []
    for number, kept in enumerate([{"a": "seed a"}, {}, {"b": "seed b"}, {}]):
        made.append(put(saver, "t", kept, parent=made[-1] if made else None))
        saver.put_writes(made[-1], [(channel, f"{channel}{number}") for channel in "abc"], "task")
    found = history(saver, made[3], "a", "b", "c", "never")
    assert {channel: [write[2] for write in entry["writes"]] for channel, entry in found.items()} == {
        "a": ["a0", "a1", "a2"],
        "b": ["b2"],
        "c": ["c0", "c1", "c2"],
        "never": [],
    }
    assert {channel: entry["seed"] for channel, entry in found.items() if "seed" in entry} == {
        "a": "seed a",
        "b": "seed b",
    }
    assert list(found) == ["a", "b", "c", "never"]


def test_only_ancestors_count_not_the_other_side_of_a_fork(saver: PerdureSaver) -> None:
    root, *_ = made = line(saver, 3)
    left = put(saver, "t", parent=made[1])
    saver.put_writes(left, [("log", "left")], "task")
    right = put(saver, "t", {"log": "right seed"}, parent=made[1])
    saver.put_writes(right, [("log", "right")], "task")
    assert values(saver, put(saver, "t", parent=left)) == [0, 1, "left"]
    assert history(saver, put(saver, "t", parent=right), "log")["log"]["seed"] == "right seed"
    assert values(saver, put(saver, "t", parent=root)) == [0]


def test_other_namespaces_and_threads_are_other_histories(saver: PerdureSaver) -> None:
    """The same checkpoint ids, in each of them."""
    for thread, ns in [("t", ""), ("t", "child:1"), ("u", "")]:
        first = put(saver, thread, ns=ns, id=numbered_id(1))
        saver.put_writes(first, [("log", f"{thread} {ns}")], "task")
        put(saver, thread, ns=ns, id=numbered_id(2), parent=first)
    for thread, ns in [("t", ""), ("t", "child:1"), ("u", "")]:
        assert values(saver, config_of(thread, ns=ns, id=numbered_id(2))) == [f"{thread} {ns}"]


def test_writes_of_one_checkpoint_are_ordered_by_path_task_and_position(saver: PerdureSaver) -> None:
    first = put(saver)
    for path, task in [("~b", "1"), ("~a", "5"), ("", "9"), ("~a", "2"), ("~a|b", "0")]:
        saver.put_writes(first, [("log", f"{path} {task} {n}") for n in range(12)], task, path)
        saver.put_writes(first, [("other", 1), ("log", "not the first call of this task")], task, path)
    second = put(saver, parent=first)
    in_order = [("", "9"), ("~a", "2"), ("~a", "5"), ("~a|b", "0"), ("~b", "1")]
    assert values(saver, second) == [f"{path} {task} {n}" for path, task in in_order for n in range(12)]


def test_no_channels_no_checkpoint_no_parent(saver: PerdureSaver) -> None:
    assert history(saver, config_of("nobody"), "log") == {"log": {"writes": []}}
    assert history(saver, config_of("nobody")) == {}
    made = line(saver, 2)
    assert history(saver, made[1]) == {}
    assert history(saver, config_of("t", id=MISSING), "log") == {"log": {"writes": []}}
    orphan = put(saver, "t", {"log": 1}, parent=config_of("t", id=MISSING))
    assert history(saver, orphan, "log") == {"log": {"writes": []}}


def test_a_line_of_many_checkpoints(saver: PerdureSaver) -> None:
    made = line(saver, 120, seeds=[20])
    assert history(saver, made[-1], "log")["log"]["seed"] == "seed 20"
    assert values(saver, made[-1]) == list(range(20, 119))
    found = saver.get_delta_channel_history(config=made[15], channels=["log"])
    assert [value for _, _, value in found["log"]["writes"]] == list(range(15))


@pytest.mark.parametrize("seed", range(8 if SOAK else 1))
async def test_random_trees_agree_with_the_base_class_blocking_and_async(saver: PerdureSaver, seed: int) -> None:
    chance = random.Random(seed)
    channels = ["a", "b", "c"]
    made: list[RunnableConfig] = []
    for number in range(40):
        parent = chance.choice(made[-8:]) if made and chance.random() < 0.95 else None
        kept = {channel: f"seed {number}" for channel in channels if chance.random() < 0.12}
        made.append(await aput(saver, "t", kept, parent=parent, id=numbered_id(number)))
        for _ in range(chance.randrange(4)):
            target, task = chance.choice(made), f"task {chance.randrange(6)}"
            writes = [(chance.choice([*channels, "other", "__error__"]), chance.random()) for _ in range(3)]
            await saver.aput_writes(target, writes, task, chance.choice(["", "~a", "~b"]))
    for config in made:
        expected = BaseCheckpointSaver.get_delta_channel_history(saver, config=config, channels=channels)
        assert saver.get_delta_channel_history(config=config, channels=channels) == expected
        assert await saver.aget_delta_channel_history(config=config, channels=channels) == expected


async def test_the_async_history_is_the_same(saver: PerdureSaver) -> None:
    made = line(saver, 6, seeds=[2])
    assert await saver.aget_delta_channel_history(config=made[5], channels=["log", "never"]) == {
        "log": {"writes": [(f"task {n}", "log", n) for n in range(2, 5)], "seed": "seed 2"},
        "never": {"writes": []},
    }
    assert await saver.aget_delta_channel_history(config=made[5], channels=[]) == {}
    assert await saver.aget_delta_channel_history(config=config_of("nobody"), channels=["log"]) == {
        "log": {"writes": []}
    }


def joined(state: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*state, *(line for write in writes for line in write)]


class Logged(TypedDict):
    log: Annotated[list[str], DeltaChannel(joined, list, snapshot_frequency=7)]


def echo(state: Logged) -> Logged:
    return {"log": [f"after {len(state['log'])}"]}


def run_graph(saver: PerdureSaver, turns: int) -> Any:
    """A graph whose only channel is a delta channel, after so many turns."""
    builder = StateGraph(Logged)
    builder.add_node("echo", echo)
    builder.add_edge(START, "echo")
    graph = builder.compile(checkpointer=saver)
    for turn in range(turns):
        graph.invoke({"log": [f"turn {turn}"]}, config_of("t"))
    return graph


def test_prune_and_copy_keep_what_a_delta_channel_is_made_of(saver: PerdureSaver) -> None:
    graph = run_graph(saver, 5)
    state = graph.get_state(config_of("t")).values
    assert len(state["log"]) == 10
    saver.copy_thread("t", "copy")
    assert graph.get_state(config_of("copy")).values == state
    saver.prune(["t"], strategy="keep_latest")
    assert graph.get_state(config_of("t")).values == state
    graph.invoke({"log": ["more"]}, config_of("t"))
    assert graph.get_state(config_of("t")).values["log"] == [*state["log"], "more", "after 11"]
    saver.prune(["copy"], strategy="delete")
    assert graph.get_state(config_of("copy")).values == {}
