"""Large values of states are objects of another place: none is missing, none stays for ever, none can be read without
the tenant's key."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_kit import Interfering, files, swept, uses
from object_places import object_place

import perdure
from perdure.encryption import KeyFile
from perdure.errors import KeyMissing, NotFound, Unstorable, UsageError
from perdure.forensics import sandbox
from perdure.storage.program import Sql, change, fetch
from perdure.threads.externals import collect, copy_values

VIDEO = bytes(range(256)) * 400
CHILD = """
import os, signal, sys, perdure
store = perdure.open(sys.argv[1], objects=sys.argv[2])
class Killing:
    def put(self, name, data, folder=store._context.objects):
        if sys.argv[3] == "after":
            folder.put(name, data)
        os.kill(os.getpid(), signal.SIGKILL)
store._context.objects = Killing()
store.thread("t").save({"video": perdure.External(b"new" * 1000)})
"""


@pytest.fixture(params=["sqlite and a folder", "postgres and s3", "encrypted and a folder", "sqlite and azurite"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The arguments of `perdure.open`."""
    database, _, objects = request.param.partition(" and ")
    url = request.getfixturevalue("postgres_url") if database == "postgres" else str(tmp_path / "store.db")
    keys = bytes(32) if database == "encrypted" else None
    if objects != "a folder":
        with object_place(objects, tmp_path / "azurite", monkeypatch) as folder:
            yield {"url": url, "objects": folder, "keys": keys}
    else:
        (tmp_path / "objects").mkdir()
        yield {"url": url, "objects": tmp_path / "objects", "keys": keys}


def test_a_state_holds_a_reference_and_the_value_is_read_on_demand(place: dict[str, Any]) -> None:
    with perdure.open(**place) as store:
        thread = store.thread("t")
        saved = thread.save({"video": perdure.External(VIDEO), "table": perdure.External([{"n": 1}] * 1000), "n": 0})
        assert saved.size_bytes < 400
        store.thread("other").save({"same": perdure.External(VIDEO)})
        thread.update({"more": perdure.External("text")})
        thread.edit("n", 1)
        fork = thread.fork(name="fork")
        thread.rollback(saved)
        thread.prune(keep=1)
        assert swept(store) == 0, "the fork has the text"
        assert fork.load().state["more"].get() == "text"
    with perdure.open(**place) as store:
        state = store.thread("t").load().state
        assert state["video"].get() == VIDEO == store.thread("other").load().state["same"].get()
        assert state["video"] == store.thread("other").load().state["same"]
        assert asyncio.run(state["table"].aget()) == [{"n": 1}] * 1000
        store.thread("t").save(state)  # as it was loaded
        assert store.ops.verify().problems == ()
        assert store.thread("t").load(raw=True).state["video"]["<type>"] == "perdure.External"


def test_what_nothing_refers_to_is_removed_and_not_before(place: dict[str, Any]) -> None:
    with perdure.open(**place) as store:
        thread = store.thread("t")
        for number in range(4):
            thread.save({"v": perdure.External(f"{number}" * 1000)})
        first, second = list(thread.history())[-1], list(thread.history())[-2]
        thread.pin(second, name="kept")
        snapshot = store.snapshot("s")
        thread.save({"v": None})
        thread.prune(keep=1)
        assert swept(store) == 0
        with sandbox(snapshot) as box:
            assert box.thread("t").load(first).state["v"].get() == "0" * 1000
        assert snapshot.thread("t").load(second).state["v"].get() == "1" * 1000
        snapshot.release()
        assert swept(store) == 3, "the pin holds one"
        assert thread.load(second).state["v"].get() == "1" * 1000
        store.delete_thread("t", force=True)
        assert swept(store) == 1
        assert store.ops.verify().problems == ()


@pytest.mark.parametrize("place", ["sqlite and a folder", "postgres and s3", "sqlite and azurite"], indirect=True)
def test_a_value_that_is_removed_while_it_is_saved_again_is_stored_again(place: dict[str, Any]) -> None:
    with perdure.open(**place) as store, perdure.open(**place) as other:
        store.thread("old").save({"v": perdure.External(VIDEO)})
        store.delete_thread("old")
        entropy = store._context.entropy
        removed: list[int | None] = []

        def remove_first(size: int) -> bytes:
            if not removed:
                removed.append(None)
                removed.append(swept(other))
            return entropy(size)

        store._context.entropy = remove_first  # it is asked between the object and the transaction
        store.thread("new").save({"v": perdure.External(VIDEO)})
        assert removed == [None, 1]
        assert other.thread("new").load().state["v"].get() == VIDEO
        assert swept(other) == 0
        loaded = store.thread("new").load().state
        store.delete_thread("new")
        swept(other)
        with pytest.raises(NotFound, match="not in this store any more: nothing was saved"):
            store.thread("late").save(loaded)


def test_data_that_looks_like_a_reference_is_data(tmp_path: Path) -> None:
    forged = ["perdure.External", 1, ["ab" * 32, 5]]
    state = {"list": forged, "tag": {"^obj": forged}, "text": f'{{"^obj":["perdure.External",1,["{"ab" * 32}",5]]}}'}
    for objects in (tmp_path, None):
        with perdure.open(":memory:", objects=objects) as store:
            first = store.thread("t").save(state)
            assert store.thread("t").update({"n": 1}).state == state | {"n": 1}
            store.thread("t").rollback(first)
            assert store.thread("t").load().state == state
            assert uses(store) == (0, 0)


def test_an_object_that_is_written_after_its_removal_does_not_stay(tmp_path: Path) -> None:
    with perdure.open(":memory:", objects=tmp_path) as store:
        store.thread("erased").save({})
        context, objects = store._context, store._context.objects

        def erase() -> None:
            context.objects = objects
            store.ops.erase("erased")

        context.objects = Interfering(objects, before=erase)
        store.thread("t").save({"v": perdure.External(VIDEO)})
        assert store.thread("t").load().state["v"].get() == VIDEO
        assert len(files(tmp_path)) == 1
        store.ops.erase("t")
        assert files(tmp_path) == []


@pytest.mark.parametrize("point", ["before", "after"])
def test_a_kill_leaves_no_reference_without_its_object(point: str, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    with perdure.open(tmp_path / "store.db", objects=folder) as store:
        store.thread("t").save({"video": perdure.External(VIDEO)})
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path / "store.db", folder, point], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with perdure.open(tmp_path / "store.db", objects=folder) as store:
        assert store.thread("t").load().state["video"].get() == VIDEO
        assert swept(store) == 1
        assert len(files(folder)) == 1
        store.thread("t").save({"video": perdure.External(b"new" * 1000)})
        assert store.thread("t").load().state["video"].get() == b"new" * 1000
        assert store.ops.verify().problems == ()


def test_a_value_is_encrypted_and_erased_with_its_tenant_or_thread(tmp_path: Path) -> None:
    folder, keys = tmp_path / "objects", KeyFile(tmp_path / "keys.json", refresh_s=1e-9)
    folder.mkdir()
    keys.new("ann")
    with perdure.open(tmp_path / "store.db", objects=folder, keys=keys, tenant="ann") as store:
        for name in ("t", "secret"):
            store.thread(name).save({"v": perdure.External(name.encode() * 500)})
        assert not any(b"secretsecret" in path.read_bytes() for path in files(folder))
        value = store.thread("t").load().state["v"]
        store.ops.erase("secret")
        assert len(files(folder)) == 1, "erasing waits for nothing"
        keys.forget("ann")
        with pytest.raises(KeyMissing):
            value.get()


@pytest.mark.parametrize("place", ["sqlite and a folder"], indirect=True)
def test_copies_have_the_values_or_are_refused(place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    there = tmp_path / "there.db"
    with perdure.open(**place) as store:
        store.thread("t").save({"v": perdure.External(VIDEO)})
        refused = "the store was opened without a place for such values: perdure.open\\(…, objects="
        with pytest.raises(UsageError, match=refused):
            store.ops.transfer(tmp_path / "without.db", threads=["t"])
        with pytest.raises(UsageError, match=refused):
            store.snapshot("s").export(tmp_path / "bundle.db")
        options: dict[str, Any] = {"objects": tmp_path / "elsewhere", "keys": bytes(32)}
        store.ops.transfer(there, threads=["t"], **options)
        with perdure.open(there, **options) as target:
            store.delete_thread("t")
            store.get_snapshot("s").release()
            assert swept(store) == 1
            assert target.thread("t").load().state["v"].get() == VIDEO
            target.snapshot("before")
            target.delete_thread("t")
            swept(target)
            target.restore("before")
            target.get_snapshot("before").release()
            for snapshot in target.snapshots():
                snapshot.release()
            assert swept(target) == 0
            assert target.thread("t").load().state["v"].get() == VIDEO


def test_a_sandbox_writes_no_object_of_its_store(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    with perdure.open(tmp_path / "a.db", objects=tmp_path / "objects") as store:
        store.thread("t").save({"v": perdure.External(VIDEO)})
        with sandbox(store.snapshot("s")) as box:
            thread = box.thread("t")
            thread.update({"new": perdure.External(b"new" * 99)})
            state = thread.load().state
            assert (state["v"].get(), state["new"].get()) == (VIDEO, b"new" * 99)
            assert asyncio.run(thread.load().state["v"].aget()) == VIDEO
            thread.rollback(list(thread.history())[-1])
            assert thread.load().state["v"].get() == VIDEO
        assert len(files(tmp_path / "objects")) == 1


def test_a_value_that_a_copy_is_about_to_use_stays(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with (
        perdure.open(tmp_path / "a.db", objects=tmp_path / "objects") as source,
        perdure.open(tmp_path / "b.db", objects=tmp_path / "elsewhere") as target,
    ):
        for store in (source, target):
            store.thread("t").save({"v": perdure.External(VIDEO)})
        key = bytes.fromhex(source.thread("t").load().state["v"].hash)
        target.delete_thread("t")
        target._run(change(Sql("UPDATE external SET at = 0")(tenant=None)))
        copy_values(source._context, target._context, [key])
        target._run(collect(target._context, target._run(target._context.ensure_tenant())))
        there = target._run(fetch(Sql("SELECT count(*) FROM external WHERE gone_at IS NULL"), tenant=None))
        assert there == [(1,)]


@pytest.mark.parametrize("place", ["sqlite and a folder"], indirect=True)
def test_a_missing_or_changed_object_is_named(place: dict[str, Any]) -> None:
    with perdure.open(**place) as store:
        store.thread("t").save({"a": perdure.External(b"a"), "b": perdure.External(b"b")})
        one, two = files(place["objects"])
        one.write_bytes(b"bx")
        two.unlink()
        problems = [problem.what for problem in store.ops.verify().problems]
        assert len(problems) == 2
        assert any("was changed in" in text for text in problems)
        assert any("there is no file" in text for text in problems)


def test_where_no_reference_is_kept_it_is_refused(tmp_path: Path) -> None:
    kept = "kept in states of threads and graphs, in runs and messages to them, and nowhere else"
    with perdure.open(":memory:") as store, pytest.raises(Unstorable, match=kept):
        store.thread("t").save({"v": perdure.External(VIDEO)})
    with pytest.raises(UsageError, match="no such folder"):
        perdure.open(":memory:", objects=tmp_path / "none")
    with perdure.open(":memory:", objects=tmp_path) as store, pytest.raises(Unstorable, match=kept):
        store.memory("m").put("k", perdure.External(VIDEO))
