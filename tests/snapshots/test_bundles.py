"""A bundle shows what its snapshot showed, brings only what changed, and is refused if any byte of it was changed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snapshot_kit import asks, change_everything, count, fill, key_pair, seen

import perdure
from perdure.errors import Damaged
from perdure.ops import open_bundle
from perdure.snapshots import check_bundle

FLIPS = 60


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


def test_a_second_bundle_brings_what_changed(store: perdure.Store, tmp_path: Path) -> None:
    place = tmp_path / "incident.db"
    fill(store)
    store.thread("large").save({"noise": random.Random(1).randbytes(300_000)})
    old = seen(store)
    first = perdure.transfer(store.snapshot("first"), place)
    change_everything(store)
    new = seen(store)
    second = perdure.transfer(store.snapshot("second"), place)
    assert second.bytes < first.bytes + 200_000  # the large thread is in it once
    for name, expected in ((None, new), ("first", old)):
        with open_bundle(place, snapshot=name, **keys_of(store)) as found:
            assert seen(found) == expected


def test_no_worker_continues_a_run_of_a_bundle(store: perdure.Store, tmp_path: Path) -> None:
    place = tmp_path / "incident.db"
    store.run(asks, id="waits")
    perdure.transfer(store.snapshot("s"), place)
    with perdure.open(place, **keys_of(store)) as opened:
        assert opened.get_run("waits").status == "exported"
        assert opened.get_snapshot("s").get_run("waits").status == "waiting"
    store.thread("t").save({})
    perdure.transfer(store.snapshot("later"), place, threads=["t"])
    with open_bundle(place, **keys_of(store)) as found:
        assert found.get_run("waits").status == "waiting"  # brought before, and as it was then
        assert [ask.run for ask in found.asks()] == ["waits"]


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
        perdure.transfer(snap, place, threads=["other"])  # adds to what is there
        with open_bundle(place) as found:
            assert len(found.threads()) == 3
        with pytest.raises(perdure.NotFound, match="missing-"):
            perdure.transfer(snap, place, threads=["missing-*"])


def test_another_tenant_is_not_in_it(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        for name in ("acme", "other"):
            store.tenant(name).thread("t").save({"secret": name})
        store.snapshot("s")
        perdure.transfer(store.tenant("acme").get_snapshot("s"), tmp_path / "acme.db")
    with open_bundle(tmp_path / "acme.db") as found:
        assert found.thread("t").load().state == {"secret": "acme"}
    with perdure.open(tmp_path / "acme.db", tenant="other") as opened:
        assert opened.threads() == []


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
    chance = random.Random(7)
    for path in (place, place.with_name("incident.db.sig")):
        content = path.read_bytes()
        spots = {0, len(content) - 1, *chance.sample(range(len(content)), FLIPS)}
        for spot in spots:
            changed = bytearray(content)
            changed[spot] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(Damaged):
                check_bundle(place, public)
        for cut in (content[:-1], content[: len(content) // 2], content + b"\n", b""):
            path.write_bytes(cut)
            with pytest.raises(Damaged):
                check_bundle(place, public)
        path.write_bytes(content)
    assert check_bundle(place, public).snapshot == "two"


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


KILLED = """
import os, sys, perdure
calls, real = [], os.replace
def replace(*args):
    calls.append(args)
    os.kill(os.getpid(), 9) if len(calls) == int(sys.argv[1]) else real(*args)
os.replace = replace
perdure.transfer(perdure.open("store.db").snapshot("three"), "incident.db", sign="audit.pem")
"""


@pytest.mark.parametrize("at", ["1", "2"], ids=["before-statement", "before-file"])
def test_a_kill_leaves_the_bundle_that_was_there(signed: tuple[Path, Path], tmp_path: Path, at: str) -> None:
    place, public = signed
    killed = subprocess.run([sys.executable, "-c", KILLED, at], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert check_bundle(place, public).snapshot == "two"
    with perdure.open(tmp_path / "store.db") as store:
        perdure.transfer(store.get_snapshot("three"), place, sign=tmp_path / "audit.pem")
    assert check_bundle(place, public).snapshot == "three"
    assert list(tmp_path.glob(".*")) == []  # nothing is left of the killed one


def test_erasing_names_the_bundle(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({})
        perdure.transfer(store.snapshot("s"), tmp_path / "incident.db")
        assert "incident.db" in str(store.ops.erase("t").may_remain)


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
