"""Erasing: every byte goes, the chain still verifies, pins do not hold it, and the answer says what may remain."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import eraser
import psycopg
import pytest
import striking
from keeping_kit import (
    PLACES,
    Clock,
    Hook,
    fill,
    hashes,
    opened,
    place,
    query,
    rows,
    seen,
    sound,
    steps,
    struck_everywhere,
    text,
)
from role_kit import roles_of

import holdfast as hf
from holdfast.errors import NotFound, UsageError
from holdfast.log import erasing
from holdfast.log.packing import pack_tenant
from holdfast.runs.journal.blobs import BLOB_MIN_BYTES
from holdfast.storage.program import Batch, Program, Sql, drive, write
from holdfast.testing.postgres import PostgresServer
from holdfast.testing.processes import Nursery

__all__ = ["eraser"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[hf.Store]:
    with opened(place(request, request.param), clock) as made:
        yield made


def secrets_of(name: str) -> list[bytes]:
    """What is searched for: something of every place that data of a thread is kept in."""
    return [text(f"{name} {what}").encode() for what in ("state", "late", "note", "about", "metadata")]


def confide(store: hf.Store, name: str) -> list[hf.Checkpoint]:
    """A thread with secrets in its states, notes, metadata, packs and pins."""
    state, late, note, about, metadata = (secret.decode() for secret in secrets_of(name))
    thread = store.thread(name, metadata={"of": metadata})
    saved = [thread.save({"first": state, "n": 0}, note=note, metadata={"about": about})]
    saved += [thread.save({"first": state, "n": n, "late": [late] * (n > 3)}) for n in range(1, 9)]
    thread.pin(saved[2], name="kept")
    return saved


def found_in(path: Path, secrets: list[bytes]) -> set[bytes]:
    """Which of these are in any file of a store."""
    data = [file.read_bytes() for file in path.parent.glob(path.name + "*")]
    return {secret for secret in secrets if any(secret in part for part in data)}


# --- a thread


def test_a_thread_is_gone_and_late_writes_are_refused(store: hf.Store) -> None:
    confide(store, "alice")
    fill(store.thread("bob"), 5)
    before = seen(store)["bob"]
    late = store.thread("alice")
    late.load()
    erased = store.erase("alice")
    assert (erased.checkpoints, erased.threads, erased.runs) == (9, ("alice",), ())
    assert erased.may_remain
    assert seen(store) == {"bob": before}
    with pytest.raises(hf.ThreadDeleted):
        late.save({"late": 1})
    with pytest.raises(NotFound):
        store.erase("alice")
    assert query(store, "SELECT record, records FROM erased") == [(0, 9)]
    assert rows(store)["pin"] == 0
    assert not any(name in str(query(store, "SELECT * FROM erased")) for name in ("alice", "bob"))
    sound(store)
    store.thread("alice").save({"anew": 1})


def test_no_byte_is_left_in_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    kept = secrets_of("bob")
    with hf.open(str(path)) as store:
        confide(store, "alice")
        confide(store, "bob")
        assert found_in(path, secrets_of("alice")) == set(secrets_of("alice"))
        erased = store.erase("alice")
        assert found_in(path, secrets_of("alice")) == set()
        assert not any("-wal" in told for told in erased.may_remain)
    assert found_in(path, secrets_of("alice")) == set()
    assert found_in(path, kept) == set(kept)


def test_what_the_process_remembers_goes_too(store: hf.Store) -> None:
    thread = store.thread("alice")
    fill(thread, 3)
    other = store.thread("bob")
    fill(other, 3)
    cache = store._context.cache
    assert len(cache._bases) == 2
    store.erase("alice")
    assert len(cache._bases) == 1
    fill(other, 1, start=3)


def test_packed_checkpoints_are_erased_as_well(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.db", Clock()
    with opened(str(path), clock) as store:
        thread = store.thread("alice")
        saved = [thread.save({"n": n, "own": text(n, 300), "log": ["x"] * n}) for n in range(40)]
        clock.days(1)
        assert store.compact().packed > 0
        thread.erase(saved[20])
        sound(store)
        assert steps(thread) == [n for n in reversed(range(40)) if n != 20]
        assert [one.state["own"] for one in thread.history()] == [text(n, 300) for n in reversed(range(40)) if n != 20]
        store.erase("alice")
        assert rows(store)["pack"] == 0
    assert found_in(path, [text(n, 300).encode() for n in range(40)]) == set()


def test_forks_are_listed_and_go_only_if_that_is_said(store: hf.Store) -> None:
    saved = confide(store, "alice")
    store.thread("alice").fork(saved[3], name="copy").save({"mine": 1})
    store.thread("copy").fork(name="copy of copy")
    before = seen(store)
    with pytest.raises(UsageError, match="'copy', 'copy of copy'"):
        store.erase("alice")
    assert seen(store) == before
    erased = store.erase("alice", forks=True)
    assert set(erased.threads) == {"alice", "copy", "copy of copy"}
    assert erased.checkpoints == 10
    assert seen(store) == {}
    assert rows(store)["record"] == 0


def test_a_fork_is_erased_and_its_origin_stays(store: hf.Store) -> None:
    saved = confide(store, "alice")
    before = seen(store)["alice"]
    fork = store.thread("alice").fork(saved[3], name="copy")
    fork.save({"mine": 1})
    fork.fork(name="deeper").save({"deeper": 1})
    with pytest.raises(UsageError, match="'deeper'"):
        store.erase("copy")
    erased = store.erase("copy", forks=True)
    assert erased.checkpoints == 2
    assert any("'alice'" in told for told in erased.may_remain)
    assert seen(store) == {"alice": before}
    sound(store)


def test_the_answer_names_copies(store: hf.Store) -> None:
    confide(store, "alice")

    def add() -> Program[None]:
        yield Batch(
            Sql(
                """INSERT INTO copy (id, sort, place, tenant, at, stamp, bytes)
                VALUES ('x', 'backup', '/backups/monday.db', NULL, 1700000000000000, 1, 1),
                ('y', 'export', '/tmp/alice.hf', :tenant, 1700000000000000, 1, 1),
                ('z', 'export', '/tmp/others.hf', :tenant + 1, 1700000000000000, 1, 1)"""
            )(tenant=store._context.known_tenant)
        )

    drive(store._context.driver, write(add))
    told = " ".join(store.erase("alice").may_remain)
    assert "a backup made 2023-11-14 22:13 UTC: /backups/monday.db" in told
    assert "/tmp/alice.hf" in told
    assert "/tmp/others.hf" not in told


async def test_the_async_twins(store: hf.Store) -> None:
    saved = confide(store, "alice")
    assert (await store.thread("alice").aerase(saved[4])).checkpoints == 1
    assert (await store.aerase("alice")).checkpoints == 8


# --- one checkpoint


def test_one_checkpoint_goes_and_the_history_goes_on_behind_it(store: hf.Store) -> None:
    thread = store.thread("alice")
    saved = fill(thread, 12)
    before, states = hashes(store), {one.step: one.state for one in thread.history()}
    for gone in (4, 5, 9):
        assert thread.erase(saved[gone]).checkpoints == 1
        sound(store)
    left = [11, 10, 8, 7, 6, 3, 2, 1, 0]
    assert steps(thread) == left
    assert {one.step: one.state for one in thread.history()} == {n: states[n] for n in left}
    assert [c.step for n in (1, 2, 3, 4) for c in thread.history(limit=n)][-4:] == [11, 10, 8, 7]
    assert hashes(store) == before  # also of what was erased
    for call in (thread.load, lambda at: list(thread.history(start=at)), lambda at: thread.fork(at, name="x")):
        with pytest.raises(NotFound):
            call(saved[5])
    assert query(store, "SELECT note, metadata, body FROM record WHERE body IS NULL") == [(None, None, None)] * 3
    assert thread.prune(keep=4).removed == 5
    assert steps(thread) == [11, 10, 8, 7]
    fill(thread, 2, start=12)
    sound(store)


def test_its_bytes_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with hf.open(str(path)) as store:
        thread = store.thread("alice")
        saved = [
            thread.save({"own": text(n), "log": ["x"] * n}, note=text(f"note {n}"), metadata={"m": text(f"m {n}")})
            for n in range(12)
        ]
        own = [[text(what).encode() for what in (n, f"note {n}", f"m {n}")] for n in range(12)]
        for gone in (0, 5, 11):
            assert found_in(path, own[gone]) == set(own[gone])
            thread.erase(saved[gone])
            assert found_in(path, own[gone]) == set()
        sound(store)
        assert found_in(path, own[6]) == set(own[6])


def test_erasing_the_head_goes_back_to_what_was_before_it(store: hf.Store) -> None:
    thread = store.thread("alice")
    saved = fill(thread, 3)
    fork = thread.fork(name="fork")
    late = store.thread("alice")
    late.load()
    thread.erase(saved[2])
    assert (steps(thread), steps(fork)) == ([1, 0], [1, 0])
    head = thread.head()
    assert head is not None
    assert head.id == saved[1].id
    with pytest.raises(NotFound):
        late.save({"on": "what is gone"})
    store.thread("alice").save({"goes": "on"})
    sound(store)
    thread = store.thread("alone")
    only = thread.save({"only": 1})
    thread.erase(only)
    assert store.thread("alone").head() is None or steps(store.thread("alone")) == []
    sound(store)


def test_a_checkpoint_of_another_thread_is_not_found(store: hf.Store) -> None:
    saved = fill(store.thread("alice"), 3)
    fill(store.thread("bob"), 3)
    with pytest.raises(NotFound):
        store.thread("bob").erase(saved[1])
    with pytest.raises(NotFound):
        store.thread("alice").erase("0000000000001")
    with pytest.raises(UsageError):
        store.thread("alice").erase(None)  # type: ignore[arg-type]


def test_it_beats_pins(store: hf.Store) -> None:
    thread = store.thread("alice")
    saved = fill(thread, 5)
    thread.pin(saved[2], name="p")
    thread.pin(saved[3], name="q")
    thread.erase(saved[2])
    assert [pin.name for pin in thread.pins()] == ["q"]
    assert steps(thread) == [4, 3, 1, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_pin_of_another_thread_does_not_hold_it_either(store: hf.Store, packed: bool) -> None:
    root = store.thread("root")
    first = root.save({"root": 1})
    doomed = root.fork(first.id, name="doomed")
    saved = fill(doomed, 12)
    fork = doomed.fork(saved[9].id, name="fork")
    fork.pin(saved[5].id, name="inherited")
    own = fill(fork, 12)
    fork.pin(own[-1].id, name="own")
    root.pin(saved[7].id, name="beside")
    root.pin(first.id, name="mine")
    fork.prune(keep=2)  # its line does not reach what is erased any more: only its pin does
    if packed:
        drive(store._context.driver, pack_tenant(store._context.known_tenant or 0, 2**61))
    assert store.erase("doomed").checkpoints == 12
    for name, at in itertools.product(("fork", "root"), saved):
        with pytest.raises(NotFound):
            store.thread(name).load(at.id, strict=True)
    assert [pin.name for pin in fork.pins()] == ["own"]
    assert [pin.name for pin in root.pins()] == ["mine"]
    assert steps(fork)[0] == own[-1].step
    assert fork.load(strict=True).state == {**own[-1].state}
    sound(store)


def test_what_was_erased_is_passed_by_everything_else(store: hf.Store, clock: Clock) -> None:
    """Forks behind it, deleting its thread, retention, rollback: as if it had never been there."""
    thread = store.thread("main")
    saved = fill(thread, 10)
    fork = thread.fork(saved[7], name="fork")
    fill(fork, 2, start=50)
    thread.erase(saved[5])
    thread.rollback(saved[3])
    line = seen(store)["fork"]
    assert len(line[0]) == 9
    store.set_retention(ttl=timedelta(days=1))
    clock.days(2)
    fill(fork, 1, start=60)
    store.compact()
    assert set(seen(store)) == {"fork"}
    assert seen(store)["fork"][0][1:] == line[0]
    sound(store)


# --- runs


@hf.step(name="erasing.large")
def large(secret: str) -> bytes:
    return secret.encode() + random.Random(secret).randbytes(BLOB_MIN_BYTES)


@hf.step(name="erasing.small")
def small(secret: str) -> str:
    return secret[::-1]


@hf.durable(name="erasing.agent")
def agent(secret: str, ask: bool) -> str:
    state = hf.state({"secret": ""})
    state["secret"] = secret
    small(secret)
    large(secret)
    if ask:
        hf.ask(secret, options=["yes"])
    return secret


def test_a_run_is_erased_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    secret = text("run", 90)
    secrets = [secret.encode(), secret[::-1].encode()]
    with hf.open(str(path)) as store:
        store.run(agent, secret, True, id="r")
        with pytest.raises(UsageError, match="not finished"):
            store.erase_run("r")
        store.answer("r", "yes")
        store.run(agent, secret, True, id="r").result()
        store.run(agent, "other" * 20, False, id="other").result()
        store.thread("run:r").pin(name="held")
        with pytest.raises(hf.Pinned):
            store.delete_run("r")
        assert found_in(path, secrets) == set(secrets)
        erased = store.erase_run("r")
        assert erased.runs == ("r",)
        assert any("hf.progress" in told for told in erased.may_remain)
        assert found_in(path, secrets) == set()
        with pytest.raises(NotFound):
            store.get_run("r")
        with pytest.raises(NotFound):
            store.erase_run("r")
        assert store.get_run("other").result() == "other" * 20
        sound(store)
        store.run(agent, "again", False, id="r").result()


def test_a_run_with_forks_is_not_erased(store: hf.Store) -> None:
    store.run(agent, "secret", False, id="r").result()
    store.fork("r", at="1", id="fork", keys="new").result()
    with pytest.raises(UsageError, match="'fork'"):
        store.erase_run("r")
    store.erase_run("fork")
    store.erase_run("r")
    assert rows(store)["journal"] == rows(store)["blob"] == 0
    sound(store)


# --- struck and killed


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("what", ["thread", "checkpoint", "run"])
def test_struck_anywhere_a_second_erase_finishes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.setattr(erasing, "_TABLES", ("record", "body"))  # one is vacuumed like the other
    url, hook, clock = place(request, where), Hook(), Clock()
    with opened(url, clock) as plain, opened(url, clock, hook=hook) as struck:
        fill(plain.thread("bob"), 6)
        other = seen(plain)["bob"]

        def prepare() -> str:
            if what == "run":
                if not plain.runs():
                    plain.run(agent, text("run"), False, id="r").result()
                return ""
            for name in ("alice", "copy"):
                if name in seen(plain):
                    plain.delete(name, force=True)
            saved = confide(plain, "alice")
            plain.thread("alice").fork(saved[6], name="copy").save({"fork": 1})
            return saved[5].id

        def operation(checkpoint: str) -> None:
            if what == "run":
                struck.erase_run("r")
            elif what == "checkpoint":
                struck.thread("alice").erase(checkpoint)
            else:
                struck.erase("alice", forks=True)

        def check(checkpoint: str, point: int) -> None:
            sound(plain)
            assert seen(plain)["bob"] == other
            marked = query(plain, "SELECT 1 FROM meta WHERE key LIKE 'scrub %'")
            try:
                operation(checkpoint)
            except NotFound:
                assert not marked  # it was finished; only the answer was lost
            sound(plain)
            assert query(plain, "SELECT 1 FROM meta WHERE key LIKE 'scrub %'") == []
            found = seen(plain)
            assert found["bob"] == other
            if what == "thread":
                assert set(found) == {"bob"}
            elif what == "checkpoint":
                assert [one[0] for one in found["alice"][0]] == [8, 7, 6, 4, 3, 2, 1, 0]
                assert [one[0] for one in found["copy"][0]] == [7, 6, 4, 3, 2, 1, 0]
            else:
                assert "run:r" not in found
                assert rows(plain)["run"] == rows(plain)["journal"] == rows(plain)["blob"] == 0

        assert struck_everywhere(prepare, operation, hook, check) > 10


@pytest.mark.parametrize("what", ["thread", "checkpoint", "run"])
def test_killed_anywhere_and_erased_again_no_byte_is_left(tmp_path: Path, what: str) -> None:
    """A real kill at every point of the driver. Also `compact` finishes what was begun."""
    run_secret, scene = text("run", 90), tmp_path / "scene.db"
    secrets = {
        "thread": secrets_of("alice"),
        "checkpoint": [text("own").encode(), text("own note").encode()],
        "run": [run_secret.encode(), run_secret[::-1].encode()],
    }
    with hf.open(str(scene), durability="normal") as store:
        confide(store, "alice")
        own = store.thread("alice").save({"own": text("own")}, note=text("own note")).id
        store.thread("alice").save({"after": 1})
        store.run(agent, run_secret, False, id="r").result()
    name = "r" if what == "run" else "alice"
    gone = {what, "checkpoint"} if what == "thread" else {what}
    path = tmp_path / "a.db"
    with Nursery("eraser:erase") as nursery:
        shutil.copy(scene, path)
        [points] = nursery.start(str(path), what, name, own, 0).lines()
        assert points > 10
        for point in itertools.takewhile(lambda at: at <= points, striking.points(what)):
            for file in tmp_path.glob("a.db*"):
                file.unlink()
            shutil.copy(scene, path)
            assert list(nursery.start(str(path), what, name, own, point).lines()) == []
            with hf.open(str(path), durability="normal") as store:
                sound(store)
                _erase_again(store, what, name, own, finish=point % 2 == 1)
                sound(store)
            for kind, hidden in secrets.items():
                assert found_in(path, hidden) == (set() if kind in gone else set(hidden)), f"{kind} at {point}"


def _erase_again(store: hf.Store, what: str, name: str, checkpoint: str, *, finish: bool) -> None:
    if finish and query(store, "SELECT 1 FROM meta WHERE key LIKE 'scrub %'"):
        store.compact()
    try:
        if what == "run":
            store.erase_run(name)
        elif what == "checkpoint":
            store.thread(name).erase(checkpoint)
        else:
            store.erase(name)
    except NotFound:
        pass  # it had been finished


# --- others at work


@pytest.mark.parametrize("where", PLACES)
def test_readers_and_writers_go_on_beside_it(request: pytest.FixtureRequest, where: str) -> None:
    with hf.open(place(request, where), durability="normal") as store:
        fill(store.thread("bob"), 5)
        stop, problems, count = threading.Event(), [], [5]

        def work(read: bool) -> None:
            thread = store.thread("bob")
            try:
                while not stop.is_set():
                    if read:
                        assert store.thread("bob").load(strict=True).state["n"] <= count[0]
                    else:
                        thread.save({"n": count[0], "log": ["x"] * (count[0] % 30)})
                        count[0] += 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(read,)) for read in (True, False)]
        for thread in threads:
            thread.start()
        for number in range(5):
            saved = confide(store, f"alice {number}")
            store.thread(f"alice {number}").erase(saved[4])
            store.erase(f"alice {number}")
        stop.set()
        for thread in threads:
            thread.join()
        assert problems == []
        assert set(seen(store)) == {"bob"}
        assert len(seen(store)["bob"][0]) == count[0]
        sound(store)


def test_a_reader_that_holds_the_log_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be cut off yet is named, and the next compaction does it."""
    import apsw

    from holdfast.storage import sqlite_write

    monkeypatch.setattr(sqlite_write, "_SCRUB_WAIT_MS", 1)
    monkeypatch.setattr(erasing, "_TRIES", 1)
    path = tmp_path / "a.db"
    with hf.open(str(path)) as store:
        confide(store, "alice")
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM record").fetchall()
        erased = store.erase("alice")
        assert any("-wal" in told for told in erased.may_remain)
        assert found_in(path, secrets_of("alice")) != set()
        reader.close()
        store.compact()
        assert found_in(path, secrets_of("alice")) == set()


# --- PostgreSQL's files


def test_full_leaves_nothing_in_postgresqls_files(postgres_server: PostgresServer, postgres_url: str) -> None:
    secrets = secrets_of("alice")

    def in_files() -> set[bytes]:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
            row = connection.execute(
                "SELECT oid, current_setting('data_directory') FROM pg_database WHERE datname = current_database()"
            ).fetchone()
        assert row is not None
        data = [file.read_bytes() for file in Path(row[1], "base", str(row[0])).glob("[0-9]*")]
        return {secret for secret in secrets if any(secret in part for part in data)}

    with hf.open(postgres_url) as store:
        confide(store, "alice")
        fill(store.thread("bob"), 3)
        assert in_files() == set(secrets)
        assert any("full=True" in told for told in store.thread("alice").erase(store.thread("alice").load()).may_remain)
        erased = store.erase("alice", full=True)
        assert in_files() == set()
        assert not any("full=True" in told for told in erased.may_remain)
        assert any("write-ahead log" in told for told in erased.may_remain)
        sound(store)


@pytest.mark.parametrize("kind", ["app", "tenant"])
def test_a_role_that_may_not_vacuum_says_so(postgres_url: str, kind: str) -> None:
    with hf.open(postgres_url) as store:
        confide(store, "alice")
    for roles in roles_of(postgres_url):
        with hf.open(roles.app if kind == "app" else roles.tenant("default"), create=False) as store:
            store.thread("bob").save({"n": 1})
            store.set_retention(ttl=timedelta(days=3), keep_last=1)
            erased = store.erase("alice")
            assert any("may not vacuum" in told and "record" in told for told in erased.may_remain)
            assert set(seen(store)) == {"bob"}
            assert store.compact().threads == 0


def test_an_operator_vacuums_what_it_has_erased(postgres_url: str) -> None:
    with hf.open(postgres_url) as store:
        confide(store, "alice")
    for roles in roles_of(postgres_url):
        with roles.connect(roles.owner) as connection:
            may = connection.info.server_version >= 170000
        with hf.open(roles.operator, create=False) as store:
            told = store.erase("alice").may_remain
            assert any("may not vacuum" in each for each in told) != may
            assert not any("could not be vacuumed" in each for each in told)
