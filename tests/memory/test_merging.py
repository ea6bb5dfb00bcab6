"""Items that merge: writers, stores and processes converge, and no change is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from memory_fixtures import BOTH, MemoryHarness

import perdure
from perdure import UsageError
from perdure.errors import OutcomeUnknown
from perdure.memory import GCounter, LWWRegister, Memory, MVRegister, ORSet, PNCounter, SharedText
from perdure.testing.processes import ForkServer


def everything(memory: Memory) -> dict[str, Any]:
    return {item.key: item.value for item in memory.list()}


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_what_two_writers_change_in_hand_is_all_there(memory: MemoryHarness) -> None:
    team = memory.store.memory("team")
    for key, value in {"n": PNCounter().add(5), "s": ORSet().add("old"), "r": MVRegister().set("first")}.items():
        await memory.put(team, key, value)
    await memory.put(team, "t", SharedText().insert(0, "tide"))
    one, other = [{key: await memory.value(team, key) for key in "nsrt"} for _ in range(2)]
    for key, value in {"n": one["n"].add(1), "s": one["s"].add("new"), "r": one["r"].set("left")}.items():
        await memory.put(team, key, value)
    await memory.put(team, "t", one["t"].insert(4, "s"))
    changed = {"n": other["n"].add(-2), "s": other["s"].remove("old"), "r": other["r"].set("right")}
    await memory.do(team, "put_many", changed)
    written = await memory.put(team, "t", other["t"].insert(0, "high "))
    assert written.value.value == "high tides"
    seen = {key: (await memory.value(team, key)).value for key in "nsr"}
    assert seen == {"n": 4, "s": {"new"}, "r": ["left", "right"]}
    await memory.do(team, "update", "n", lambda counter: counter.add(10))
    assert (await memory.value(team, "n")).value == 14
    again = await memory.put(team, "n", await memory.value(team, "n"))
    assert again.version == 4  # it says nothing new: no version is written


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_stores_that_merge_both_ways_are_equal(memory: MemoryHarness, tmp_path: Path) -> None:
    here = memory.store.memory("team")
    with perdure.open(tmp_path / "there.db", tenant="another") as store:
        there = store.memory("copy", "of it")
        await memory.put(here, "n", PNCounter().add(3), pinned=True, text="votes")
        await memory.put(here, "w", LWWRegister().set("here"))
        await memory.put(here, "own", "an ordinary item stays where it is")
        there.put("n", PNCounter().add(4), kind="count")
        there.put("s", ORSet().add("sea"))
        assert await memory.do(here, "merge", there) == 2
        assert there.merge(here) == 2
        assert await memory.do(here, "merge", there) == there.merge(here) == 0
        shared = {key: value for key, value in everything(here).items() if key != "own"}
        assert shared == everything(there)
        assert (shared["n"].value, shared["s"].value, shared["w"].value) == (7, {"sea"}, "here")
        votes, theirs = here.get("n"), there.get("n")
        assert votes is not None
        assert theirs is not None
        assert (votes.pinned, votes.text, theirs.kind, theirs.pinned) == (True, "votes", "count", False)
        assert store.ops.verify().ok


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_what_was_taken_back_is_counted_anew(url: str, tmp_path: Path) -> None:
    """A snapshot, a copy under another key and a backup repeat old values: other stores must not take new changes
    for the ones that they have seen."""
    with perdure.open(url) as store, perdure.open(tmp_path / "other.db") as second:
        team, other = store.memory("team"), second.memory("team")
        team.put("n", GCounter().add(1))
        snap = store.snapshot("one")
        team.put("n", GCounter().add(10))
        other.merge(team)
        store.restore(snap)
        team.put("n", GCounter().add(100))
        assert other.merge(team) == 1
        assert everything(other) == everything(team) == {"n": other.get("n").value}  # type: ignore[union-attr]
        assert other.get("n").value.value == 101  # type: ignore[union-attr]

        team.put("copy", team.get("n").value)  # type: ignore[union-attr]
        team.put("n", GCounter().add(1000))
        team.put("copy", GCounter().add(10_000))
        assert team.put("n", team.get("copy").value).value.value == 11_101  # type: ignore[union-attr]

        team.delete("n")
        team.put("n", GCounter().add(1))
        other.merge(team)
        assert everything(other) == {"n": team.get("n").value, "copy": team.get("copy").value}  # type: ignore[union-attr]
        assert other.get("n").value.value == 1  # type: ignore[union-attr]


def test_a_store_from_a_backup_is_another_writer(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        team = store.memory("team")
        team.put("n", GCounter().add(1))
        store.ops.backup(tmp_path / "backup")
        team.put("n", GCounter().add(10))
        perdure.ops.restore_backup(tmp_path / "backup", tmp_path / "b.db")
        with perdure.open(tmp_path / "b.db") as restored:
            back = restored.memory("team")
            back.put("n", GCounter().add(100))
            back.merge(team)
            team.merge(back)
            assert back.get("n").value.value == team.get("n").value.value == 111  # type: ignore[union-attr]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_replay_merges_nothing_again(url: str) -> None:
    with perdure.open(url) as store:
        team = store.memory("team")

        @perdure.durable(name="merging.once")
        def once() -> Any:
            first = team.put("n", PNCounter().add(1))
            team.put("t", SharedText().insert(0, "once"))
            with pytest.raises(UsageError, match=r"perdure\.step"):
                team.merge(team)
            perdure.ask("Well?")
            return first.value.value, team.get("n").value.value, team.get("t").value.value  # type: ignore[union-attr]

        run = store.run(once, id="one")
        team.put("n", PNCounter().add(5))
        store.answer(run, "well")
        assert run.result() == (1, 6, "once")
        assert store.ops.verify().ok


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_change_whose_commit_had_no_answer_counts_once(url: str) -> None:
    struck: list[str] = []

    def hook(point: str) -> None:
        if point == "committed" and struck == ["armed"]:
            struck.append("lost")
            raise OutcomeUnknown("injected")

    with perdure.open(url) as store, perdure.open(url, hook=hook) as losing:
        losing.memory("team").put("n", GCounter().add(1))
        struck.append("armed")
        with suppress(OutcomeUnknown):
            losing.memory("team").put("n", GCounter().add(1))
        assert struck == ["armed", "lost"]
        assert store.memory("team").get("n").value.value == 2  # type: ignore[union-attr]


def test_values_that_do_not_merge_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        team = store.memory("team")
        team.put("plain", 1)
        team.put("n", GCounter().add(1))
        with pytest.raises(UsageError, match="does not merge"):
            team.put("plain", GCounter())
        with pytest.raises(UsageError, match="not with a PNCounter"):
            team.put("n", PNCounter())
        with pytest.raises(UsageError, match="no schema"):
            team.put("n", GCounter(), schema="count:1")
        team.policy(max_bytes=300)
        with pytest.raises(UsageError, match="capped at 300"):
            team.put("n", ORSet().add("x" * 400)) if team.delete("n") else None
        assert everything(team) == {"plain": 1}


def add(say: Any, url: str, name: str) -> None:
    """Count, and add names to a set, in a process of its own."""
    with perdure.open(url) as store:
        team = store.memory("team")
        for n in range(10_000):
            team.put("n", GCounter().add(1))
            team.put("s", ORSet().add(f"{name}{n}"))
            say(n)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    with ForkServer("test_merging:add") as one, ForkServer("test_merging:add") as two:
        yield [one, two]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_processes_that_are_killed_lose_no_add_that_was_acknowledged(url: str, servers: list[ForkServer]) -> None:
    children = {name: server.start(url, name) for server, name in zip(servers, "ab", strict=True)}
    said = [(name, n) for name, child in children.items() for n in islice(child.lines(), 15)]
    said += [(name, n) for name, child in children.items() for n in child.kill()]
    with perdure.open(url) as store:
        shared = everything(store.memory("team"))
        assert {f"{name}{n}" for name, n in said} <= shared["s"].value
        assert len(said) <= shared["n"].value <= len(said) + 2
        assert 0 <= shared["n"].value - len(shared["s"]) <= 2
        assert store.ops.verify().ok
