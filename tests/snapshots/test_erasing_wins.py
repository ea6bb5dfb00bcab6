"""What is erased is gone from snapshots too; what was not erased is still there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from snapshot_kit import change_everything, count, fill

import perdure
from perdure.langgraph import PerdureSaver

SECRET = "the password is swordfish"


@perdure.step
def large_secret() -> bytes:
    return random.Random(1).randbytes(300_000)  # apart from the journal


@perdure.durable
def keeps_a_secret() -> str:
    large_secret()
    perdure.state()["said"] = SECRET
    return SECRET


def leftovers(store: perdure.Store) -> list[str]:
    """Tables of the past that hold something of an erased owner."""
    driver = store._context.driver.capabilities.base
    from perdure.storage.domains import versioned_tables
    from perdure.storage.program import Batch, Program, Sql, drive, read

    def look() -> Program[list[str]]:
        found = []
        for table in versioned_tables():
            [[(rows,)]] = yield Batch(Sql(f"SELECT count(*) FROM {table}_past")())
            found += [table] if rows else []
        return found

    return drive(driver, read(look))


def test_an_erased_thread_run_and_item(store: perdure.Store) -> None:
    for number in range(3):
        store.thread("secret").save({"n": number, "said": SECRET})
    store.run(keeps_a_secret, id="secret")
    store.memory("users").put("secret", {"fact": SECRET})
    snapshot = store.snapshot("s")
    store.thread("secret").save({"n": 4, "said": SECRET})
    store.memory("users").put("secret", {"fact": "changed"})
    store.ops.erase("secret")
    store.ops.erase_run("secret")
    store.memory("users").erase("secret")
    with pytest.raises(perdure.NotFound, match="erased since"):
        snapshot.thread("secret").load(strict=True)
    with pytest.raises(perdure.NotFound):
        snapshot.get_run("secret").steps()
    assert snapshot.memory("users").get("secret") is None
    assert set(leftovers(store)) <= {"memory_space"}  # a namespace's counters: no content
    told = [problem.what for problem in snapshot.verify().problems]
    assert all("counters" in what for what in told), told  # of the namespace: an item of it was erased


def test_an_erased_checkpoint_takes_its_thread_out_of_snapshots(store: perdure.Store) -> None:
    fill(store)
    points = list(store.thread("a").history())
    snapshot = store.snapshot("s")
    change_everything(store)
    store.thread("a").erase(points[2])
    assert [info.name for info in snapshot.threads()] == []
    assert sorted(info.id for info in snapshot.runs()) == ["done", "waits"]
    assert snapshot.get_run("done").steps()
    assert store.run(count, 3, id="again").result() == 6


@perdure.effect(name="erasing_wins.pay")
def pay(secret: str) -> str:
    return secret


@pytest.mark.parametrize("before", ["deleted", "made again", "archived", "restored"])
def test_a_thread_that_only_snapshots_hold_is_erased_by_its_name(
    store: perdure.Store, before: str, tmp_path: Path
) -> None:
    store.thread("secret").save({"said": SECRET})
    snapshot = store.snapshot("s")
    if before == "archived":
        store.ops.archive("secret", tmp_path / "archive.db")
    else:
        store.delete_thread("secret")
    if before == "made again":
        store.thread("secret").save({"said": "another"})
    if before == "restored":
        store.restore(snapshot)
        store.get_snapshot("undo-1").release()
    store.ops.erase("secret")
    assert snapshot.threads() == []
    assert leftovers(store) == []


def test_an_erased_checkpoint_of_a_thread_that_was_brought_back(store: perdure.Store) -> None:
    saved = [store.thread("secret").save({"n": number, "said": SECRET}) for number in range(3)]
    snapshot = store.snapshot("s")
    store.delete_thread("secret")
    store.restore(snapshot)
    store.thread("secret").erase(saved[1].id)
    assert snapshot.threads() == []
    assert leftovers(store) == []


@pytest.mark.parametrize("before", ["deleted", "rewound"])
def test_a_run_that_only_snapshots_hold_is_erased_by_its_id(store: perdure.Store, before: str) -> None:
    store.run(keeps_a_secret, id="secret")
    snapshot = store.snapshot("s")
    store.delete_run("secret")
    if before == "rewound":
        store.restore(snapshot, runs="rewind")
        assert [info.id for info in store.runs()] == ["secret"]
        store.get_snapshot("undo-1").release()
    store.ops.erase_run("secret")
    assert snapshot.runs() == []
    assert leftovers(store) == []


def test_what_tasks_of_an_erased_graph_did(store: perdure.Store) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("act", lambda state: {"messages": [("ai", pay(SECRET))]})
    builder.add_edge(START, "act")
    graph = builder.compile(checkpointer=PerdureSaver(store))
    graph.invoke({"messages": []}, {"configurable": {"thread_id": "secret"}})
    snapshot = store.snapshot("s")
    store.ops.erase("secret")
    assert snapshot.runs(tasks=True) == []
    assert leftovers(store) == []


def test_versions_of_an_item_that_only_snapshots_hold(store: perdure.Store) -> None:
    memory = store.memory("users")
    memory.put("secret", {"fact": SECRET})
    memory.put("secret", {"fact": "changed"})
    snapshot = store.snapshot("s")
    memory.policy(history="0s")
    store.ops.compact()
    assert len(memory.history("secret")) == 1
    assert len(snapshot.memory("users").history("secret")) == 2
    memory.erase("secret")
    assert snapshot.memory("users").history("secret") == []
    assert "memory_item" not in leftovers(store)


def test_what_has_the_number_of_an_erased_body_stays(store: perdure.Store) -> None:
    """SQLite gives the number of a removed row to the next one."""
    store.thread("secret").save({"said": SECRET})
    first = store.snapshot("first")
    store.delete_thread("secret")
    store.thread("kept").save({"n": 1})
    second = store.snapshot("second")
    store.delete_thread("kept")
    store.ops.erase("secret")
    assert first.threads() == []
    assert second.thread("kept").load().state == {"n": 1}
