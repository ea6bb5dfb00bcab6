"""A run that moves goes on in one place: after kills, with marked files, with bad ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mover  # noqa: F401 - for the children: it must be found
import msgspec
import pytest
from blake3 import blake3
from databases import new_database
from lab import PLACES, Lab
from moving_kit import Stop, agent_of

import perdure
from perdure.runs.moving import packages
from perdure.testing.processes import ForkServer
from perdure.values.compress import zstd

# --- one place


def test_a_file_is_imported_once(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    path = lab.store.ops.export_run("trip", tmp_path / "trip.run")
    target.ops.import_run(path)
    with pytest.raises(perdure.UsageError, match="there is a run 'trip' in this store already"):
        target.ops.import_run(path)
    with pytest.raises(perdure.UsageError, match="imported already, into another store or tenant"):
        lab.store.ops.import_run(path)
    with pytest.raises(perdure.UsageError, match="imported already"):
        target.tenant("somebody else").ops.import_run(path)
    assert lab.store.get_run("trip").status == "exported"


def test_a_run_is_exported_once(lab: Lab, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    path = lab.store.ops.export_run("trip", tmp_path / "trip.run")
    content = path.read_bytes()
    assert lab.store.ops.export_run("trip", path) == path  # the same call again: it is done
    assert path.read_bytes() == content
    with pytest.raises(perdure.UsageError, match=r"was exported already, to .*trip\.run"):
        lab.store.ops.export_run("trip", tmp_path / "other.run")
    assert os.listdir(tmp_path) == ["trip.run"]


def test_an_export_can_be_taken_back_where_it_came_from(lab: Lab, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    back = lab.store.ops.import_run(lab.store.ops.export_run("trip", tmp_path / "trip.run"))
    lab.store.answer("trip", "NYC1")
    lab.store.send("trip", 0, topic="news")
    assert back.result()[1] == "B-NYC1"


def test_an_id_that_is_taken_is_refused_and_the_file_stays_good(
    lab: Lab, target: perdure.Store, tmp_path: Path
) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    target.start(agent, "LON", id="trip")
    path = lab.store.ops.export_run("trip", tmp_path / "trip.run")
    with pytest.raises(perdure.UsageError, match="there is a run 'trip' in this store already"):
        target.ops.import_run(path)
    assert os.listdir(tmp_path) == ["trip.run"]
    assert target.tenant(f"elsewhere-{id(lab)}").ops.import_run(path).status == "waiting"


def test_a_finished_run_may_be_kept_and_an_unfinished_one_not(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    @lab.durable(name=f"done-{id(lab)}")
    async def done() -> int:
        return 5

    run = lab.run(done, id="done")
    path = lab.store.ops.export_run(run, tmp_path / "done.run", keep=True)
    assert run.result() == 5
    assert target.ops.import_run(path).result() == 5
    assert target.tenant(f"another-{id(lab)}").ops.import_run(path).result() == 5
    lab.run(agent_of(lab), "NYC", id="trip")
    with pytest.raises(perdure.UsageError, match="keep=True"):
        lab.store.ops.export_run("trip", tmp_path / "trip.run", keep=True)
    assert lab.store.get_run("trip").status == "waiting"


def test_existing_files_are_not_overwritten(lab: Lab, tmp_path: Path) -> None:
    lab.run(agent_of(lab), "NYC", id="trip")
    path = tmp_path / "trip.run"
    path.write_text("precious")
    with pytest.raises(perdure.UsageError, match="exists already"):
        lab.store.ops.export_run("trip", path)
    with pytest.raises(perdure.UsageError, match="cannot be written"):
        lab.store.ops.export_run("trip", tmp_path / "no" / "folder.run")
    assert path.read_text() == "precious"
    assert lab.store.get_run("trip").status == "waiting"


def test_what_comes_in_between_is_not_lost(
    lab: Lab, target: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that arrives between the reading and the fencing goes along."""
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    before = packages.write_pending

    def write(package: Any, path: Path) -> int:
        if lab.store.asks():
            lab.store.answer("trip", "NYC1")
        return before(package, path)

    monkeypatch.setattr("perdure.runs.moving.exporting.write_pending", write)
    moved = target.ops.import_run(lab.store.ops.export_run("trip", tmp_path / "trip.run"))
    target.send("trip", 2, topic="news")
    assert moved.result()[1] == "B-NYC1"


async def test_export_and_import_are_awaited_too(store: perdure.Store, other: perdure.Store, tmp_path: Path) -> None:
    lab = Lab(store, "async")
    target = other.tenant(lab.store._context.tenant_name)
    run = await lab.store.arun(agent_of(lab), "NYC", id="trip")
    moved = await asyncio.to_thread(
        target.ops.import_run, await asyncio.to_thread(lab.store.ops.export_run, run, tmp_path / "trip.run")
    )
    await target.aanswer("trip", "NYC1")
    await target.asend("trip", 2, topic="news")
    assert (await moved.aresult())[1] == "B-NYC1"


# --- kills


@pytest.mark.parametrize("point", ["before the mark", "after the mark", "in the middle of publishing"])
def test_a_kill_in_the_middle_is_safe(
    lab: Lab, target: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    from perdure.runs.moving.exporting import Export

    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    path, part = tmp_path / "trip.run", tmp_path / "trip.run.part"

    def stop(*_: Any) -> Any:
        raise Stop

    with monkeypatch.context() as patch:
        if point == "before the mark":
            patch.setattr(Export, "mark", stop)
        elif point == "after the mark":
            patch.setattr(Export, "publish", stop)
        else:
            patch.setattr("os.replace", stop)
        with pytest.raises(Stop):
            lab.store.ops.export_run("trip", path)
    assert part.exists()
    assert not path.exists()
    run = lab.store.get_run("trip")
    if point == "before the mark":
        assert run.status == "waiting"
        with pytest.raises(perdure.UsageError, match="not finished"):
            target.ops.import_run(part)
    else:
        assert run.status == "exported"
        with pytest.raises(perdure.UsageError, match="call export_run again with that path"):
            lab.store.ops.export_run("trip", tmp_path / "other.run")
    moved = target.ops.import_run(lab.store.ops.export_run("trip", path))
    target.answer("trip", "NYC1")
    target.send("trip", 2, topic="news")
    assert moved.result()[1] == "B-NYC1"
    assert not part.exists()


@pytest.mark.parametrize("place", PLACES)
def test_sigkill_at_any_step_leaves_the_run_in_one_place(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    urls = [str(tmp_path / "a.db"), str(tmp_path / "b.db")]
    if place == "postgres":
        server = request.getfixturevalue("postgres_server")
        urls = [server.url(new_database(server)) for _ in range(2)]
    with perdure.open(urls[0]) as store:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")
        name = lab.store._context.tenant_name
    path = tmp_path / "trip.run"
    ready = False
    with ForkServer("mover:move") as fork_server:
        for die_at in ("write before", "write after", "mark before", "mark after", "publish before", "publish after"):
            list(fork_server.start(urls[0], name, "export", str(path), die_at).lines())
            with perdure.open(urls[0]) as store:
                marked = store.tenant(name).get_run("trip").status == "exported"
            assert marked == (die_at in ("mark after", "publish before", "publish after"))
            ready = path.exists()
            assert ready == (die_at == "publish after")
        assert ready
        for die_at in ("claim before", "claim after", "write before", "write after"):
            list(fork_server.start(urls[1], name, "import", str(path), die_at).lines())
            with perdure.open(urls[1]) as store:
                assert bool(store.tenant(name).runs()) == (die_at == "write after")
            if die_at == "claim after":  # another store is not let in between
                with perdure.open(urls[0]) as store, pytest.raises(perdure.UsageError, match="imported already"):
                    store.tenant(name).ops.import_run(path)
    with perdure.open(urls[1]) as store:
        there = store.tenant(name)
        there.answer("trip", "NYC1")
        there.send("trip", 2, topic="news")
        assert there.run(agent, "NYC", id="trip").result()[1] == "B-NYC1"


# --- bad files


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    with perdure.open(str(folder / "good.db")) as store:
        lab = Lab(store, "sync")
        lab.run(agent_of(lab), "NYC", id="trip")
        return lab.store.ops.export_run("trip", folder / "trip.run").read_bytes()


def repacked(good: bytes, change: Any) -> bytes:
    """The file with other content and a hash that fits: what an attacker would write."""
    body = good[packages._HEAD + 32 :]
    value = msgspec.msgpack.decode(zstd.decompress(body))
    change(value)
    packed = zstd.compress(msgspec.msgpack.encode(value))
    return packages._READY + blake3(packed).digest() + packed


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("bench") / "bench.db")) as store:
        yield store


def refuses(store: perdure.Store, path: Path, content: bytes, match: str) -> None:
    path.write_bytes(content)
    with pytest.raises(perdure.UsageError, match=match):
        store.ops.import_run(path)
    assert store.runs() == []
    assert store.threads() == []
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_cut_short_or_changed_anywhere_is_refused(
    good: bytes, bench: perdure.Store, tmp_path: Path
) -> None:
    path = tmp_path / "bad.run"
    for length in (0, 1, 10, packages._HEAD, packages._HEAD + 16, packages._HEAD + 32, len(good) // 2, len(good) - 1):
        refuses(bench, path, good[:length], "cannot be imported")
    for place in range(0, len(good), max(1, len(good) // 97)):
        changed = bytearray(good)
        changed[place] ^= 0x40
        refuses(bench, path, bytes(changed), "cannot be imported")
    refuses(bench, path, good + b"x", "damaged")
    refuses(bench, path, b"SQLite format 3\0" + bytes(200), "no exported run")


def _set(name: str, value: Any) -> Any:
    return lambda package: package["runs"][0].__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("status", "running"),
        _set("status", "nonsense"),
        _set("status", 7),
        _set("id", ""),
        _set("id", "a\0b"),
        _set("id", "x" * 1000),
        _set("fence", 0),
        _set("fence", -1),
        _set("fence", 2**63),
        _set("seq", 2**61),
        _set("seq", 1),
        _set("wake_at", -1),
        _set("parent", 0),
        _set("parent", 5),
        _set("incarnation", b"short"),
        _set("waiting", "not json"),
        _set("values", {}),
        _set("journal", [[1, 99, b"x"]]),
        _set("journal", [[1, 2, b"\xff\xff"]]),
        _set("journal", [[2, 2, b"\x90"], [1, 2, b"\x90"]]),
        _set("since", 10**6),
        _set("asks", [["p", "s", "q", "t", 0, None, "nonsense", None]]),
        _set("answers", [["nowhere", "me", b"1", 0]]),
        _set("signals", [["t", 1, "k", b"1", 0, 7]]),
        _set("states", [[5, 4, "state", 0, None, None, b"{}"]]),
        _set("states", [[2**63 - 1, None, "state", 0, None, None, b"{}"]]),
        _set("states", [[5, None, "state", 0, None, "[1]", b"{}"]]),
        _set("unheard", 1),
        lambda package: package["runs"].clear(),
        lambda package: package["runs"].append(dict(package["runs"][0], parent=0)),
        lambda package: package.__setitem__("blobs", []),
        lambda package: package.clear(),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(
    good: bytes, bench: perdure.Store, tmp_path: Path, change: Any
) -> None:
    refuses(bench, tmp_path / "bad.run", repacked(good, change), "cannot be imported")


def test_a_bomb_is_refused_before_it_is_unpacked(
    good: bytes, bench: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "BYTES_MAX", 1 << 20)
    packed = zstd.compress(bytes(1 << 24))
    refuses(bench, tmp_path / "bomb.run", packages._READY + blake3(packed).digest() + packed, "allowed")
    refuses(bench, tmp_path / "bomb.run", packages._READY + bytes(2 << 20), "more than")


def test_what_is_too_large_is_not_exported(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.run(agent_of(lab), "NYC", id="trip")
    monkeypatch.setattr(packages, "BYTES_MAX", 1 << 12)
    with pytest.raises(perdure.UsageError, match="holds"):
        lab.store.ops.export_run("trip", tmp_path / "trip.run")
    assert lab.store.get_run("trip").status == "waiting"
    assert os.listdir(tmp_path) == []


def test_hostile_values_are_texts_that_nobody_runs(good: bytes, bench: perdure.Store, tmp_path: Path) -> None:
    """A pickle in place of the arguments is no JSON text: the run is stuck, and nothing was executed."""
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/owned",)

    path = tmp_path / "evil.run"
    path.write_bytes(repacked(good, _set("values", {"args": pickle.dumps(Evil())})))
    store = bench.tenant("evil")
    run = store.ops.import_run(path)
    run.cancel()
    assert not (tmp_path / "owned").exists()
    with pytest.raises(perdure.PerdureError):
        store.replay(run, lambda place: None)
    assert not (tmp_path / "owned").exists()


def test_an_unknown_run_and_a_missing_file_are_named(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(perdure.NotFound):
        lab.store.ops.export_run("nobody", tmp_path / "x.run")
    with pytest.raises(perdure.UsageError, match="No such file"):
        lab.store.ops.import_run(tmp_path / "x.run")
    assert asyncio.run(_aimports(lab.store, tmp_path / "x.run"))


async def _aimports(store: perdure.Store, path: Path) -> bool:
    with pytest.raises(perdure.UsageError):
        await asyncio.to_thread(store.ops.import_run, path)
    return True
