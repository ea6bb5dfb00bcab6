"""A bundle shows what its snapshot showed and nothing else, brings only what changed, and is refused if any byte of it
was changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from snapshot_kit import asks, change_everything, count, fill, key_pair, seen

import perdure
from perdure.errors import Damaged
from perdure.ops import open_bundle
from perdure.snapshots import check_bundle
from perdure.snapshots.signature import signed as sealed
from perdure.transfers.threads import copy_threads

FLIPS = 60


@perdure.durable
def leaves_a_child() -> None:
    perdure.spawn(asks, id="child")


def keys_of(store: perdure.Store) -> dict[str, Any]:
    cache = store._context.driver.capabilities.keys
    return {} if cache is None else {"keys": cache.provider}


def test_it_shows_what_the_snapshot_showed(store: perdure.Store, tmp_path: Path) -> None:
    fill(store)
    expected = seen(store)
    snap = store.snapshot("before")
    change_everything(store)
    made = perdure.transfer(snap, tmp_path / "incident.db")
    assert (made.snapshot, made.manifest, made.key) == ("before", snap.manifest, None)
    content = (tmp_path / "incident.db").read_bytes()
    with open_bundle(tmp_path / "incident.db", **keys_of(store)) as found:
        assert seen(found) == expected
        assert (found.taken_at, found.manifest) == (snap.taken_at, snap.manifest)
        assert found.verify().ok
        with pytest.raises(perdure.errors.ReadOnlyStore):
            found.thread("a").save({})
    assert (tmp_path / "incident.db").read_bytes() == content


def test_a_second_bundle_brings_what_changed(
    store: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "incident.db"
    brought: list[str] = []
    monkeypatch.setattr("perdure.transfers.transfer.copy_threads", _recording(brought))
    fill(store)
    store.thread("same").save({"n": 1})
    perdure.transfer(store.snapshot("first"), place)
    assert sorted(brought) == ["a", "same"]
    change_everything(store)
    expected = seen(store)
    perdure.transfer(store.snapshot("second"), place)
    assert sorted(brought[2:]) == ["a", "b"]
    with open_bundle(place, **keys_of(store)) as found:
        assert seen(found) == expected
        assert [snap.name for snap in found._live.snapshots()] == ["second"]


def _recording(names: list[str]) -> Any:
    def copy(source: Any, to: int, some: list[str], advance: Any) -> Any:
        names.extend(some)
        return copy_threads(source, to, some, advance)

    return copy


def test_it_takes_no_writes_and_stays_as_it_was_made(store: perdure.Store, tmp_path: Path) -> None:
    place = tmp_path / "incident.db"
    fill(store)
    perdure.transfer(store.snapshot("s"), place)
    with perdure.open(place, **keys_of(store)) as opened:
        assert opened.get_run("waits").status == "waiting"
        for change in (
            lambda: opened.thread("a").save({}),
            lambda: opened.answer("waits", "aisle"),
            lambda: opened.run(asks, id="waits"),
            lambda: opened.snapshot("another"),
            lambda: opened.memory("users", "alice").put("drink", {}),
            lambda: opened.ops.compact(),
        ):
            with pytest.raises(perdure.errors.ReadOnlyStore, match="a bundle takes no writes"):
                change()
        assert opened.ops.verify().ok
    check_bundle(place)


def test_chosen_threads_runs_and_namespaces(tmp_path: Path) -> None:
    place = tmp_path / "part.db"
    with perdure.open(tmp_path / "store.db") as store:
        for name in ("support-1", "support-2", "other"):
            store.thread(name).save({})
        for name in ("trip-1", "trip-2"):
            store.run(count, 1, id=name)
        for name in ("alice", "bob"):
            store.memory("users", name).put("k", {"v": 1})
        snap = store.snapshot("s")
        perdure.transfer(snap, place, threads=["support-*"], runs=["trip-1"], namespaces=[("users", "bob")])
        with open_bundle(place) as found:
            assert {info.name for info in found.threads()} == {"support-1", "support-2"}
            assert [info.id for info in found.runs()] == ["trip-1"]
            assert [len(found.memory("users", name).list()) for name in ("alice", "bob")] == [0, 1]
        perdure.transfer(snap, place, threads=["other"])
        with open_bundle(place) as found:
            assert [info.name for info in found.threads()] == ["other"]
            assert (found.runs(), found.memory("users").list()) == ([], [])
        with pytest.raises(perdure.NotFound, match="missing-"):
            perdure.transfer(snap, place, threads=["missing-*"])
        wrongs: list[dict[str, Any]] = [{"threads": "support-*"}, {"namespaces": ["users"]}]
        for wrong in wrongs:
            with pytest.raises(perdure.UsageError, match="a list of"):
                perdure.transfer(snap, place, **wrong)


def test_a_run_whose_child_finished_later_is_brought_again(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        store.run(leaves_a_child, id="parent")
        perdure.transfer(store.snapshot("one"), tmp_path / "b.db")
        assert (store.get_run("parent").status, store.run(asks, id="child").status) == ("done", "waiting")
        store.answer("child", "aisle")
        store.run(asks, id="child")
        perdure.transfer(store.snapshot("two"), tmp_path / "b.db")
        with open_bundle(tmp_path / "b.db") as found:
            assert found.get_run("child").status == "done"


def test_another_tenant_is_not_in_it(tmp_path: Path) -> None:
    place = tmp_path / "acme.db"
    with perdure.open(tmp_path / "store.db") as store:
        for name in ("acme", "umbrella"):
            tenant = store.tenant(name)
            tenant.thread(f"thread-of-{name}").save({"secret": name})
            tenant.memory(f"memory-of-{name}").put("k", {"v": 1})
        store.snapshot("s")
        perdure.transfer(store.tenant("acme").get_snapshot("s"), place)
        assert b"umbrella" not in place.read_bytes()
        with open_bundle(place) as found:
            assert found.thread("thread-of-acme").load().state == {"secret": "acme"}
        with pytest.raises(perdure.UsageError, match="another store or tenant"):
            perdure.transfer(store.tenant("umbrella").get_snapshot("s"), place)


def test_what_is_gone_is_gone_from_the_next_bundle(store: perdure.Store, tmp_path: Path) -> None:
    """Deleted or erased, from every page of the file."""
    place = tmp_path / "incident.db"
    for name in ("stays", "goes-deleted", "goes-erased"):
        store.thread(name, metadata={"about": name}).save({"n": 1})
    first = store.thread("stays").save({"n": 2, "text": "erase me"})
    store.thread("stays").save({"n": 3})
    store.memory("users").put("goes-too", {"v": 1})
    perdure.transfer(store.snapshot("one"), place)
    assert b"goes-" in place.read_bytes()
    store.delete_thread("goes-deleted")
    perdure.transfer(store.snapshot("two"), place)
    assert b"goes-deleted" not in place.read_bytes()
    store.ops.erase("goes-erased")
    store.thread("stays").erase(first.id)
    store.memory("users").erase("goes-too")
    perdure.transfer(store.snapshot("three"), place)
    assert b"goes-" not in place.read_bytes()
    with open_bundle(place, **keys_of(store)) as found:
        assert [point.state for point in found.thread("stays").history()] == [{"n": 3}, {"n": 1}]


def test_a_bundle_of_an_encrypted_store_is_encrypted(tmp_path: Path) -> None:
    place, keys = tmp_path / "incident.db", b"k" * 32
    secret = random.Random(3).randbytes(40).hex()
    with perdure.open(tmp_path / "store.db", keys=keys) as store:
        store.thread("t").save({"secret": secret})
        store.memory("users").put("k", {"fact": secret})
        perdure.transfer(store.snapshot("s"), place)
    for start in range(0, 80, 8):
        assert secret[start : start + 8].encode() not in place.read_bytes()
    with open_bundle(place, keys=keys) as found:
        assert found.thread("t").load().state == {"secret": secret}
    with pytest.raises(perdure.PerdureError), open_bundle(place) as found:
        found.thread("t").load()


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed bundle, made twice to one place, and the public key."""
    private, public = key_pair(tmp_path, "audit")
    with perdure.open(tmp_path / "store.db") as store:
        for name in ("one", "two"):
            store.thread(name).save({"name": name})
            perdure.transfer(store.snapshot(name), tmp_path / "incident.db", sign=private)
    return tmp_path / "incident.db", public


def test_a_flipped_bit_is_refused_wherever_it_is(signed: tuple[Path, Path]) -> None:
    place, public = signed
    assert check_bundle(place, public).snapshot == "two"
    content, chance = place.read_bytes(), random.Random(7)
    statement = content.rindex(b"\n")
    spots = {0, statement, len(content) - 1, *chance.sample(range(statement), FLIPS)}
    for spot in spots | {*chance.sample(range(statement, len(content)), FLIPS)}:
        changed = bytearray(content)
        changed[spot] ^= 1 << chance.randrange(8)
        place.write_bytes(changed)
        with pytest.raises(Damaged):
            check_bundle(place, public)
    line = content[statement:]
    for other in (content[:-1], content[:statement], line, content + b"\n", content + b"x", content + line, b""):
        place.write_bytes(other)
        with pytest.raises(Damaged):
            check_bundle(place, public)


def test_another_key_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    place, public = signed
    other, other_public = key_pair(tmp_path, "other")
    with pytest.raises(Damaged, match="another key signed it"), open_bundle(place, key=other_public):
        pass
    with perdure.open(tmp_path / "store.db") as store:
        perdure.transfer(store.get_snapshot("one"), tmp_path / "forged.db", sign=other)
        perdure.transfer(store.get_snapshot("one"), tmp_path / "unsigned.db")
        with pytest.raises(perdure.UsageError, match="no private key"):
            perdure.transfer(store.get_snapshot("one"), tmp_path / "x.db", sign=public)
    for name, why in (("forged.db", "another key"), ("unsigned.db", "not signed")):
        with pytest.raises(Damaged, match=why):
            check_bundle(tmp_path / name, public)


def test_what_another_key_signed_is_no_part_of_it(tmp_path: Path) -> None:
    """A forged bundle would else be carried over into one that is signed."""
    private, public = key_pair(tmp_path, "audit")
    place = tmp_path / "incident.db"
    with perdure.open(tmp_path / "store.db") as store:
        store.run(count, 1, id="run")
        snap = store.snapshot("s")
        perdure.transfer(snap, place)
        forged = place.read_bytes().replace(b"look_up", b"took_up")
        store_part, _, line = forged.rpartition(b"\n")
        old = check_bundle(place).blake3
        facts = json.loads(json.loads(line)["statement"])
        assert facts["blake3"] == old
        forged = sealed(facts | {"blake3": blake3(store_part).hexdigest()}, None)
        place.write_bytes(store_part + b"\n" + forged)
        assert check_bundle(place).blake3 != old
        perdure.transfer(snap, place, sign=private)
        with open_bundle(place, key=public) as found:
            assert [step.name for step in found.get_run("run").steps()] == ["look_up"]


KILLED = """
import os, perdure
os.replace = lambda *_: os.kill(os.getpid(), 9)
perdure.transfer(perdure.open("store.db").snapshot("three"), "incident.db", sign="audit.pem")
"""


def test_a_kill_leaves_the_bundle_that_was_there(signed: tuple[Path, Path], tmp_path: Path) -> None:
    place, public = signed
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert check_bundle(place, public).snapshot == "two"
    with perdure.open(tmp_path / "store.db") as store:
        perdure.transfer(store.get_snapshot("three"), place, sign=tmp_path / "audit.pem")
    assert check_bundle(place, public).snapshot == "three"
    assert list(tmp_path.glob(".*")) == []  # nothing is left of the killed one


def test_many_at_once_to_one_place(tmp_path: Path) -> None:
    """Each is whole, and one of them is there in the end."""
    place = tmp_path / "incident.db"
    with perdure.open(tmp_path / "store.db") as store, ThreadPoolExecutor(4) as pool:
        snaps = []
        for number in range(8):
            store.thread("t").save({"n": number})
            snaps.append(store.snapshot(f"s{number}"))
        for made in pool.map(lambda snap: perdure.transfer(snap, place), snaps):
            assert made.snapshot.startswith("s")
            check_bundle(place)
    with open_bundle(place) as found:
        assert found.thread("t").load().state == {"n": int(found.name[1:])}


def test_a_place_that_cannot_be_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no bundle")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({})
        snap = store.snapshot("s")
        files = [tmp_path / name for name in ("", "no/x.db", "x\0.db", "fifo", "dangling")]
        for place in (*map(str, files), "", "postgresql://h/d"):
            with pytest.raises(perdure.UsageError):
                perdure.transfer(snap, place)
        for name in ("text", "store.db"):
            with pytest.raises(Damaged, match="is no bundle"):
                perdure.transfer(snap, tmp_path / name)
        with pytest.raises(perdure.UsageError, match="takes a snapshot"):
            perdure.transfer(store, tmp_path / "x.db")  # type: ignore[arg-type]
    for path in (tmp_path / "missing.db", *files):
        with pytest.raises((perdure.NotFound, perdure.UsageError)):
            check_bundle(path)


def test_erasing_names_the_bundle(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({})
        for name in ("one", "two"):
            perdure.transfer(store.snapshot(name), tmp_path / "incident.db")
        assert str(store.ops.erase("t").may_remain).count("incident.db") == 1


def test_everything_at_a_snapshot_becomes_a_store(store: perdure.Store, tmp_path: Path) -> None:
    fill(store)
    expected = seen(store)
    snap = store.snapshot("s")
    change_everything(store)
    now = seen(store)
    source: Any
    for source, name, shows in ((snap.store, "then.db", expected), (store, "now.db", now)):
        source.ops.transfer(tmp_path / name, **keys_of(store))
        with perdure.open(tmp_path / name, **keys_of(store)) as copy:
            assert seen(copy) == shows
            assert copy.snapshots() == []  # they stay with their store
