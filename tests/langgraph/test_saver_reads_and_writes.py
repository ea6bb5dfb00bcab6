"""Defects that other savers have or had, one test each: what is read, written, deleted, and left pending."""

from __future__ import annotations

import re
from typing import Any

import pytest
from checkpoints import aput, config_of, everything, got, id_of, ids_in, numbered_id, put, values_at, writes_at

from perdure.errors import PerdureError, ThreadDeleted, Unstorable
from perdure.langgraph import PerdureSaver
from perdure.storage.program import Batch, Program, Sql, drive, read

TABLES = Sql(
    sqlite="SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
    postgres="SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()",
)


def rows(saver: PerdureSaver) -> dict[str, int]:
    """How many rows each table of the database holds: what no method shows, shows here."""

    def count() -> Program[dict[str, int]]:
        [tables] = yield Batch(TABLES())
        names = sorted(row[0] for row in tables)
        answers = yield Batch(*(Sql(f'SELECT count(*) FROM "{name}"')() for name in names))
        return {name: answer[0][0] for name, answer in zip(names, answers, strict=True)}

    return drive(saver.store._context.driver, read(count))


def unstorable(_: Any = None) -> None:
    """A function: no saver can keep it."""


def test_threads_are_numbered_as_they_start(saver: PerdureSaver) -> None:
    """In any other order, pages of the tables that are sorted by thread would stay half empty."""
    for number in range(80):  # more than are reserved at once
        put(saver, f"t{number:02}", {"n": number})

    def numbers() -> Program[list[int]]:
        [found] = yield Batch(Sql("SELECT thread FROM thread ORDER BY name")())
        return [row[0] for row in found]

    found = drive(saver.store._context.driver, read(numbers))
    assert found == sorted(found)


# --- reading


def test_get_tuple_inside_a_list_loop(saver: PerdureSaver) -> None:
    """Stock SQLite holds its lock while it yields, and waits for itself."""
    parent = None
    for number in range(5):
        parent = put(saver, "t", {"n": number}, parent=parent)
    seen = []
    for found in saver.list(config_of("t")):
        seen.append(values_at(saver, found.config)["n"])
        assert [id_of(inner.config) for inner in saver.list(config_of("t"), limit=1)] == [id_of(parent)]
        saver.put_writes(found.config, [("c", 1)], "task")
    assert seen == [4, 3, 2, 1, 0]


async def test_aget_tuple_inside_an_alist_loop(saver: PerdureSaver) -> None:
    parent = None
    for number in range(5):
        parent = await aput(saver, "t", {"n": number}, parent=parent)
    seen = []
    async for found in saver.alist(config_of("t")):
        inner = await saver.aget_tuple(found.config)
        assert inner is not None
        seen.append(inner.checkpoint["channel_values"]["n"])
        await saver.aput_writes(found.config, [("c", 1)], "task")
    assert seen == [4, 3, 2, 1, 0]


def test_a_list_that_nobody_reads_to_its_end_holds_nothing(saver: PerdureSaver) -> None:
    parent = None
    for number in range(3):
        parent = put(saver, "t", {"n": number}, parent=parent)
    begun = saver.list(config_of("t"))
    next(begun)
    put(saver, "t", {"n": 3}, parent=parent)
    saver.delete_thread("t")
    assert saver.get_tuple(config_of("t")) is None


def test_clock_stepping_back(saver_url: str) -> None:
    """The child of the newest is the newest, however small its id; a fork from the past is not."""
    with PerdureSaver(saver_url) as saver:
        old = put(saver, "t", {"n": 0}, id=numbered_id(400))
        newest = put(saver, "t", {"n": 1}, id=numbered_id(500), parent=old)
        stepped = put(saver, "t", {"n": 2}, id=numbered_id(300), parent=newest)
        assert id_of(got(saver, config_of("t")).config) == numbered_id(300)
        again = put(saver, "t", {"n": 3}, id=numbered_id(200), parent=stepped)
        assert values_at(saver, config_of("t")) == {"n": 3}
        put(saver, "t", {"n": "fork"}, id=numbered_id(100), parent=old)
        assert values_at(saver, config_of("t")) == {"n": 3}
    with PerdureSaver(saver_url) as saver:  # the next process sees it so, too
        assert values_at(saver, config_of("t")) == {"n": 3}
        put(saver, "t", {"n": 4}, id=numbered_id(600), parent=again)
        assert values_at(saver, config_of("t")) == {"n": 4}
        assert ids_in(saver, config_of("t"), limit=1) == [numbered_id(600)]
        assert len(ids_in(saver, config_of("t"))) == 6


def test_a_fork_with_a_greater_id_is_the_latest(saver: PerdureSaver) -> None:
    """Time travel: LangGraph goes on from what it wrote last, wherever that stands."""
    old = put(saver, "t", {"n": 0}, id=numbered_id(1))
    put(saver, "t", {"n": 1}, id=numbered_id(2), parent=old)
    put(saver, "t", {"n": "fork"}, id=numbered_id(3), parent=old)
    assert values_at(saver, config_of("t")) == {"n": "fork"}


# --- writing: all or nothing


@pytest.mark.parametrize("first", [True, False])
def test_commit_after_an_exception_in_put(saver: PerdureSaver, first: bool) -> None:
    """Stock SQLite commits what it had written when the rest fails."""
    parent = None if first else put(saver, "t", {"n": 0})
    before = everything(saver)
    with pytest.raises(Unstorable, match=r"""channel ["']bad["']"""):
        put(saver, "t", {"good": 1, "bad": [1, {"f": unstorable}]}, parent=parent)
    assert everything(saver) == before
    with pytest.raises(PerdureError):
        put(saver, "t", {"good": 1}, parent=parent, extra=unstorable)
    assert everything(saver) == before
    assert saver.store.ops.verify().ok


def test_commit_after_an_exception_in_put_writes(saver: PerdureSaver) -> None:
    config = put(saver, "t", {"n": 0})
    before = rows(saver)
    with pytest.raises(Unstorable, match=r"""channel ["']bad["']"""):
        saver.put_writes(config, [("good", 1), ("also", 2), ("bad", unstorable)], "task")
    assert writes_at(saver, config) == []
    assert rows(saver) == before
    saver.put_writes(config, [("good", 3)], "task")  # nothing of the failed batch stands in the way
    assert writes_at(saver, config) == [("task", "good", 3)]


def test_the_error_of_an_unstorable_value_names_its_path(saver: PerdureSaver) -> None:
    with pytest.raises(Unstorable) as caught:
        put(saver, "t", {"plan": [0, 1, 2, {"callback": unstorable}]})
    assert re.search("""channel ["']plan["']""", str(caught.value))
    assert '[3]["callback"]' in str(caught.value)


# --- deleting


def test_late_writes_after_delete(saver_url: str) -> None:
    """Background executors write after a delete: nothing of it may stay, and no thread may rise from the dead."""
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        put(saver, "other", {"n": 0})
        for thread, deletes in [("t", saver), ("u", other)]:  # deleted by the saver itself, or by another process
            config = put(saver, thread, {"n": 1}, id=numbered_id(1))
            saver.put_writes(config, [("c", 1)], "task")
            deletes.delete_thread(thread)
            after = rows(saver)
            saver.put_writes(config, [("c", 1), ("__error__", "late")], "task")
            assert rows(saver) == after
            saver.put_writes(config_of(thread, ns="child:1", id=numbered_id(2)), [("c", 1)], "task")
            assert rows(saver) == after
            with pytest.raises(ThreadDeleted):
                put(saver, thread, {"n": 2}, parent=config)
            assert rows(saver) == after
            assert saver.get_tuple(config_of(thread)) is None
            assert saver.get_tuple(config) is None
    with PerdureSaver(saver_url) as fresh:
        assert rows(fresh) == after
        assert ids_in(fresh, None) == ids_in(fresh, config_of("other"))
        assert [info.name for info in fresh.store.threads()] == ["other"]
        assert fresh.store.ops.verify().ok


def test_late_writes_after_delete_when_somebody_has_looked_meanwhile(saver: PerdureSaver) -> None:
    """Whoever shows the thread's state finds it gone; that must not open the door again."""
    put(saver, "other", {"n": 0})
    config = put(saver, "t", {"n": 1})
    saver.delete_thread("t")
    assert saver.get_tuple(config_of("t")) is None
    assert ids_in(saver, config_of("t")) == []
    after = rows(saver)
    with pytest.raises(ThreadDeleted):
        put(saver, "t", {"n": 2}, parent=config)
    assert rows(saver) == after
    saver.put_writes(config, [("c", 1)], "task")
    assert rows(saver) == after


def test_a_deleted_thread_can_start_anew(saver: PerdureSaver) -> None:
    old = put(saver, "t", {"n": 1}, id=numbered_id(1))
    saver.put_writes(old, [("c", "old")], "task")
    saver.delete_thread("t")
    saver.put_writes(old, [("c", "late")], "task")
    new = put(saver, "t", {"n": 2}, id=numbered_id(2))
    assert values_at(saver, config_of("t")) == {"n": 2}
    assert got(saver, config_of("t")).parent_config is None
    saver.put_writes(new, [("c", "new")], "task")
    next_one = put(saver, "t", {"n": 3}, id=numbered_id(3), parent=new)
    assert writes_at(saver, new) == [("task", "c", "new")]
    assert ids_in(saver, config_of("t")) == [id_of(next_one), id_of(new)]
    assert saver.get_tuple(old) is None
    again = put(saver, "t", {"n": 4}, id=numbered_id(1), ns="child:1")  # the old id, where no write of it is left
    assert writes_at(saver, again) == []


async def test_late_writes_after_adelete(saver: PerdureSaver) -> None:
    config = await aput(saver, "t", {"n": 1})
    await saver.adelete_thread("t")
    after = rows(saver)
    await saver.aput_writes(config, [("c", 1)], "task")
    assert rows(saver) == after
    with pytest.raises(ThreadDeleted):
        await aput(saver, "t", {"n": 2}, parent=config)
    assert await saver.aget_tuple(config_of("t")) is None


def test_delete_before_first_use(saver: PerdureSaver) -> None:
    """Stock async SQLite: no such table."""
    saver.delete_thread("never")
    saver.delete_for_runs(["never"])
    saver.prune(["never"])
    assert saver.get_tuple(config_of("never")) is None
    put(saver, "never", {"n": 1})
    assert values_at(saver, config_of("never")) == {"n": 1}


async def test_adelete_before_first_use(saver: PerdureSaver) -> None:
    await saver.adelete_thread("never")
    await saver.adelete_for_runs(["never"])
    await saver.aprune(["never"])
    assert [found async for found in saver.alist(None)] == []


def test_a_deleted_thread_leaves_no_rows_of_its_own(saver: PerdureSaver) -> None:
    """Whatever a thread held, after two that came and went the database holds what it held after one."""

    def come_and_go(thread: str) -> dict[str, int]:
        parent = None
        for number in range(5):
            parent = put(saver, thread, {"log": ["entry"] * number, "n": number}, parent=parent)
            saver.put_writes(parent, [("c", number), ("__error__", "e")], "task")
        put(saver, thread, {"n": "child"}, ns="child:1")
        saver.delete_thread(thread)
        return rows(saver)

    put(saver, "stays", {"n": 0})
    one, two, three = come_and_go("a"), come_and_go("b"), come_and_go("c")
    grown = {table for table in one if two[table] != three[table]}
    # At most that a thread of this name is gone may stay known.
    assert all(three[table] - two[table] == two[table] - one[table] == 1 for table in grown)
    assert len(grown) <= 1
    assert saver.store.ops.verify().ok


# --- pending writes


def test_ordering_of_pending_writes(saver: PerdureSaver) -> None:
    """By (task_path, task_id, idx), as a run applies them; not by when they came, nor by text of the position."""
    config = put(saver)
    for path, task in [("~b", "1"), ("~a", "5"), ("", "9"), ("~a", "2"), ("~a|b", "0"), ("Z", "3")]:
        saver.put_writes(config, [("c", n) for n in range(12)], task, path)
    saver.put_writes(config, [("__interrupt__", "i")], "5", "~a")
    in_order = [(task, n) for task in "93250" for n in ("i", *range(12)) if n != "i" or task == "5"]
    in_order += [("1", n) for n in range(12)]
    assert [(task, value) for task, _, value in writes_at(saver, config)] == in_order
    [listed] = saver.list(config_of("t"))
    assert [(task, value) for task, _, value in listed.pending_writes or []] == in_order


def test_first_regular_write_wins_and_special_writes_overwrite(saver: PerdureSaver) -> None:
    """For each write by itself: stock SQLite and PostgreSQL decide for a whole batch."""
    config = put(saver)
    saver.put_writes(config, [("a", 1), ("__interrupt__", "one"), ("b", 2)], "task")
    saver.put_writes(config, [("a", 10), ("__interrupt__", "two"), ("b", 20), ("c", 30)], "task")
    assert writes_at(saver, config) == [
        ("task", "__interrupt__", "two"),
        ("task", "a", 1),
        ("task", "b", 2),
        ("task", "c", 30),
    ]
    saver.put_writes(config, [("__resume__", 1), ("__error__", "e"), ("__scheduled__", 2)], "task")
    saver.put_writes(config, [("__resume__", 3)], "task")
    specials = [(channel, value) for _, channel, value in writes_at(saver, config)][:4]
    assert specials == [("__resume__", 3), ("__interrupt__", "two"), ("__scheduled__", 2), ("__error__", "e")]


def test_the_same_channel_twice_in_one_batch(saver: PerdureSaver) -> None:
    config = put(saver)
    saver.put_writes(config, [("a", 1), ("a", 2), ("__resume__", 1), ("__resume__", 2)], "task")
    assert writes_at(saver, config) == [("task", "__resume__", 2), ("task", "a", 1), ("task", "a", 2)]


def test_put_writes_before_its_checkpoint(saver: PerdureSaver) -> None:
    first = config_of("t", id=numbered_id(1))
    saver.put_writes(first, [("a", 1)], "task")  # not even the thread is there
    assert saver.get_tuple(config_of("t")) is None
    assert ids_in(saver, None) == []
    put(saver, "t", {"n": 1}, id=numbered_id(1))
    second = config_of("t", id=numbered_id(2))
    saver.put_writes(second, [("a", 2)], "task")
    assert values_at(saver, config_of("t")) == {"n": 1}
    put(saver, "t", {"n": 2}, id=numbered_id(2), parent=first)
    assert writes_at(saver, first) == [("task", "a", 1)]
    assert writes_at(saver, second) == [("task", "a", 2)]


def test_put_writes_after_a_child(saver: PerdureSaver) -> None:
    first = put(saver, "t", {"n": 1})
    second = put(saver, "t", {"n": 2}, parent=first)
    saver.put_writes(first, [("a", 1)], "task")
    assert writes_at(saver, first) == [("task", "a", 1)]
    assert writes_at(saver, second) == []
    assert values_at(saver, config_of("t")) == {"n": 2}
