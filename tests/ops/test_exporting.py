"""A thread travels in one file: the same ids, hashes and states, between the databases, and never by half."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import copy_kit
import pytest
import striking
from copy_kit import everything, make_thread, query

import perdure
from perdure import Conflict, NotFound, Store, UsageError
from perdure.ops.copies.sections import SectionReader, SectionWriter
from perdure.ops.copies.thread_files import decode_parts, encode_parts
from perdure.testing.processes import ForkServer

Opener = Callable[..., Store]


@pytest.fixture
def opener(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens stores: `opener("sqlite", "a")`, `opener("postgres", "b")`. A name is a store of its own."""
    opened: list[Store] = []

    def opening(kind: str, name: str, **options: Any) -> Store:
        url = str(tmp_path / f"{name}.db")
        if kind == "postgres":
            url, options = request.getfixturevalue("postgres_url"), {"schema": name, **options}
        opened.append(perdure.open(url, **options))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


PAIRS = list(itertools.product(("sqlite", "postgres"), repeat=2))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_all_branches_arrive_with_the_same_ids_hashes_and_states(
    source: str, target: str, opener: Opener, tmp_path: Path
) -> None:
    here, there = opener(source, "a"), opener(target, "b")
    make_thread(here)
    for name in ("rich", "rich fork"):
        file = tmp_path / f"{name}.thread"
        exported = here.ops.export_thread(name, file)
        imported = there.ops.import_thread(file)
        assert everything(there, name) == everything(here, name)
        assert imported.checkpoints == exported.checkpoints == len(everything(here, name)["checkpoints"])
        assert (imported.thread, imported.already, exported.bytes) == (name, False, file.stat().st_size)
    assert there.ops.verify().ok
    assert len(there.threads(where={"user": "alice"})) == 2
    again = there.thread("rich")
    again.load(strict=True)
    again.save({"goes": "on"})
    assert there.ops.verify().ok


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_pruned_thread_arrives_with_its_tombstones_and_a_packed_one_unpacked(
    source: str, target: str, opener: Opener, tmp_path: Path
) -> None:
    here, there = opener(source, "a"), opener(target, "b")
    make_thread(here)
    here.thread("rich").prune(keep=20)
    assert query(here, "SELECT count(*) FROM record WHERE body IS NULL") != [(0,)]
    here.ops.export_thread("rich", tmp_path / "x")
    there.ops.import_thread(tmp_path / "x")
    assert everything(there, "rich") == everything(here, "rich")
    assert there.ops.verify().ok
    # And back, beside what is there.
    there.ops.export_thread("rich", tmp_path / "y")
    here.ops.import_thread(tmp_path / "y", name="came back")
    assert everything(here, "came back")["checkpoints"] == everything(here, "rich")["checkpoints"]
    assert here.ops.verify().ok


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_was_packed_is_exported_like_everything_else(kind: str, opener: Opener, tmp_path: Path) -> None:
    from perdure.log.pack_writer import pack_tenant
    from perdure.storage.program import drive

    here, there = opener(kind, "a"), opener("sqlite", "b")
    make_thread(here)
    before = everything(here, "rich")
    drive(here._context.driver, pack_tenant(here._context.known_tenant or 0, 2**61))
    assert query(here, "SELECT count(*) FROM pack") != [(0,)]
    here.ops.export_thread("rich", tmp_path / "x")
    there.ops.import_thread(tmp_path / "x")
    assert everything(there, "rich") == before == everything(here, "rich")
    assert there.ops.verify().ok


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_one_line_is_a_checkpoint_and_what_led_to_it(kind: str, opener: Opener, tmp_path: Path) -> None:
    here, there = opener(kind, "a"), opener("sqlite", "b")
    make_thread(here)
    tip = here.thread("rich").branches()[-1]
    done = here.ops.export_thread(here.thread("rich"), tmp_path / "x", branch=tip)
    there.ops.import_thread(tmp_path / "x", name="line")
    line = list(here.thread("rich").history(start=tip))
    assert [one.id for one in there.thread("line").history()] == [one.id for one in line]
    assert [one.state for one in there.thread("line").history()] == [one.state for one in line]
    assert len(there.thread("line").branches()) == 1
    assert (done.checkpoints, done.is_whole) == (len(line), False)
    assert there.ops.verify().ok
    with pytest.raises(NotFound, match="no checkpoint"):
        here.ops.export_thread("rich", tmp_path / "y", branch="0d3k9qx2m7w1a")
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_ids_namespaces_and_pending_writes_of_langgraph_come_along(
    source: str, target: str, opener: Opener, tmp_path: Path
) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    from perdure.langgraph import PerdureSaver

    here, there = opener(source, "a"), opener(target, "b")
    savers = PerdureSaver(here), PerdureSaver(there)
    config: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": ""}}
    text = "the same words again and again " * 300
    for number in range(30):
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": [f"message {n} {text[: n * 40]}" for n in range(number)]}
        checkpoint["channel_versions"] = {"messages": number + 1}
        config = savers[0].put(
            config, checkpoint, {"source": "loop", "step": number, "parents": {}}, {"messages": number}
        )
        savers[0].put_writes(config, [("messages", f"w{number}"), ("other", text)], f"task-{number}")
        if number % 10 == 3:
            inner: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": f"sub:{number}"}}
            inner = savers[0].put(inner, empty_checkpoint(), {"source": "input", "step": 0, "parents": {}}, {})
            savers[0].put_writes(inner, [("x", text)], "inner")
    early: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": "later", "checkpoint_id": "not-yet"}}
    savers[0].put_writes(early, [("early", "bird")], "t")
    here.ops.export_thread("graph", tmp_path / "x")
    there.ops.import_thread(tmp_path / "x")
    look: Any = {"configurable": {"thread_id": "graph"}}
    assert list(savers[1].list(look)) == list(savers[0].list(look))
    assert savers[1].get_tuple(look) == savers[0].get_tuple(look)
    count = "SELECT count(*) FROM write"
    assert query(there, count) == query(here, count)
    assert there.ops.verify().ok


async def test_the_async_twins_do_the_same(opener: Opener, tmp_path: Path) -> None:
    here, there = opener("postgres", "a"), opener("sqlite", "b")
    make_thread(here, count=20)
    told: list[tuple[int, int]] = []
    done = await asyncio.to_thread(
        here.ops.export_thread, "rich", tmp_path / "x", progress=lambda a, b: told.append((a, b))
    )
    imported = await asyncio.to_thread(
        there.ops.import_thread, tmp_path / "x", progress=lambda a, b: told.append((a, b))
    )
    assert done.checkpoints == imported.checkpoints
    assert (done.checkpoints, done.checkpoints) in told
    assert everything(there, "rich") == everything(here, "rich")


def test_a_name_that_is_taken_is_refused_and_the_same_thread_twice_is_said_so(opener: Opener, tmp_path: Path) -> None:
    here, there = opener("sqlite", "a"), opener("sqlite", "b")
    make_thread(here, count=20)
    here.ops.export_thread("rich", tmp_path / "x")
    assert not there.ops.import_thread(tmp_path / "x").already
    before = copy_kit.tables(there)
    assert there.ops.import_thread(tmp_path / "x").already
    assert here.ops.import_thread(tmp_path / "x").already
    assert copy_kit.tables(there) == before
    there.thread("rich").save({"gone": "on"})
    with pytest.raises(UsageError, match="gone on since"):
        there.ops.import_thread(tmp_path / "x")
    there.ops.import_thread(tmp_path / "x", name="beside")
    assert {info.name for info in there.threads()} == {"rich", "beside"}
    with pytest.raises(UsageError, match="exists already"):
        here.ops.export_thread("rich", tmp_path / "x")
    with pytest.raises(NotFound):
        here.ops.export_thread("nobody", tmp_path / "z")
    assert sorted(os.listdir(tmp_path))[-1] == "x"


def test_an_export_is_remembered_as_a_copy(opener: Opener, tmp_path: Path) -> None:
    here = opener("sqlite", "a")
    make_thread(here, count=5)
    done = here.ops.export_thread("rich", tmp_path / "x")
    [row] = query(here, "SELECT sort, place, tenant, bytes, restored_at FROM copy")
    assert row == ("export", str(tmp_path / "x"), here._context.known_tenant, done.bytes, None)


# --- files that are not what they should be


def test_a_file_that_was_changed_or_cut_short_anywhere_is_refused(opener: Opener, tmp_path: Path) -> None:
    here, there = opener("sqlite", "a"), opener("sqlite", "b")
    make_thread(here, count=12)
    here.ops.export_thread("rich", tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    bad = tmp_path / "bad"
    for at in range(0, len(whole), 37):
        bad.write_bytes(whole[:at] + bytes((whole[at] ^ 0x41,)) + whole[at + 1 :])
        with pytest.raises(UsageError, match="Nothing was written"):
            there.ops.import_thread(bad)
        bad.write_bytes(whole[:at])
        with pytest.raises(UsageError, match="Nothing was written"):
            there.ops.import_thread(bad)
    bad.write_bytes(whole + b"more")
    with pytest.raises(UsageError):
        there.ops.import_thread(bad)
    bad.write_bytes(whole.replace(b"thread 1\n", b"thread 2\n", 1))
    with pytest.raises(UsageError, match="newer Perdure"):
        there.ops.import_thread(bad)
    bad.write_bytes(b"something else")
    with pytest.raises(UsageError, match="no file of Perdure"):
        there.ops.import_thread(bad)
    with pytest.raises(UsageError, match="No such file"):
        there.ops.import_thread(tmp_path / "nothing")
    assert there.threads() == []
    assert query(there, "SELECT count(*) FROM record") == [(0,)]


def forged(file: Path, change: Callable[[str, list[Any]], list[Any]]) -> Path:
    """The same file with other content, and a hash that fits."""
    reader = SectionReader(file, "thread", "imported")
    made = file.with_name("forged")
    with open(made, "wb") as out:
        writer = SectionWriter(out, "thread")
        for section, data in reader.blocks():
            writer.block(section, encode_parts(change(section, decode_parts(section, data))))
        writer.end()
    reader.close()
    return made


def _state(section: str, parts: list[Any], **changes: Any) -> list[Any]:
    if section == "T":
        for name, value in changes.items():
            setattr(parts[-1], name, value)
    return parts


FORGERIES: dict[str, Callable[[str, list[Any]], list[Any]]] = {
    "a note": lambda section, parts: _state(section, parts, note="never said"),
    "metadata": lambda section, parts: _state(section, parts, metadata='{"k":-1}'),
    "a salt": lambda section, parts: _state(section, parts, salt=bytes(16)),
    "a time": lambda section, parts: _state(section, parts, at=1),
    "a step": lambda section, parts: _state(section, parts, step=7777),
    "a text": lambda section, parts: _state(section, parts, base=None, data=b'{"other":1}'),
    "a hash": lambda section, parts: _state(section, parts, hash=bytes(32)),
    "a parent": lambda section, parts: _state(section, parts, parent=None),
    "a record less": lambda section, parts: parts[:-1] if section == "T" else parts,
    "a record twice": lambda section, parts: [*parts, parts[-1]] if section == "T" else parts,
    "a thread less": lambda section, parts: [] if section == "H" else parts,
}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_file_is_refused_and_leaves_nothing(kind: str, what: str, opener: Opener, tmp_path: Path) -> None:
    here, there = opener("sqlite", "a"), opener(kind, "b")
    make_thread(here, count=12)
    here.ops.export_thread("rich", tmp_path / "x")
    with pytest.raises(UsageError, match="Nothing was written"):
        there.ops.import_thread(forged(tmp_path / "x", FORGERIES[what]))
    assert there.threads() == []
    assert query(there, "SELECT count(*) FROM record") == [(0,)]
    assert query(there, "SELECT count(*) FROM thread") == [(0,)]
    assert query(there, "SELECT count(*) FROM body") == [(0,)]
    assert not there.ops.import_thread(tmp_path / "x").already


# --- faults and kills


class Fault(Exception):
    """What the hook raises."""


class Striker:
    """Raises at the n-th point, and at all later ones: as if the process had died there."""

    def __init__(self) -> None:
        self.left = 10**9

    def __call__(self, _point: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Fault


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_import_that_ends_at_any_statement_shows_nothing_and_can_be_done_again(
    kind: str, opener: Opener, tmp_path: Path
) -> None:
    here, plain = opener("sqlite", "a"), opener(kind, "b")
    make_thread(here, count=6)
    here.ops.export_thread("rich", tmp_path / "x")
    striker = Striker()
    struck = opener(kind, "b", hook=striker)
    for number in striking.points("import"):
        tenant = f"t{number}"
        striker.left = number
        try:
            struck.tenant(tenant).ops.import_thread(tmp_path / "x")
        except Fault:
            pass
        else:
            break
        finally:
            striker.left = 10**9
        assert [info.name for info in plain.tenant(tenant).threads()] in ([], ["rich"])
        plain.tenant(tenant).ops.import_thread(tmp_path / "x")
        assert everything(plain.tenant(tenant), "rich") == everything(here, "rich")
        assert plain.tenant(tenant).ops.verify().ok
    assert number > 10


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_export_that_ends_at_any_statement_leaves_no_file(kind: str, opener: Opener, tmp_path: Path) -> None:
    plain, striker = opener(kind, "b"), Striker()
    make_thread(plain, count=6)
    struck = opener(kind, "b", hook=striker)
    for number in striking.points("export"):
        striker.left = number
        try:
            struck.ops.export_thread("rich", tmp_path / f"x{number}")
        except Fault:
            assert not (tmp_path / f"x{number}.part").exists()
        else:
            break
    assert number > 5
    assert plain.ops.export_thread("rich", tmp_path / "y").checkpoints


@pytest.fixture(scope="module")
def importers() -> Iterator[ForkServer]:
    with ForkServer("copy_kit:import_slowly") as fork_server:
        yield fork_server


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_import_that_is_killed_can_be_done_again_and_what_it_left_goes(
    kind: str, opener: Opener, tmp_path: Path, importers: ForkServer, request: pytest.FixtureRequest
) -> None:
    here, there = opener("sqlite", "a"), opener(kind, "public" if kind == "postgres" else "b")
    url = str(tmp_path / "b.db")
    if kind == "postgres":
        there.close()
        there = opener(kind, "perdure")
        url = request.getfixturevalue("postgres_url")
    thread = here.thread("long")
    for number in range(400):
        thread.save({"text": os.urandom(4000).hex(), **copy_kit.grown(number)})
    here.ops.export_thread("long", tmp_path / "x")
    child = importers.start(url, str(tmp_path / "x"))
    for said in child.lines():
        if said == "done" or said[0] * 2 > said[1]:
            break
    child.kill()
    assert there.threads() == []
    assert query(there, "SELECT count(*) FROM record") != [(0,)]
    assert not there.ops.import_thread(tmp_path / "x").already
    assert everything(there, "long") == everything(here, "long")
    assert there.ops.verify().ok
    # An hour later what the killed one had left is removed by whoever imports next.
    now = there._context.clock_us() + 2 * 3600 * 1_000_000
    there._context.clock_us = lambda: now
    there.ops.import_thread(tmp_path / "x", name="again")
    assert query(there, "SELECT name FROM thread ORDER BY name") == [("again",), ("long",)]
    assert there.ops.verify().ok


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_thread_that_is_pruned_while_it_is_exported_arrives_whole_or_pruned(
    kind: str, opener: Opener, tmp_path: Path
) -> None:
    """Each time the export has read a stretch, a prune takes something away; it begins anew, or says that it cannot."""
    here, there = opener(kind, "a"), opener("sqlite", "b")
    thread = here.thread("x")
    for number in range(300):
        thread.save({"text": os.urandom(400).hex(), **copy_kit.grown(number)})
    keep = iter([250, 200])

    def prune(_done: int, _total: int) -> None:
        if (left := next(keep, None)) is not None:
            here.thread("x").prune(keep=left)

    try:
        here.ops.export_thread("x", tmp_path / "x", progress=prune)
    except Conflict:
        pytest.fail("two prunes are not too many")
    there.ops.import_thread(tmp_path / "x")
    assert there.ops.verify().ok
    assert there.thread("x").load(strict=True).state == here.thread("x").load().state
    assert len(list(there.thread("x").history())) in (300, 250, 200)


def test_what_is_saved_during_an_export_or_a_compaction_during_an_import_does_no_harm(
    opener: Opener, tmp_path: Path
) -> None:
    from perdure.log.pack_writer import pack_tenant
    from perdure.storage.program import drive

    here, there = opener("sqlite", "a"), opener("sqlite", "b")
    make_thread(here)
    before = everything(here, "rich")
    writer = here.thread("rich")
    writer.load()

    def save(_done: int, _total: int) -> None:
        writer.save({"later": 1})

    here.ops.export_thread("rich", tmp_path / "x", progress=save)
    times = iter(range(2))

    def pack(_done: int, _total: int) -> None:
        if next(times, None) is not None:
            drive(there._context.driver, pack_tenant(there._context.known_tenant or 0, 2**61))

    there.ops.import_thread(tmp_path / "x", progress=pack)
    assert everything(there, "rich") == before
    assert there.ops.verify().ok
