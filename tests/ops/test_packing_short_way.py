"""A load passes over whole packs at once, without the rows of the records in them: the state is the same. Where that
way is not open, or what it gives is wrong, the rows are followed one by one."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import apsw
import pytest
from packing_kit import check, grow, pack, rows, scene

import perdure
from perdure.log import packed_lines, packs, reading
from perdure.log.packs import Member, diffs_in, make_pack, salts_in
from perdure.storage.program import Batch, Program, Solo, Sql, Transaction, drive, write
from perdure.storage.sqlite import SqliteDriver
from perdure.values.compress import decompress_full, pack_against
from perdure.values.delta import pack_splices


def texts_of(store: perdure.Store, record: int) -> set[str]:
    """The statements that a load of a record takes."""
    [(tenant, tree)] = rows(store, "SELECT tenant, tree FROM record WHERE id = :id", id=record)
    met: set[str] = set()

    def program() -> Program[None]:
        inner = reading.read_state(tenant, tree, record)
        answers = None
        while True:
            try:
                batch = inner.send(answers)  # type: ignore[arg-type]
            except StopIteration:
                return
            met.update(statement.sql.postgres for statement in batch.statements)
            answers = yield batch

    store._context.driver.run(Transaction(program))
    return met


def newest(store: perdure.Store) -> int:
    [(record,)] = rows(store, "SELECT max(id) FROM record")
    return int(record)


def test_a_load_takes_the_short_way(store: perdure.Store) -> None:
    thread = store.thread("a")
    grow(thread, 150, size=20_000)
    before = scene(store)
    pack(store)
    assert rows(store, "SELECT count(*) FROM pack") == [(3,)]
    assert reading._RANGE.postgres not in texts_of(store, newest(store))
    assert packed_lines._LINKS.postgres in texts_of(store, newest(store))
    assert scene(store) == before
    # Records that came later, behind the packs.
    state = thread.load().state
    for number in range(5):
        thread.save({**state, "later": number})
    assert reading._RANGE.postgres not in texts_of(store, newest(store))
    assert thread.load(strict=True).state == {**state, "later": 4}
    check(store)


def test_a_line_that_leaves_a_pack_in_its_middle_is_followed(store: perdure.Store) -> None:
    thread = store.thread("a")
    ids = grow(thread, 150, size=20_000)
    pack(store)
    state, parent = thread.load(ids[40]).state, ids[40]
    for number in range(10):
        parent = thread.save({**state, "side": number}, parent=parent).id
    assert reading._RANGE.postgres not in texts_of(store, newest(store))
    assert thread.load(parent, strict=True).state == {**state, "side": 9}
    pack(store)
    assert reading._RANGE.postgres in texts_of(store, newest(store))
    assert thread.load(parent, strict=True).state == {**state, "side": 9}
    check(store)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE pack SET first = first + 1",
        "UPDATE pack SET last = last + 1",
        "UPDATE pack SET key = key + 1",
        "UPDATE pack SET tree = tree + 1",
    ],
)
def test_where_a_pack_belongs_is_wrong_and_nobody_notices(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        grow(store.thread("a"), 150, size=20_000)
        before = scene(store)
        pack(store)
    with apsw.Connection(str(path)) as connection:
        connection.execute(damage)
    connection.close()
    with perdure.open(str(path)) as store:
        assert scene(store) == before


def test_all_as_one_is_wrong_and_each_is_taken(tmp_path: Path) -> None:
    """A pack whose frame of all differences gives something else: no load may give that."""
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        grow(store.thread("a"), 150, size=20_000)
        before = scene(store)
        pack(store)
    connection = apsw.Connection(str(path))
    [(key, size, full)] = connection.execute(
        "SELECT r.id, r.size, b.full_text FROM record r JOIN body b ON b.id = r.body WHERE r.keyframe = 1"
    )
    key_text = decompress_full(full, size)
    [(number, data)] = connection.execute("SELECT pack, data FROM pack WHERE key = ? ORDER BY first LIMIT 1", (key,))
    members = [Member._make(pair) for pair in zip(salts_in(data), diffs_in(data, key_text), strict=True)]
    other = make_pack([*members[:-1], Member(members[-1].salt, pack_splices([0, 0, b"x"]))], key_text)
    mixed = _with_whole_of(make_pack(members, key_text), other, key_text, members)
    change = {"data": mixed, "pack": number}
    connection.execute("UPDATE pack SET data = :data WHERE pack = :pack", change)
    connection.close()
    with perdure.open(str(path)) as store:
        assert scene(store) == before


def _with_whole_of(data: bytes, other: bytes, key_text: bytes, members: list[Member]) -> bytes:
    """A pack that says of all together what another says, and of each what is right."""
    wrong = packs.whole_in(other, key_text)
    frame = packs._frames(other).whole
    sizes = b"".join(len(member.diff).to_bytes(4, "little") for member in members)
    each = pack_against(sizes + b"".join(member.diff for member in members), wrong)
    head = data[: 2 + 16 * len(members)]
    return head + len(frame).to_bytes(4, "little") + frame + each


def test_what_can_wait_does_not_wait_for_the_disk_and_all_else_does(tmp_path: Path) -> None:
    """A slack transaction joins nobody, and leaves the connection as durable as it was, also when it fails."""
    driver = SqliteDriver(tmp_path / "a.db")
    assert driver._writer is not None
    connection, seen = driver._writer.connection, list[tuple[str, int]]()
    put = Sql("INSERT INTO meta (key, value) VALUES (:key, 'x')")

    def level(name: str) -> Program[None]:
        yield Batch(put(key=name))
        seen.append((name, connection.pragma("synchronous")))

    def failing() -> Program[None]:
        yield Batch(put(key="twice"), put(key="twice"))

    solos: dict[str, Solo] = {"s": "slack", "u": False}
    drive(driver, write(lambda: level("usual")))
    drive(driver, write(lambda: level("slack"), solo="slack"))
    with pytest.raises(perdure.StoreError):
        drive(driver, write(failing, solo="slack"))
    drive(driver, write(lambda: level("after")))
    threads = [
        threading.Thread(target=drive, args=(driver, write(partial(level, f"{kind}{number}"), solo=solo)))
        for number in range(20)
        for kind, solo in solos.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    full, normal = 2, 1
    assert [found for name, found in seen if name[0] == "s"] == [normal] * 21
    assert [found for name, found in seen if name[0] != "s"] == [full] * 22
    driver.close()
