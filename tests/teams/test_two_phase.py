"""Two-phase commit: whatever is killed and when, all stores agree, and nothing prepared is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import psycopg
import pytest
from doctor_kit import raw
from soak import spread
from striking import die_at

import perdure
from perdure import Busy, Damaged, NotFound, UsageError
from perdure.cli import main
from perdure.errors import PerdureError
from perdure.memory import GCounter
from perdure.storage import prepared
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.teams import commit
from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ForkServer

LOADED = (
    perdure.Store,
    perdure.open,
    PostgresDriver,
    SqliteDriver,
)  # once, in the process that children are forked from
PAIRS = ["sqlite-sqlite", "sqlite-postgres", "postgres-postgres"]
Places = tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    """The URLs and options of two stores."""
    kinds = request.param.split("-")
    url = request.getfixturevalue("postgres_url") if "postgres" in kinds else ""
    return tuple(  # type: ignore[return-value]
        (str(tmp_path / f"{n}.db"), {}) if kind == "sqlite" else (url, {"schema": f"store{n}"})
        for n, kind in enumerate(kinds)
    )


@pytest.fixture
def pair(places: Places) -> Iterator[tuple[perdure.Store, perdure.Store]]:
    (first, some), (second, others) = places
    with perdure.open(first, **some) as one, perdure.open(second, **others) as other:
        yield one, other


def saved(thread: perdure.Thread) -> int:
    try:
        return int(thread.load().state["coins"])
    except NotFound:
        return 0


def coins(store: perdure.Store) -> tuple[int, int]:
    """What memory and a thread say."""
    item = store.memory("bank").get("coins")
    return 0 if item is None else item.value.value, saved(store.thread("bank"))


def pay(stores: tuple[perdure.Store, ...], amount: int = 1) -> None:
    for store in stores:
        store.memory("bank").put("coins", GCounter().add(amount))
        thread = store.thread("bank")
        thread.save({"coins": saved(thread) + amount})


def wait_and_pay(stores: tuple[perdure.Store, ...]) -> None:
    Event().wait(0.05)
    pay(stores)


def is_clean(*stores: perdure.Store) -> bool:
    """Whether nothing is prepared."""
    return not any(prepared.all_prepared(store._context.driver.capabilities.base) for store in stores)


def left_on_server(places: Places) -> int:
    urls = {url for url, _ in places if url.startswith("postgres")}
    left = 0
    for url in urls:
        with psycopg.connect(url) as connection:
            found = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
            left += len(found.fetchall())
    return left


def later(monkeypatch: pytest.MonkeyPatch, seconds: int = 100) -> None:
    """Let deadlines pass."""
    monkeypatch.setattr(prepared, "clock_us", lambda: time.time_ns() // 1000 + seconds * 1_000_000)


@pytest.mark.parametrize("places", PAIRS, indirect=True)
def test_all_is_written_or_nothing(pair: tuple[perdure.Store, perdure.Store], places: Places) -> None:
    with perdure.two_phase(*pair) as stores:
        pay(stores)
        assert [coins(store) for store in stores] == [(1, 1), (1, 1)]
        with pytest.raises(perdure.Conflict):  # a part that fails is undone alone
            stores[0].memory("bank").put("coins", GCounter(), expect=7)
    with suppress(ZeroDivisionError), perdure.two_phase(*pair) as stores:
        pay(stores)
        raise ZeroDivisionError
    pay(pair)  # caches know nothing of what was undone
    with perdure.two_phase(*reversed(pair)) as stores:
        pay(stores)
    assert [coins(store) for store in pair] == [(3, 3), (3, 3)]
    assert is_clean(*pair)
    assert left_on_server(places) == 0
    assert all(store.ops.verify().ok for store in pair)


def transfer(say: Any, places: Places, at: int | None, counts: bool = False) -> None:
    """Pay in two stores; killed at the n-th step of their transactions."""
    (first, some), (second, others) = places
    points: list[str] = []
    with perdure.open(first, **some) as one, perdure.open(second, **others) as other:
        strike = points.append if counts else die_at(at)
        for store in (one, other):
            base: Any = store._context.driver.capabilities.base
            base._hook = strike
            if base.dialect == "sqlite":
                base._writer._hook = strike
        with perdure.two_phase(one, other) as stores:
            pay(stores)
    say(len(points))


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("test_two_phase:transfer") as started:
        yield started


@pytest.mark.parametrize("places", PAIRS, indirect=True)
def test_killed_at_any_point_all_stores_agree(
    places: Places, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [points] = fork_server.start(places, None, True).lines()
    assert points > 30
    chosen = spread(range(1, points + 1), 8)
    paid = {1}
    for at in chosen:
        said = list(fork_server.start(places, at).lines())
        with monkeypatch.context() as patched:
            later(patched)
            (first, some), (second, others) = places
            with perdure.open(first, **some) as one, perdure.open(second, **others) as other:
                commit.settle(one, other)
                for store in (one, other):  # nobody is blocked
                    store.thread("other").save({"at": at})
                assert is_clean(one, other), at
                assert left_on_server(places) == 0, at
                mine, in_thread = coins(one)
                assert (mine, in_thread) == coins(other), at
                assert mine == in_thread in (max(paid), max(paid) + 1), at
                assert not said or mine == max(paid) + 1
                paid.add(mine)
    assert len(paid) > 2  # some were committed, and not all
    assert len(paid) < len(chosen)


@pytest.mark.parametrize("places", ["sqlite-sqlite", "postgres-postgres"], indirect=True)
def test_a_snapshot_between_prepare_and_commit_waits_and_shows_all_of_it(
    pair: tuple[perdure.Store, perdure.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    pay(pair)
    before = [store.snapshot("before") for store in pair]
    taken: dict[str, tuple[int, int]] = {}
    finish, begun = prepared.finish, Event()

    def take() -> None:
        begun.set()
        taken["then"] = coins(other.snapshot("between").store)

    def pause_and_finish(*args: Any) -> None:
        thread.start()
        begun.wait()
        thread.join(0.2)
        assert taken == {}  # it waits: it would show one store before and the other after
        finish(*args)

    thread = Thread(target=take)
    monkeypatch.setattr(prepared, "finish", pause_and_finish)
    with perdure.two_phase(one, other) as stores:
        pay(stores)
    thread.join()
    assert taken == {"then": (2, 2)}
    assert [coins(snap.store) for snap in before] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("places", ["postgres-postgres"], indirect=True)
def test_a_waiter_that_loses_its_patience_decides_and_the_coordinator_obeys(
    pair: tuple[perdure.Store, perdure.Store], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    decide = prepared.add_commit

    def too_late(*args: Any) -> Any:
        with monkeypatch.context() as patched:
            later(patched)
            assert commit.settle(one, other) == 1
        return decide(*args)

    monkeypatch.setattr(prepared, "add_commit", too_late)
    with pytest.raises(Busy, match="another process has undone it"), perdure.two_phase(one, other) as stores:
        pay(stores)
    assert [coins(store) for store in pair] == [(0, 0), (0, 0)]
    assert left_on_server(places) == 0


def test_what_is_prepared_is_never_sql_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = msgspec.msgpack.encode
    with perdure.open(tmp_path / "a.db") as one, perdure.open(tmp_path / "b.db") as other:
        store = prepared.store_id(one._context.driver)
        assert prepared._statement(b"", imports=True) is None
        known = next(iter(prepared._known))
        hostile: list[bytes] = [
            b"DROP TABLE thread",
            b"",
            encode([(b"DELETE FROM thread", {})]),
            encode([("DELETE FROM thread", {})]),
            encode([(known, {"tenant": {"sql": "1"}})]),
            encode([(bytes(16), {})]),
        ]
        other.thread("t").save({"kept": True})
        for number, redo in enumerate(hostile):
            gid = f"{number:032x}"
            raw(one, f"INSERT INTO decision VALUES ('{gid}', 'commit', 0)")
            prepared.run(
                other._context.driver,
                lambda gid=gid, redo=redo: prepared.add_prepared(
                    gid, prepared.decider_text(store, one._context.driver), redo, 0
                ),
            )
            with pytest.raises(Damaged, match="settle --drop"):
                other.thread("t").save({"kept": False})
            assert prepared.drop_all(other._context.driver) == 1
            raw(one, "DELETE FROM decision")
        elsewhere = ('["x", "postgresql://attacker/db"]', '["x", "/etc/passwd"]')
        for decider in ("", "[]", '["x", 1]', f'["{store}"]', *elsewhere):
            prepared.run(
                other._context.driver, lambda decider=decider: prepared.add_prepared("0" * 32, decider, b"", 0)
            )
            with pytest.raises((Damaged, Busy)):
                other.thread("t").save({"kept": False})
            assert prepared.drop_all(other._context.driver) == 1
        state = other.thread("t").load()
        assert state is not None
        assert state.state == {"kept": True}
        assert other.ops.verify().ok


def test_an_encrypted_store_prepares_nothing_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bytes] = []
    redo_of = prepared.redo_of

    def recorded(statements: Any) -> bytes:
        stored.append(redo_of(statements))
        return stored[-1]

    monkeypatch.setattr(prepared, "redo_of", recorded)
    with perdure.open(tmp_path / "a.db") as one, perdure.open(tmp_path / "b.db", keys=bytes(32)) as other:
        with perdure.two_phase(one, other) as stores:
            for store in stores:
                store.memory("m").put("k", {"fact": "a secret of Alice"})
                store.thread("t").save({"fact": "a secret of Alice"})
        item, saved = other.memory("m").get("k"), other.thread("t").load()
        assert item is not None
        assert saved is not None
        assert item.value == saved.state == {"fact": "a secret of Alice"}
        assert len(stored) == 1
        assert b"secret" not in stored[0]
        assert other.ops.verify().ok


@perdure.durable(name="two_phase.greets")
def greets(name: str) -> str:
    return f"hello {name}"


@pytest.mark.parametrize("places", ["postgres-postgres", "sqlite-sqlite"], indirect=True)
async def test_runs_start_in_both_stores_also_awaited(pair: tuple[perdure.Store, perdure.Store]) -> None:
    async with perdure.two_phase(*pair) as stores:
        for store in stores:
            await store.astart(greets, "ann", id="one")
    for store in pair:
        worker = perdure.Worker(store, functions=[greets])
        await asyncio.to_thread(worker.run, until_idle=True)
        run = await store.aget_run("one")
        assert await run.aresult() == "hello ann"


def test_calls_that_cannot_be_right_are_refused(tmp_path: Path, postgres_url: str) -> None:
    with perdure.open(tmp_path / "a.db") as one, perdure.open(tmp_path / "b.db") as other:
        alone: list[list[perdure.Store]] = [[one], [one, one], [one, one.tenant("x")]]
        for too_few in alone:
            with pytest.raises(UsageError, match="two or more stores"), perdure.two_phase(*too_few):
                pass
        with pytest.raises(UsageError, match="timeout_s"):
            perdure.two_phase(one, other, timeout_s=0)
        with pytest.raises(UsageError, match="cannot be part"), perdure.two_phase(one, other) as (a, _):
            a.snapshot("x").store.memory("m").get("k")
        late = perdure.two_phase(one, other, timeout_s=0.01)
        with pytest.raises(Busy, match="longer than its timeout_s"), late as stores:
            wait_and_pay(stores)
        assert coins(one) == (0, 0)

        @perdure.durable(name="two_phase.in_a_run")
        def in_a_run() -> None:
            with perdure.two_phase(one, other):
                pass

        with pytest.raises(PerdureError, match=r"perdure\.step"):
            one.run(in_a_run, id="r").result()


def test_a_server_without_prepared_transactions_is_named(tmp_path: Path) -> None:
    with PostgresServer(fsync=False, max_prepared=0, max_connections=20) as server:
        url = server.url()
        with perdure.open(url) as one, perdure.open(url, schema="second") as other:
            with pytest.raises(UsageError, match="max_prepared_transactions = 20"), perdure.two_phase(one, other):
                pass
            assert [found.level for found in one.ops.doctor() if found.check == "prepared"] == ["note"]
            with perdure.open(tmp_path / "a.db") as sqlite:
                with perdure.two_phase(sqlite, one) as stores:
                    pay(stores)  # one server needs none: it decides
                assert coins(one) == coins(sqlite) == (1, 1)


@pytest.mark.parametrize("places", ["sqlite-sqlite", "postgres-postgres"], indirect=True)
@pytest.mark.parametrize("is_committed", [True, False])
def test_an_interruption_at_the_decision_follows_what_was_decided(
    pair: tuple[perdure.Store, perdure.Store], places: Places, is_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = commit._OpenTransaction.end

    def interrupted(self: Any) -> None:
        if not self.is_prepared and self.driver is pair[0]._context.driver:
            if is_committed:
                end(self)
            else:
                self.cancel()
            raise KeyboardInterrupt
        end(self)

    monkeypatch.setattr(commit._OpenTransaction, "end", interrupted)
    with suppress(KeyboardInterrupt), perdure.two_phase(*pair) as stores:
        pay(stores)
    assert [coins(store) for store in pair] == [(is_committed, is_committed)] * 2
    assert is_clean(*pair)
    assert left_on_server(places) == 0


@pytest.mark.parametrize("places", ["postgres-postgres"], indirect=True)
def test_what_a_dead_process_left_is_named_until_it_is_settled(
    pair: tuple[perdure.Store, perdure.Store], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    for store in pair:
        store.snapshot("first")
    with monkeypatch.context() as patched:
        patched.setattr(commit.TwoPhase, "_finish", lambda _: None)  # as if it were killed there
        with perdure.two_phase(*pair) as stores:
            pay(stores)
    [row] = prepared.all_prepared(other._context.driver)
    ticks = count(step=6)
    monkeypatch.setattr(other._context, "ticks", lambda: next(ticks))  # its patience ends soon
    with pytest.raises(Busy, match=f"{row.gid}.*store settle"):
        other.snapshot("second")
    assert coins(one) == (1, 1)
    assert coins(other) == (0, 0)
    later(monkeypatch)
    with perdure.open(places[1][0], **places[1][1]):  # whoever opens it ends it
        assert coins(other) == (1, 1)
    other.snapshot("second")
    assert left_on_server(places) == 0
    assert [found.level for found in other.ops.doctor() if found.check == "prepared"] == ["ok"]


def test_the_command_settles_or_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    paths = [str(tmp_path / name) for name in ("a.db", "b.db")]
    for expected, options in (((1, 1), []), ((1, 1), ["--drop", "--yes"])):
        with perdure.open(paths[0]) as one, perdure.open(paths[1]) as other, monkeypatch.context() as patched:
            patched.setattr(commit.TwoPhase, "_finish", lambda _: None)
            with perdure.two_phase(one, other) as stores:
                pay(stores)
        with monkeypatch.context() as patched:
            if not options:
                later(patched)
                patched.setattr("perdure.ops.store.settle_quietly", lambda _: None)
            assert main(["store", "settle", *paths, *options]) == 0
        assert capsys.readouterr().out == "1 transaction ended\n"
        with perdure.open(paths[1]) as other:
            assert coins(other) == expected
