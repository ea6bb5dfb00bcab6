"""Erasing: every byte goes, the chain still verifies, pins do not hold it, and the answer says what may remain."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from erasing_kit import agent, confide, found_in, secrets_of
from keeping_kit import (
    PLACES,
    Clock,
    fill,
    hashes,
    opened,
    place,
    query,
    rows,
    seen,
    sound,
    steps,
    text,
)

import perdure
from perdure.errors import NotFound, UsageError
from perdure.log.ids import parse_id
from perdure.storage.program import Batch, Program, Sql, drive, write


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[perdure.Store]:
    with opened(place(request, request.param), clock) as made:
        yield made


# --- a thread


def test_a_thread_is_gone_and_late_writes_are_refused(store: perdure.Store) -> None:
    confide(store, "alice")
    fill(store.thread("bob"), 5)
    before = seen(store)["bob"]
    late = store.thread("alice")
    late.load()
    erased = store.ops.erase("alice")
    assert (erased.checkpoints, erased.threads, erased.runs) == (9, ("alice",), ())
    assert erased.may_remain
    assert seen(store) == {"bob": before}
    with pytest.raises(perdure.errors.ThreadDeleted):
        late.save({"late": 1})
    with pytest.raises(NotFound):
        store.ops.erase("alice")
    assert query(store, "SELECT record, records FROM erased") == [(0, 9)]
    assert rows(store)["pin"] == 0
    kept = [value for row in query(store, "SELECT * FROM erased") for value in row]
    assert not any(name in value for value in kept if isinstance(value, str) for name in ("alice", "bob"))
    assert all(len(value) == 32 for value in kept if isinstance(value, bytes))  # a hash
    sound(store)
    store.thread("alice").save({"anew": 1})


def test_no_byte_is_left_in_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    kept = secrets_of("bob")
    with perdure.open(str(path)) as store:
        confide(store, "alice")
        confide(store, "bob")
        assert found_in(path, secrets_of("alice")) == set(secrets_of("alice"))
        erased = store.ops.erase("alice")
        assert found_in(path, secrets_of("alice")) == set()
        assert not any("-wal" in told for told in erased.may_remain)
    assert found_in(path, secrets_of("alice")) == set()
    assert found_in(path, kept) == set(kept)


def test_what_the_process_remembers_goes_too(store: perdure.Store) -> None:
    thread = store.thread("alice")
    fill(thread, 3)
    other = store.thread("bob")
    fill(other, 3)
    cache = store._context.cache
    assert len(cache._known) == 2
    store.ops.erase("alice")
    assert len(cache._known) == 1
    fill(other, 1, start=3)


def test_a_checkpoint_in_the_middle_of_a_chain_is_erased(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.db", Clock()
    with opened(str(path), clock) as store:
        thread = store.thread("alice")
        saved = [thread.save({"n": n, "own": text(n, 300), "log": ["x"] * n}) for n in range(40)]
        thread.erase(saved[20])
        sound(store)
        assert steps(thread) == [n for n in reversed(range(40)) if n != 20]
        assert [one.state["own"] for one in thread.history()] == [text(n, 300) for n in reversed(range(40)) if n != 20]
        store.ops.erase("alice")
        assert rows(store)["body"] == 0
    assert found_in(path, [text(n, 300).encode() for n in range(40)]) == set()


def test_forks_are_listed_and_go_only_if_that_is_said(store: perdure.Store) -> None:
    saved = confide(store, "alice")
    store.thread("alice").fork(saved[3], name="copy").save({"mine": 1})
    store.thread("copy").fork(name="copy of copy")
    before = seen(store)
    with pytest.raises(UsageError, match="'copy', 'copy of copy'"):
        store.ops.erase("alice")
    assert seen(store) == before
    erased = store.ops.erase("alice", forks=True)
    assert set(erased.threads) == {"alice", "copy", "copy of copy"}
    assert erased.checkpoints == 10
    assert seen(store) == {}
    assert rows(store)["record"] == 0


def test_a_fork_is_erased_and_its_origin_stays(store: perdure.Store) -> None:
    saved = confide(store, "alice")
    before = seen(store)["alice"]
    fork = store.thread("alice").fork(saved[3], name="copy")
    fork.save({"mine": 1})
    fork.fork(name="deeper").save({"deeper": 1})
    with pytest.raises(UsageError, match="'deeper'"):
        store.ops.erase("copy")
    erased = store.ops.erase("copy", forks=True)
    assert erased.checkpoints == 2
    assert any("'alice'" in told for told in erased.may_remain)
    assert seen(store) == {"alice": before}
    sound(store)


def test_the_answer_names_copies(store: perdure.Store) -> None:
    confide(store, "alice")

    def add() -> Program[None]:
        yield Batch(
            Sql(
                """INSERT INTO copy (id, kind, place, tenant, at, bytes)
                VALUES ('x', 'backup', '/backups/monday.db', NULL, 1700000000000000, 1),
                ('y', 'export', '/tmp/alice.db', :tenant, 1700000000000000, 1),
                ('z', 'export', '/tmp/others.db', :tenant + 1, 1700000000000000, 1)"""
            )(tenant=store._context.known_tenant)
        )

    drive(store._context.driver, write(add))
    told = " ".join(store.ops.erase("alice").may_remain)
    assert "a backup made 2023-11-14 22:13 UTC: /backups/monday.db" in told
    assert "/tmp/alice.db" in told
    assert "/tmp/others.db" not in told


async def test_the_async_twins(store: perdure.Store) -> None:
    saved = confide(store, "alice")
    assert (await store.thread("alice").aerase(saved[4])).checkpoints == 1
    assert (await asyncio.to_thread(store.ops.erase, "alice")).checkpoints == 8


# --- one checkpoint


def test_one_checkpoint_goes_and_the_history_goes_on_behind_it(store: perdure.Store) -> None:
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
    with perdure.open(str(path)) as store:
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


def test_erasing_the_head_goes_back_to_what_was_before_it(store: perdure.Store) -> None:
    thread = store.thread("alice")
    saved = fill(thread, 3)
    fork = thread.fork(name="fork")
    late = store.thread("alice")
    late.load()
    thread.erase(saved[2])
    assert (steps(thread), steps(fork)) == ([1, 0], [1, 0])
    head = thread.get_head()
    assert head is not None
    assert head.id == saved[1].id
    with pytest.raises(NotFound):
        late.save({"on": "what is gone"})
    store.thread("alice").save({"goes": "on"})
    sound(store)
    thread = store.thread("alone")
    only = thread.save({"only": 1})
    thread.erase(only)
    assert store.thread("alone").get_head() is None or steps(store.thread("alone")) == []
    sound(store)


def test_a_checkpoint_of_another_thread_is_not_found(store: perdure.Store) -> None:
    saved = fill(store.thread("alice"), 3)
    fill(store.thread("bob"), 3)
    with pytest.raises(NotFound):
        store.thread("bob").erase(saved[1])
    with pytest.raises(NotFound):
        store.thread("alice").erase("0000000000001")
    with pytest.raises(UsageError):
        store.thread("alice").erase(None)  # type: ignore[arg-type]


def test_it_beats_pins(store: perdure.Store) -> None:
    thread = store.thread("alice")
    saved = fill(thread, 5)
    thread.pin(saved[2], name="p")
    thread.pin(saved[3], name="q")
    thread.erase(saved[2])
    assert [pin.name for pin in thread.pins()] == ["q"]
    assert steps(thread) == [4, 3, 1, 0]


def pin_beside(store: perdure.Store, name: str, checkpoint: perdure.Checkpoint) -> None:
    """A pin on a checkpoint that the thread does not have, as versions before this one let anybody make."""

    def add() -> Program[None]:
        yield Batch(
            Sql(
                """INSERT INTO pin (tenant, thread, name, tree, record, at)
                SELECT tenant, thread, 'beside', tree, :record, 1 FROM thread WHERE tenant = :tenant AND name = :name"""
            )(tenant=store._context.known_tenant, name=name, record=parse_id(checkpoint.id))
        )

    drive(store._context.driver, write(add))


def test_a_pin_of_another_thread_does_not_hold_it_either(store: perdure.Store) -> None:
    root = store.thread("root")
    first = root.save({"root": 1})
    doomed = root.fork(first.id, name="doomed")
    saved = fill(doomed, 12)
    fork = doomed.fork(saved[9].id, name="fork")
    fork.pin(saved[5].id, name="inherited")
    own = fill(fork, 12)
    fork.pin(own[-1].id, name="own")
    pin_beside(store, "root", saved[7])
    root.pin(first.id, name="mine")
    fork.prune(keep=2)  # its line does not reach what is erased any more: only its pin does
    assert store.ops.erase("doomed").checkpoints == 12
    for name, at in itertools.product(("fork", "root"), saved):
        with pytest.raises(NotFound):
            store.thread(name).load(at.id, strict=True)
    assert [pin.name for pin in fork.pins()] == ["own"]
    assert [pin.name for pin in root.pins()] == ["mine"]
    assert steps(fork)[0] == own[-1].step
    assert fork.load(strict=True).state == {**own[-1].state}
    sound(store)


def test_what_was_erased_is_passed_by_everything_else(store: perdure.Store, clock: Clock) -> None:
    """Forks behind it, deleting its thread, retention, rollback: as if it had never been there."""
    thread = store.thread("main")
    saved = fill(thread, 10)
    fork = thread.fork(saved[7], name="fork")
    fill(fork, 2, start=50)
    thread.erase(saved[5])
    thread.rollback(saved[3])
    line = seen(store)["fork"]
    assert len(line[0]) == 9
    store.ops.retention(threads=timedelta(days=1))
    clock.days(2)
    fill(fork, 1, start=60)
    store.ops.compact()
    assert set(seen(store)) == {"fork"}
    assert seen(store)["fork"][0][1:] == line[0]
    sound(store)


# --- runs


def test_a_run_is_erased_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    secret = text("run", 90)
    secrets = [secret.encode(), secret[::-1].encode()]
    with perdure.open(str(path)) as store:
        store.run(agent, secret, True, id="r")
        with pytest.raises(UsageError, match="not finished"):
            store.ops.erase_run("r")
        store.answer("r", "yes")
        store.run(agent, secret, True, id="r").result()
        store.run(agent, "other" * 20, False, id="other").result()
        store.thread("run:r").pin(name="held")
        with pytest.raises(perdure.errors.Pinned):
            store.delete_run("r")
        assert found_in(path, secrets) == set(secrets)
        erased = store.ops.erase_run("r")
        assert erased.runs == ("r",)
        assert any("perdure.progress" in told for told in erased.may_remain)
        assert found_in(path, secrets) == set()
        with pytest.raises(NotFound):
            store.get_run("r")
        with pytest.raises(NotFound):
            store.ops.erase_run("r")
        assert store.get_run("other").result() == "other" * 20
        sound(store)
        store.run(agent, "again", False, id="r").result()


def test_a_run_with_forks_is_not_erased(store: perdure.Store) -> None:
    store.run(agent, "secret", False, id="r").result()
    store.fork("r", at="1", id="fork", keys="new").result()
    with pytest.raises(UsageError, match="'fork'"):
        store.ops.erase_run("r")
    store.ops.erase_run("fork")
    store.ops.erase_run("r")
    assert rows(store)["journal"] == rows(store)["blob"] == 0
    sound(store)
