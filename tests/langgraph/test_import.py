"""Databases of LangGraph's own savers, taken over: everything is as it was, and graphs go on from where they were."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from graph_kit import asking, at, counting, human, inner, long_talking, outer, talking, texts
from import_kit import TRUST, Outside, Typed, assert_equal, everything, kept_writes, raw_writes, stock, write_all
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command

import perdure
from perdure.langgraph import PerdureSaver
from perdure.langgraph.importing import Imported, aimport_langgraph, import_langgraph
from perdure.testing.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The place of a stock saver's database."""
    if request.param == "sqlite":
        yield str(tmp_path / "old.sqlite")
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = f"stock_{os.urandom(6).hex()}"
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture
def old(tmp_path: Path) -> str:
    """A small SQLite database: two threads of a conversation."""
    path = str(tmp_path / "old.sqlite")
    with stock(path) as saver:
        graph = talking(saver)
        for thread in ("alice", "bob"):
            for turn in range(3):
                graph.invoke({"messages": [human(f"turn {turn}", id=f"{thread}{turn}")]}, at(thread))
    return path


def test_everything_is_taken_over(source: str, saver_url: str) -> None:
    with stock(source) as theirs:
        write_all(theirs)
        count = len(everything(theirs))
    writes = raw_writes(source)
    with PerdureSaver(saver_url, trust=TRUST) as mine, stock(source) as theirs:
        done = import_langgraph(source, mine)
        assert done == Imported(9, count, sum(map(len, writes.values())), 0, (), done.source_bytes, done.store_bytes)
        assert done.source_bytes > 0 < done.store_bytes
        assert_equal(mine, theirs)
        for key in everything(mine):
            assert kept_writes(mine, key) == writes.get(key, set())
        assert mine.store.verify().ok
        again = import_langgraph(source, mine)
        assert (again.threads, again.checkpoints, again.writes, again.skipped, again.ok) == (9, 0, 0, count, True)
        assert_equal(mine, theirs)


def test_graphs_go_on_from_where_they_were(source: str, saver_url: str) -> None:
    with stock(source) as theirs:
        write_all(theirs)
    with PerdureSaver(saver_url, trust=TRUST) as mine:
        assert import_langgraph(source, mine).ok
    with PerdureSaver(saver_url, trust=TRUST) as mine:
        said = talking(mine).invoke({"messages": [human("last", id="last")]}, at("chat"))
        assert texts(said)[-4:] == ["hello 3 ✓", "Echo: hello 3 ✓", "last", "Echo: last"]
        assert len(said["messages"]) == 10
        waiting = asking(mine).get_state(at("asking"))
        assert [one.value for one in waiting.interrupts] == [{"question": "name?"}]
        asking(mine).invoke(Command(resume="Bo"), at("asking"))
        assert asking(mine).invoke(Command(resume="red"), at("asking"))["answer"] == "Bo likes red"
        assert asking(mine).invoke(Command(resume="blue"), at("halfway"))["answer"] == "Ann likes blue"
        nested = outer(mine, inner(ask=True), inner())
        assert nested.invoke(Command(resume="sure"), at("nested"))["results"] == [
            "planned",
            "tides: 1 notes, sure",
            "tides: 1 notes, yes",
        ]
        long = long_talking(mine)
        assert texts(long.invoke({"messages": [human("more", id="more")]}, at("long")))[:2] == [
            "long 0",
            "Echo: long 0",
        ]
        assert len(long.get_state(at("long")).values["messages"]) == 12
        sums = counting(mine, "a", "b")
        old_config = list(sums.get_state_history(at("forked")))[-1].config
        assert sums.invoke(None, old_config)["log"] == ["a", "b"]
        assert mine.store.verify().ok


def test_versions_stay_text_and_go_on_as_text(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        import_langgraph(old, mine)
        before = mine.get_tuple(at("alice"))
        talking(mine).invoke({"messages": [human("on")]}, at("alice"))
        after = mine.get_tuple(at("alice"))
        assert before is not None
        assert after is not None
        versions = [one.checkpoint["channel_versions"]["messages"] for one in (before, after)]
        assert all(isinstance(version, str) for version in versions)
        assert versions[0] < versions[1]  # type: ignore[operator]


def test_times_are_the_original_ones(old: str, tmp_path: Path) -> None:
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE checkpoints SET metadata = json_set(CAST(metadata AS TEXT), '$.user', thread_id)")
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        import_langgraph(old, mine)
        for info in mine.threads(where={"user": "bob"}):
            newest = mine.get_tuple(at(info.name))
            assert newest is not None
            assert info.updated_at == datetime.fromisoformat(newest.checkpoint["ts"])
        assert [info.name for info in mine.threads()] == ["bob", "alice"]


def test_only_some_threads(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        done = import_langgraph(old, mine, threads=["bob"])
        assert (done.threads, done.ok) == (1, True)
        assert {key[0] for key in everything(mine)} == {"bob"}
        done = import_langgraph(old, mine)
        assert (done.threads, done.skipped) == (2, 9)
        with stock(old) as theirs:
            assert_equal(mine, theirs)


@pytest.mark.parametrize("target", ["path", "store", "tenant"])
def test_the_target_may_be_a_path_or_a_store(old: str, tmp_path: Path, target: str) -> None:
    path = str(tmp_path / "new.db")
    if target == "path":
        assert import_langgraph(old, path).ok
    else:
        with perdure.open(path) as store:
            assert import_langgraph(old, store if target == "store" else store.tenant("acme")).ok
            assert len(store.threads()) == (2 if target == "store" else 0)
    tenant = "acme" if target == "tenant" else None
    with PerdureSaver(path, tenant=tenant) as mine, stock(old) as theirs:
        assert_equal(mine, theirs)


def test_what_the_source_has_got_since_is_added(source: str, saver_url: str) -> None:
    """More checkpoints, and more writes on one that is there already."""
    with stock(source) as theirs, PerdureSaver(saver_url) as mine:
        talking(theirs).invoke({"messages": [human("one")]}, at("chat"))
        asking(theirs).invoke({"items": []}, at("asking"))
        assert import_langgraph(source, mine).ok
        talking(theirs).invoke({"messages": [human("two")]}, at("chat"))
        waiting = theirs.get_tuple(at("asking"))
        assert waiting is not None
        theirs.put_writes(waiting.config, [("found", ["late"]), ("answer", "x")], "a task", "a path")
        done = import_langgraph(source, mine)
        assert (done.checkpoints, done.ok) == (3, True)
        assert done.writes >= 2
        assert_equal(mine, theirs)


def test_a_thread_that_went_on_in_perdure_may_be_imported_again(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        import_langgraph(old, mine)
        talking(mine).invoke({"messages": [human("on")]}, at("alice"))
        newest = mine.get_tuple(at("alice"))
        done = import_langgraph(old, mine)
        assert (done.checkpoints, done.ok) == (0, True)
        assert mine.get_tuple(at("alice")) == newest


def test_an_interrupt_that_was_answered_in_the_source_since(source: str, saver_url: str) -> None:
    """The next question stands where the first one stood: LangGraph replaces it on the same checkpoint."""
    with stock(source) as theirs, PerdureSaver(saver_url) as mine:
        asking(theirs).invoke({"items": []}, at("asking"))
        assert import_langgraph(source, mine).ok
        asking(theirs).invoke(Command(resume="Ann"), at("asking"))
        assert import_langgraph(source, mine).ok
        assert_equal(mine, theirs)
        assert asking(mine).invoke(Command(resume="blue"), at("asking"))["answer"] == "Ann likes blue"


def test_a_thread_that_went_on_in_both_is_left_as_it_is(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine, stock(old) as theirs:
        import_langgraph(old, mine)
        talking(mine).invoke({"messages": [human("here")]}, at("alice"))
        before = everything(mine)
        talking(theirs).invoke({"messages": [human("there")]}, at("alice"))
        talking(theirs).invoke({"messages": [human("there")]}, at("bob"))
        done = import_langgraph(old, mine)
        assert done.differences == (
            "thread 'alice' was left as it is: it has gone on in the store since, and so it has in the source",
        )
        assert done.checkpoints == 3
        assert {key: one for key, one in everything(mine).items() if key[0] == "alice"} == {
            key: one for key, one in before.items() if key[0] == "alice"
        }


def test_another_thread_of_the_same_name_is_left_as_it_is(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        talking(mine).invoke({"messages": [human("mine")]}, at("alice"))
        mine.store.thread("bob").save({"not": "LangGraph's"})
        done = import_langgraph(old, mine)
        assert done.checkpoints == 0
        assert done.differences == tuple(
            f"thread {name!r} was left as it is: the store has another thread of that name" for name in ("alice", "bob")
        )
        assert len(everything(mine)) == 3
        assert mine.store.thread("bob").load().state == {"not": "LangGraph's"}


def test_other_content_under_the_same_id_is_a_conflict(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        import_langgraph(old, mine)
        count = len(everything(mine))
        change(old, "SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = 'alice'")
        with stock(old) as theirs:
            talking(theirs).invoke({"messages": [human("more")]}, at("alice"))
        done = import_langgraph(old, mine)
        [difference] = done.differences
        assert re.search(r"'alice' was left as it is: .*metadata differs.*something else under the same id", difference)
        assert len(everything(mine)) == count


def change(path: str, which: str) -> None:
    """Give a stored checkpoint other metadata."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE checkpoints SET metadata = json_set(CAST(metadata AS TEXT), '$.step', 99) "
            f"WHERE checkpoint_id = ({which})"
        )


def test_differences_are_reported(old: str, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        import_langgraph(old, mine)
        change(old, "SELECT min(checkpoint_id) FROM checkpoints WHERE thread_id = 'alice'")
        with sqlite3.connect(old) as connection:
            connection.execute("UPDATE writes SET channel = 'other' WHERE thread_id = 'bob'")
        done = import_langgraph(old, mine)
        assert not done.ok
        assert len([line for line in done.differences if "its metadata differs" in line]) == 1
        assert len([line for line in done.differences if "a pending write to channel 'other' differs" in line]) == 9
        assert import_langgraph(old, mine, verify=False).ok


def test_progress_goes_from_nothing_to_all(old: str, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        for verify in (True, False):
            calls.clear()
            import_langgraph(old, mine, verify=verify, progress=lambda *call: calls.append(call))
            total = 36 if verify else 18
            assert {call[1] for call in calls} == {total}
            assert [call[0] for call in calls] == sorted(call[0] for call in calls)
            assert calls[-1] == (total, total)


async def test_awaited(old: str, saver_url: str) -> None:
    calls: list[tuple[int, int]] = []
    async with PerdureSaver(saver_url) as mine:
        done = await aimport_langgraph(old, mine, progress=lambda *call: calls.append(call))
        await asyncio.sleep(0)
        assert (done.checkpoints, done.ok, calls[-1]) == (18, True, (36, 36))
        with stock(old) as theirs:
            assert_equal(mine, theirs)


async def test_a_cancelled_import_ends_and_can_be_finished(old: str, tmp_path: Path) -> None:
    async with PerdureSaver(str(tmp_path / "new.db")) as mine:
        begun = asyncio.Event()
        task = asyncio.create_task(aimport_langgraph(old, mine, progress=lambda *_: begun.set()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await aimport_langgraph(old, mine)).ok
        with stock(old) as theirs:
            assert_equal(mine, theirs)


def test_while_the_application_has_it_open(tmp_path: Path) -> None:
    """What is only in the write-ahead log is there too, and nothing of the source is changed."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as theirs, PerdureSaver(str(tmp_path / "new.db")) as mine:
        talking(theirs).invoke({"messages": [human("one")]}, at("chat"))
        log = Path(f"{path}-wal")
        before = path.read_bytes(), log.read_bytes()
        assert before[1]
        assert import_langgraph(path, mine).ok
        assert (path.read_bytes(), log.read_bytes()) == before
        assert_equal(mine, theirs)
        talking(theirs).invoke({"messages": [human("two")]}, at("chat"))


def test_a_class_inside_a_class_is_found(tmp_path: Path) -> None:
    """LangGraph stores its bare name and cannot find it again; with the module trusted, we can."""
    path = str(tmp_path / "old.sqlite")
    builder = StateGraph(Typed)
    builder.add_node("make", lambda state: {"within": Outside.Within(n=7)})
    builder.add_edge(START, "make")
    with stock(path) as theirs:
        builder.compile(checkpointer=theirs).invoke({"results": []}, at("t"))
    with PerdureSaver(str(tmp_path / "new.db")) as mine:
        assert import_langgraph(path, mine, trust=TRUST).ok
    with PerdureSaver(str(tmp_path / "new.db"), trust=TRUST) as mine:
        values: dict[str, Any] = mine.get_tuple(at("t")).checkpoint["channel_values"]  # type: ignore[union-attr]
        assert values["within"] == Outside.Within(n=7)
