"""Erasing that is struck or killed at any point, while others work; and PostgreSQL's files afterwards."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import eraser
import psycopg
import pytest
import striking
from erasing_kit import agent, confide, found_in, secrets_of
from keeping_kit import (
    PLACES,
    Clock,
    Hook,
    fill,
    opened,
    place,
    query,
    rows,
    seen,
    sound,
    struck_everywhere,
    text,
)
from role_kit import roles_of

import perdure
from perdure.errors import NotFound
from perdure.log import erase
from perdure.storage.domains import versioned_tables
from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ForkServer

__all__ = ["eraser"]


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[perdure.Store]:
    with opened(place(request, request.param), clock) as made:
        yield made


# --- struck and killed


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("what", ["thread", "checkpoint", "run"])
def test_struck_anywhere_a_second_erase_finishes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    few = {name: table for name, table in versioned_tables().items() if name in ("record", "body")}
    monkeypatch.setattr(erase, "versioned_tables", lambda: few)  # one is vacuumed like the other
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
                    plain.delete_thread(name, force=True)
            saved = confide(plain, "alice")
            plain.thread("alice").fork(saved[6], name="copy").save({"fork": 1})
            return saved[5].id

        def operation(checkpoint: str) -> None:
            if what == "run":
                struck.ops.erase_run("r")
            elif what == "checkpoint":
                struck.thread("alice").erase(checkpoint)
            else:
                struck.ops.erase("alice", forks=True)

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


@pytest.mark.parametrize("what", ["thread", "checkpoint", "run", "memory"])
def test_killed_anywhere_and_erased_again_no_byte_is_left(tmp_path: Path, what: str) -> None:
    """A real kill at every point of the driver. Also `compact` finishes what was begun."""
    run_secret, scene = text("run", 90), tmp_path / "scene.db"
    secrets = {
        "thread": secrets_of("alice"),
        "checkpoint": [text("own").encode(), text("own note").encode()],
        "run": [run_secret.encode(), run_secret[::-1].encode()],
        "memory": [text("item").encode(), text("item key").encode(), text("label").encode()],
    }
    with perdure.open(str(scene), durability="normal") as store:
        confide(store, "alice")
        own = store.thread("alice").save({"own": text("own")}, note=text("own note")).id
        store.thread("alice").save({"after": 1})
        store.run(agent, run_secret, False, id="r").result()
        for n in range(3):
            store.memory("users", "alice", text("label")).put(text("item key"), {"fact": text("item"), "n": n})
        if what == "memory":
            store.snapshot("kept")
            store.memory("users", "alice", text("label")).put(text("item key"), "late")
    name = "r" if what == "run" else "alice"
    gone = {what, "checkpoint"} if what == "thread" else {what}
    path = tmp_path / "a.db"
    with ForkServer("eraser:erase") as fork_server:
        shutil.copy(scene, path)
        [points] = fork_server.start(str(path), what, name, own, 0).lines()
        assert points > 10
        for point in itertools.takewhile(lambda at: at <= points, striking.points(what)):
            for file in tmp_path.glob("a.db*"):
                file.unlink()
            shutil.copy(scene, path)
            assert list(fork_server.start(str(path), what, name, own, point).lines()) == []
            with perdure.open(str(path), durability="normal") as store:
                sound(store)
                _erase_again(store, what, name, own, finish=point % 2 == 1)
                sound(store)
            for kind, hidden in secrets.items():
                assert found_in(path, hidden) == (set() if kind in gone else set(hidden)), f"{kind} at {point}"


def _erase_again(store: perdure.Store, what: str, name: str, checkpoint: str, *, finish: bool) -> None:
    if finish and query(store, "SELECT 1 FROM meta WHERE key LIKE 'scrub %'"):
        store.ops.compact()
    try:
        if what == "run":
            store.ops.erase_run(name)
        elif what == "checkpoint":
            store.thread(name).erase(checkpoint)
        elif what == "memory":
            store.memory("users", name).erase_all()
        else:
            store.ops.erase(name)
    except NotFound:
        pass  # it had been finished


# --- others at work


@pytest.mark.parametrize("where", PLACES)
def test_readers_and_writers_go_on_beside_it(request: pytest.FixtureRequest, where: str) -> None:
    with perdure.open(place(request, where), durability="normal") as store:
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
        for number in range(2):
            saved = confide(store, f"alice {number}")
            store.thread(f"alice {number}").erase(saved[4])
            store.ops.erase(f"alice {number}")
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

    from perdure.storage.sqlite import writer as sqlite_write

    monkeypatch.setattr(sqlite_write, "_SCRUB_WAIT_MS", 1)
    monkeypatch.setattr(erase, "_TRIES", 1)
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        confide(store, "alice")
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM record").fetchall()
        erased = store.ops.erase("alice")
        assert any("-wal" in told for told in erased.may_remain)
        assert found_in(path, secrets_of("alice")) != set()
        reader.close()
        store.ops.compact()
        assert found_in(path, secrets_of("alice")) == set()


# --- PostgreSQL's files


def test_full_leaves_nothing_in_postgresqls_files(postgres_server: PostgresServer, postgres_url: str) -> None:
    memories = [text("item").encode(), text("label").encode()]
    secrets = [*secrets_of("alice"), *memories]

    def in_files() -> set[bytes]:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
            row = connection.execute(
                "SELECT oid, current_setting('data_directory') FROM pg_database WHERE datname = current_database()"
            ).fetchone()
        assert row is not None
        data = [file.read_bytes() for file in Path(row[1], "base", str(row[0])).glob("[0-9]*")]
        return {secret for secret in secrets if any(secret in part for part in data)}

    with perdure.open(postgres_url) as store:
        confide(store, "alice")
        fill(store.thread("bob"), 3)
        store.memory("users", text("label")).put("k", {"fact": text("item")})
        assert in_files() == set(secrets)
        store.memory().erase_label(text("label"), full=True)
        assert in_files() == set(secrets) - set(memories)
        assert any("full=True" in told for told in store.thread("alice").erase(store.thread("alice").load()).may_remain)
        erased = store.ops.erase("alice", full=True)
        assert in_files() == set()
        assert not any("full=True" in told for told in erased.may_remain)
        assert any("write-ahead log" in told for told in erased.may_remain)
        sound(store)


@pytest.mark.parametrize("kind", ["app", "tenant"])
def test_a_role_that_may_not_vacuum_says_so(postgres_url: str, kind: str) -> None:
    with perdure.open(postgres_url) as store:
        confide(store, "alice")
    for roles in roles_of(postgres_url):
        with perdure.open(roles.app if kind == "app" else roles.tenant("default"), create=False) as store:
            store.thread("bob").save({"n": 1})
            store.ops.retention(threads=timedelta(days=3), checkpoints=1)
            erased = store.ops.erase("alice")
            assert any("may not vacuum" in told and "record" in told for told in erased.may_remain)
            assert set(seen(store)) == {"bob"}
            assert store.ops.compact().threads == 0


def test_an_operator_vacuums_what_it_has_erased(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        confide(store, "alice")
    for roles in roles_of(postgres_url):
        with roles.connect(roles.owner) as connection:
            may = connection.info.server_version >= 170000
        with perdure.open(roles.operator, create=False) as store:
            told = store.ops.erase("alice").may_remain
            assert any("may not vacuum" in each for each in told) != may
            assert not any("could not be vacuumed" in each for each in told)


def test_the_planners_samples_are_erased_too(postgres_url: str) -> None:
    """PostgreSQL keeps samples of columns, in the clear, long after the rows are gone."""
    samples = """SELECT tablename, attname FROM pg_stats WHERE schemaname = 'perdure' AND
        (most_common_vals::text ~ 'a very secret note' OR histogram_bounds::text ~ 'a very secret note')"""
    with perdure.open(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as connection:
        for number in range(30):
            store.thread("alice").save({"n": number}, note=f"a very secret note {number}")
        store.thread("bob").save({}, note="another")
        connection.execute("ANALYZE perdure.record")
        assert connection.execute(samples).fetchall() == [("record", "note")]
        erased = store.ops.erase("alice")
        assert connection.execute(samples).fetchall() == []
        assert any("pg_statistic" in told for told in erased.may_remain)  # PostgreSQL keeps those of an empty table
