"""A bundle shows what its snapshot showed and nothing else, and is refused if any byte of it
was changed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from snapshot_kit import asks, change_everything, count, fill, key_pair, seen

import perdure
from perdure.errors import Damaged
from perdure.ops import open_bundle
from perdure.snapshots import check_bundle

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
    made = snap.export(tmp_path / "incident.db")
    assert (made.snapshot, made.manifest, made.key) == ("before", snap.manifest, None)
    content = (tmp_path / "incident.db").read_bytes()
    with open_bundle(tmp_path / "incident.db", **keys_of(store)) as found:
        assert seen(found) == expected
        assert (found.taken_at, found.manifest) == (snap.taken_at, snap.manifest)
        assert found.verify().ok
        with pytest.raises(perdure.errors.ReadOnlyStore):
            found.thread("a").save({})
    assert (tmp_path / "incident.db").read_bytes() == content


def test_since_brings_only_what_changed(store: perdure.Store, tmp_path: Path) -> None:
    fill(store)
    store.thread("same").save({"n": 1})
    store.memory("same").put("k", {"v": 1})
    store.run(leaves_a_child, id="parent")
    before = store.snapshot("before")
    change_everything(store)
    store.run(asks, id="child")  # its parent is not changed by that
    after = store.snapshot("after")
    made = after.export(tmp_path / "changed.db", since=before)
    assert (made.since, check_bundle(tmp_path / "changed.db").since) == ("before", "before")
    with open_bundle(tmp_path / "changed.db", **keys_of(store)) as found:
        assert {info.name for info in found.threads() if not info.name.startswith("run:")} == {"a", "b"}
        assert [[point.state for point in found.thread(name).history()] for name in "ab"] == [
            [point.state for point in after.thread(name).history()] for name in "ab"
        ]
        assert {info.id for info in found.runs()} == {"waits", "later", "parent", "child"}
        assert (len(found.memory("users", "bob").list()), found.memory("same").list()) == (1, [])
    with pytest.raises(perdure.UsageError, match="the older one comes first"):
        before.export(tmp_path / "x.db", since="after")


def test_it_takes_no_writes_and_stays_as_it_was_made(store: perdure.Store, tmp_path: Path) -> None:
    place = tmp_path / "incident.db"
    fill(store)
    store.snapshot("s").export(place)
    with perdure.open(place, **keys_of(store)) as opened:
        assert opened.get_run("waits").status == "waiting"
        for change in (
            lambda: opened.thread("a").save({}),
            lambda: opened.answer("waits", "aisle"),
            lambda: opened.run(asks, id="waits"),
            lambda: opened.snapshot("another"),
            lambda: opened.memory("users", "alice").put("drink", {}),
            lambda: opened.ops.deploy(asks, "v2"),
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
        snap.export(place, threads=["support-*"], runs=["trip-1"], namespaces=[("users", "bob")])
        with open_bundle(place) as found:
            assert {info.name for info in found.threads()} == {"support-1", "support-2"}
            assert [info.id for info in found.runs()] == ["trip-1"]
            assert [len(found.memory("users", name).list()) for name in ("alice", "bob")] == [0, 1]
        missing: list[dict[str, Any]] = [{"threads": ["x-*"]}, {"runs": ["x"]}, {"namespaces": [("x",)]}]
        for part in missing:
            with pytest.raises(perdure.NotFound, match="the snapshot has no"):
                snap.export(tmp_path / "x.db", **part)
        wrongs: list[dict[str, Any]] = [{"threads": "support-*"}, {"namespaces": ["users"]}]
        for wrong in wrongs:
            with pytest.raises(perdure.UsageError, match="a list of"):
                snap.export(tmp_path / "x.db", **wrong)


def test_another_tenant_is_not_in_it(tmp_path: Path) -> None:
    place = tmp_path / "acme.db"
    with perdure.open(tmp_path / "store.db") as store:
        for name in ("acme", "umbrella"):
            tenant = store.tenant(name)
            tenant.thread(f"thread-of-{name}").save({"secret": name})
            tenant.memory(f"memory-of-{name}").put("k", {"v": 1})
        store.snapshot("s")
        store.tenant("acme").get_snapshot("s").export(place)
        assert b"umbrella" not in place.read_bytes()
        with open_bundle(place) as found:
            assert found.thread("thread-of-acme").load().state == {"secret": "acme"}


def test_a_bundle_of_an_encrypted_store_is_encrypted(tmp_path: Path) -> None:
    place, keys = tmp_path / "incident.db", b"k" * 32
    secret = random.Random(3).randbytes(40).hex()
    with perdure.open(tmp_path / "store.db", keys=keys) as store:
        store.thread("t").save({"secret": secret})
        store.memory("users").put("k", {"fact": secret})
        store.snapshot("s").export(place)
    for start in range(0, 80, 8):
        assert secret[start : start + 8].encode() not in place.read_bytes()
    with open_bundle(place, keys=keys) as found:
        assert found.thread("t").load().state == {"secret": secret}
    with pytest.raises(perdure.PerdureError), open_bundle(place) as found:
        found.thread("t").load()


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed bundle, and the public key."""
    private, public = key_pair(tmp_path, "audit")
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({"n": 1})
        store.snapshot("one").export(tmp_path / "incident.db", sign=private)
    return tmp_path / "incident.db", public


def test_a_flipped_bit_is_refused_wherever_it_is(signed: tuple[Path, Path]) -> None:
    place, public = signed
    assert check_bundle(place, public).snapshot == "one"
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
        store.get_snapshot("one").export(tmp_path / "forged.db", sign=other)
        store.get_snapshot("one").export(tmp_path / "unsigned.db")
        with pytest.raises(perdure.UsageError, match="no private key"):
            store.get_snapshot("one").export(tmp_path / "x.db", sign=public)
    for name, why in (("forged.db", "another key"), ("unsigned.db", "not signed")):
        with pytest.raises(Damaged, match=why):
            check_bundle(tmp_path / name, public)


KILLED = """
import os, perdure
os.link = lambda *_: os.kill(os.getpid(), 9)
perdure.open("store.db").get_snapshot("one").export("second.db", sign="audit.pem")
"""


def test_a_kill_leaves_no_bundle(signed: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "second.db"
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not place.exists()
    with perdure.open(tmp_path / "store.db") as store:
        store.get_snapshot("one").export(place, sign=tmp_path / "audit.pem")
    assert check_bundle(place, signed[1]).snapshot == "one"
    assert list(tmp_path.glob(".*")) == []  # nothing is left of the killed one


def test_of_many_at_once_to_one_place_one_is_there(tmp_path: Path) -> None:
    place = tmp_path / "incident.db"

    def make(snap: perdure.snapshots.Snapshot) -> int:
        try:
            return snap.export(place).bytes
        except perdure.UsageError:  # it exists already
            return 0

    with perdure.open(tmp_path / "store.db") as store, ThreadPoolExecutor(4) as pool:
        store.thread("t").save({"n": 1})
        made = list(pool.map(make, [store.snapshot(f"s{number}") for number in range(8)]))
    assert sorted(made)[:-1] == [0] * 7
    assert check_bundle(place).bytes == max(made)


def test_a_place_that_cannot_be_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no bundle")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({})
        snap = store.snapshot("s")
        files = [tmp_path / name for name in ("", "no/x.db", "x\0.db", "fifo", "dangling")]
        for place in (*map(str, files), "", "postgresql://h/d", str(tmp_path / "text")):
            with pytest.raises(perdure.UsageError):
                snap.export(place)
    for name in ("text", "store.db"):
        with pytest.raises(Damaged, match="is no bundle"):
            check_bundle(tmp_path / name)
    for path in (tmp_path / "missing.db", *files):
        with pytest.raises((perdure.NotFound, perdure.UsageError)):
            check_bundle(path)


def test_erasing_names_the_bundle(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("t").save({})
        for name in ("one", "two"):
            store.snapshot(name).export(tmp_path / f"{name}.db")
        remains = str(store.ops.erase("t").may_remain)
        assert [remains.count(name) for name in ("one.db", "two.db")] == [1, 1]


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
