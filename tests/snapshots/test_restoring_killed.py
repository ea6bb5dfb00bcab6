"""A restore that is killed anywhere is finished by the same call, and its undo is of the time before the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshot_kit import asks, change_everything, fill, seen
from soak import SOAK

import perdure
from perdure.testing.processes import ForkServer


def told(store: Any) -> dict[str, Any]:
    found = seen(store)
    return {
        "states": {info.name: store.thread(info.name).load().state for info in store.threads()},
        "runs": {run: status for run, status in found["runs"] if run != "later"},
        "items": [item[:2] for item in found["items"]],
        "asks": found["asks"],
        "line": [point.state for point in store.thread("line").line("").history()],
    }


def prepare(store: perdure.Store) -> tuple[Any, Any]:
    """The store as it was at the snapshot "s", and as it is."""
    fill(store)
    line = store.thread("line").line("")
    line.save({"n": 1}, id="1")
    store.snapshot("s")
    then = told(store)
    change_everything(store)
    line.save({"n": 2}, id="2", parent="1")
    return then, told(store)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_anywhere_the_same_call_finishes_it(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "store.db")
    with perdure.open(url) as store:
        then, now = prepare(store)
    killed = 0
    with ForkServer("restore_kit:restore_and_die") as nursery:
        at = 3
        while list(nursery.start(url, at).lines()) != ["done"]:
            killed += 1
            at += 4 + at // 2
    assert killed > 4
    with perdure.open(url) as store:
        then["runs"]["waits"] = "queued"
        assert told(store) == then
        [undo] = [snapshot for snapshot in store.snapshots() if snapshot.name != "s"]
        assert (undo.name, undo.note) == ("undo-1", "before s was restored")
        store.restore(undo, runs="rewind", keys="same")
        assert told(store) == now
        assert store.run(asks, id="waits").status == "done"
        assert store.ops.verify().ok


def killed_restore(url: str) -> None:
    """Restore "s" in a process that dies when its undo was taken."""
    with ForkServer("restore_kit:restore_and_die") as nursery:
        at = 1
        while True:
            assert list(nursery.start(url, at).lines()) != ["done"]
            with perdure.open(url) as store:
                if any(snapshot.name == "undo-1" for snapshot in store.snapshots()):
                    return
            at += 1 if SOAK else 4


@pytest.mark.parametrize("snapshot_is_another", [True, False])
def test_a_later_restore_loses_nothing_to_the_undo_of_a_killed_one(snapshot_is_another: bool, tmp_path: Path) -> None:
    url = str(tmp_path / "store.db")
    with perdure.open(url) as store:
        store.thread("t").save({"x": 1})
        store.snapshot("s")
        store.thread("t").save({"x": 2})
    killed_restore(url)
    with perdure.open(url) as store:
        if snapshot_is_another:
            store.get_snapshot("s").release()
            store.snapshot("s")
        store.thread("new").save({"order": "paid"})
        store.memory("u").put("k", {"fact": 1})
        store.thread("t").save({"x": 4})
        undo = store.restore("s").undo
        assert "new" not in [info.name for info in store.threads()]
        store.restore(undo)
        assert store.thread("t").load().state == {"x": 4}
        assert store.thread("new").load().state == {"order": "paid"}
        assert store.memory("u").get("k").value == {"fact": 1}  # type: ignore[union-attr]
