"""Restoring a snapshot bring back what it saw, and can be undone; nothing else changes."""

from __future__ import annotations

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from snapshot_kit import change_everything, count, fill, seen

import perdure
from perdure.storage.program import Batch, Program, Sql, drive, write


def states(store: Any) -> dict[str, Any]:
    """What threads and memory hold, without their histories."""
    everything = seen(store)
    everything["history"] = {info.name: store.thread(info.name).load().state for info in store.threads()}
    everything["threads"] = sorted((info.name, sorted(info.metadata.items())) for info in store.threads())
    everything["items"] = [item[:2] for item in everything["items"]]
    return {name: everything[name] for name in ("threads", "history", "items", "found")}


def test_all_goes_back_and_forth(store: perdure.Store) -> None:
    fill(store)
    snapshot = store.snapshot("s")
    then = states(store)
    change_everything(store)
    now, runs = states(store), seen(store)["runs"]
    would = store.restore(snapshot, dry_run=True)
    assert states(store) == now
    assert len(store.snapshots()) == 1
    with pytest.raises(perdure.UsageError, match="nothing to undo"):
        would.undo  # noqa: B018
    done = store.restore("s")
    assert states(store) == then
    expected = [
        "bring back item users/alice/seat",
        "delete item users/bob/x",
        "delete thread b",
        "set back item users/alice/drink",
        "set back thread a",
    ]
    assert sorted(map(str, done.changes)) == sorted(map(str, would.changes)) == expected
    assert seen(store)["runs"] == runs, "runs are left alone"
    assert store.memory("users", "alice").get("seat").pinned  # type: ignore[union-attr]
    [head, *older] = store.thread("a").history()
    assert (head.kind, head.note) == ("restore", "restored from snapshot s")
    assert [point.state["n"] for point in older] == [99, 4, 3, 2, 1, 0], "history stays"
    assert store.restore(snapshot).changes == ()
    store.restore(done.undo)
    assert states(store) == now
    assert store.ops.verify().ok


def test_some_threads_or_namespaces(store: perdure.Store) -> None:
    fill(store)
    snapshot = store.snapshot("s")
    store.thread("support-1").save({})
    change_everything(store)
    assert [str(change) for change in store.restore(snapshot, threads=["support-*"]).changes] == [
        "delete thread support-1"
    ]
    done = store.restore(snapshot, namespaces=[("users", "bob")])
    assert [str(change) for change in done.changes] == ["delete item users/bob/x"]
    assert done.undo.name == "undo-2"
    assert store.thread("a").load().state == {"n": 99}
    assert store.restore(snapshot, threads=["a"], namespaces=[("users",)]).changes != ()
    assert store.thread("a").load().state["n"] == 4
    for name in ("x[1]", "x1", "x*"):
        store.thread(name).save({})
    for pattern, names in (("x[1]", ["x[1]"]), ("x?", ["x*", "x1"]), ("x*", ["x*", "x1", "x[1]"])):
        would = store.restore(snapshot, threads=[pattern], dry_run=True)
        assert sorted(change.name for change in would.changes) == names


def test_a_thread_that_was_deleted_pruned_or_made_again(store: perdure.Store) -> None:
    for name in ("gone", "again", "pruned"):
        for number in range(5):
            store.thread(name, metadata={"team": name}).save({"n": number, "text": "x" * 500})
    store.thread("gone").pin(name="p")
    snapshot = store.snapshot("s")
    history = [(point.id, point.state) for point in store.thread("gone").history()]
    for name in ("gone", "again"):
        store.delete_thread(name, force=True)
    store.thread("again").save({"other": 1})
    store.thread("pruned", metadata={"team": "other", "more": 1}).save({"n": 9})
    store.thread("pruned").prune(keep=1)
    old = store.thread("pruned")
    old.load()
    store.restore(snapshot)
    assert [(point.id, point.state) for point in store.thread("gone").history()] == history
    assert [pin.name for pin in store.thread("gone").pins()] == ["p"]
    for name in ("again", "pruned"):
        assert store.thread(name).load().state["n"] == 4
        [info] = store.threads(where={"team": name})
        assert info.metadata == {"team": name}
    assert not old.save({"n": 10}).is_head, "a handle that had loaded it branches off"
    assert store.ops.verify().ok


def test_another_tenant_is_left_alone(store: perdure.Store) -> None:
    store.thread("a").save({"n": 1})
    other = store.tenant("other")
    other.thread("a").save({"n": 1})
    snapshot = store.snapshot("s")
    for each in (store, other):
        each.thread("a").save({"n": 2})
    store.restore(snapshot)
    assert (store.thread("a").load().state, other.thread("a").load().state) == ({"n": 1}, {"n": 2})
    other.restore(snapshot)
    assert other.thread("a").load().state == {"n": 1}


def test_what_is_archived_is_archived_again(store: perdure.Store, tmp_path: Path) -> None:
    store.thread("t").save({"n": 1})
    store.run(count, 1, id="r")
    before = store.snapshot("before")
    store.ops.archive("t", tmp_path / "archive.db")
    store.ops.archive_run("r", tmp_path / "archive.db")
    assert [bool(change.paths()) for change in before.diff()] == [True, True]
    after, archives = store.snapshot("after"), store.ops.archives()
    store.restore(before, runs="rewind")
    assert (store.thread("t").load().state, store.get_run("r").result()) == ({"n": 1}, 0)
    assert (before.diff(), store.ops.archives()) == ([], [])
    store.restore(after, runs="rewind")
    assert (after.diff(), store.ops.archives()) == ([], archives)
    with pytest.raises(perdure.errors.Archived):
        store.thread("t").load()


def test_two_at_once(store: perdure.Store) -> None:
    """Each thread, item and run is as in one of them, and none fails."""
    fill(store)
    first = store.snapshot("first")
    change_everything(store)
    second = store.snapshot("second")
    store.thread("a").save({"n": 100})
    store.thread("c").save({})
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(store.restore, one, runs="rewind", keys="same") for one in (first, second) * 2]
    assert all(isinstance(one.result(), perdure.snapshots.SnapshotRestore) for one in both)
    store.restore(second, runs="rewind", keys="same")
    assert second.diff() == []
    assert store.ops.verify().ok


def test_an_interrupted_one_is_finished_by_the_same_call_only(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = store, store.tenant("other")
    for each in tenants:
        each.thread("a").save({"n": 1})
    snapshot = store.snapshot("s")
    for each in tenants:
        each.thread("a").save({"n": 2})
    with monkeypatch.context() as patch:
        patch.delattr("perdure.snapshots.restore.side_by_side")
        with pytest.raises(NameError):
            store.restore(snapshot)
    undos = []
    for each in tenants:
        undos.append(each.restore(snapshot).undo)
        each.restore(undos[-1])
        assert each.thread("a").load().state["n"] == 2
    assert [undo.name for undo in undos] == ["undo-1", "undo-3"], (
        "what another tenant's restore took first is not of this one's time"
    )


async def test_awaited(store: perdure.Store) -> None:
    await store.thread("a").asave({"n": 1})
    snapshot = await store.asnapshot("s")
    await store.thread("a").asave({"n": 2})
    await store.thread("b").asave({"n": 2})
    await store.memory("m").aput("k", {"fact": "x"})
    assert len((await store.arestore(snapshot)).changes) == 3
    assert (await store.thread("a").aload()).state == {"n": 1}
    assert await snapshot.adiff() == []


def test_wrong_arguments(store: perdure.Store) -> None:
    snapshot = store.snapshot("s")
    for wrong in ({"threads": "a"}, {"namespaces": ["users"]}, {"runs": "all"}, {"keys": "same"}):
        with pytest.raises(perdure.UsageError, match="restore"):
            store.restore(snapshot, **wrong)
    with pytest.raises(perdure.NotFound):
        store.restore("x")
    store.memory("users", "alice").put("k", {})
    for chosen in ({"threads": ["suport-*"]}, {"namespaces": [("users", "ali")]}):
        with pytest.raises(perdure.NotFound, match="nothing was restored"):
            store.restore(snapshot, **chosen)
    assert len(store.snapshots()) == 1


def test_more_than_one_transaction_takes(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.snapshots.diff.AT_ONCE", 3)
    for number in range(8):
        store.thread(f"t{number}").save({"n": number})
    snapshot = store.snapshot("s")
    for number in range(8):
        store.thread(f"t{number}").save({"n": -1})
    for number in range(8):
        store.memory("m").put(f"k{number}", {})
    assert len(store.restore(snapshot).changes) == 16
    assert store.memory("m").list() == []
    assert [store.thread(f"t{number}").load().state["n"] for number in range(8)] == list(range(8))


def test_a_damaged_head_is_a_reason_to_go_back(store: perdure.Store) -> None:
    store.thread("a").save({"n": 1})
    snapshot = store.snapshot("s")
    store.thread("a").save({"n": 2, "text": "x" * 3000})
    break_head(store)
    with pytest.raises(perdure.errors.Damaged):
        store.thread("a").load(strict=True)
    store.restore(snapshot)
    assert store.thread("a").load(strict=True).state == {"n": 1}


def break_head(store: perdure.Store) -> None:
    """Change what is stored of the newest record."""

    def program() -> Program[None]:
        yield Batch(Sql("UPDATE record SET hash = :junk WHERE id = (SELECT max(id) FROM record)")(junk=bytes(32)))

    drive(store._context.driver.capabilities.base, write(program))


def test_what_is_damaged_in_the_snapshot_is_found_before_anything_is_changed(store: perdure.Store) -> None:
    store.thread("b").save({"n": 1, "text": "x" * 3000})
    break_head(store)
    snapshot = store.snapshot("s")
    store.thread("a").save({"n": 1})
    store.delete_thread("b", force=True)
    with pytest.raises(perdure.errors.Damaged):
        store.restore(snapshot)
    assert (store.thread("a").load().state, len(store.snapshots())) == ({"n": 1}, 1)


def test_a_large_thread_is_read_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.transfers.read_ahead._PAGE_BYTES", 200_000)
    monkeypatch.setattr("perdure.transfers.threads.PAGE_ROWS", 20)
    with perdure.open(tmp_path / "a.db") as store:
        line = store.thread("t").line("")
        parent = None
        for number in range(60):
            line.save({"n": number, "text": os.urandom(50_000).hex()}, id=f"{number:02}", parent=parent)
            parent = f"{number:02}"
        snapshot = store.snapshot("s")
        store.delete_thread("t")
        tracemalloc.start()
        store.restore(snapshot)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert [point.state["n"] for point in store.thread("t").line("").history()] == [*range(59, -1, -1)]
        assert peak < 2_500_000, f"{peak} bytes, of a thread of 3 MB and more"
