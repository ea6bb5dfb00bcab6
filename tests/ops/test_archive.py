"""A thread or a finished run goes into an archive and comes back as it was. At every moment it is in the store or in
the archive, whole: also after a kill at any statement, and the same call finishes."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from backup_kit import add
from copy_kit import everything, make_thread, query
from soak import SOAK
from workshop import until

import perdure
from perdure import Archived, Conflict, Store, UsageError
from perdure.storage.program import Program
from perdure.testing.processes import ForkServer
from perdure.transfers import archive, catalogue


@perdure.durable(name="archived child")
def child(n: int) -> int:
    return add(n, 1)


@perdure.durable(name="archived run")
def parent(n: int) -> int:
    perdure.state()["n"] = n
    return int(perdure.spawn(child, n, id=f"child-{n}").result()) + add(n, len("x" * 10_000))


def finished(store: Store, run_id: str = "trip") -> Any:
    store.run(parent, 1, id=run_id).result()
    return run_seen(store, run_id)


def run_seen(store: Store, run_id: str) -> Any:
    run = store.get_run(run_id)
    return (
        run.result(),
        [(step.path, step.name, step.result) for step in run.steps()],
        everything(store, f"run:{run_id}"),
    )


def test_a_thread_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    with perdure.open(url) as store:
        make_thread(store)
        handle = store.thread("rich")
        handle.pin(name="kept")
        expected, fork = everything(store, "rich"), everything(store, "rich fork")
        done = store.ops.archive("rich", tmp_path / "archive.db")
        assert (done.name, done.place) == ("rich", str(tmp_path / "archive.db"))
        for thread in (store.thread("rich"), handle):
            for call in (
                thread.load,
                lambda thread=thread: list(thread.history()),
                lambda thread=thread: thread.save({}),
            ):
                with pytest.raises(Archived, match="perdure thread unarchive rich") as caught:
                    call()
                assert caught.value.place == done.place
        assert [info.name for info in store.threads()] == ["rich fork"]
        assert everything(store, "rich fork") == fork
        assert store.ops.verify().ok
        store.ops.unarchive("rich")
        assert everything(store, "rich") == expected
        assert [pin.name for pin in store.thread("rich").pins()] == ["kept"]
        assert store.ops.archives() == []
        assert store.ops.verify().ok


def test_a_run_comes_back_with_its_children_and_state(url: str, tmp_path: Path) -> None:
    with perdure.open(url) as store:
        expected = finished(store)
        store.ops.archive_run("trip", tmp_path / "archive.db")
        for run in ("trip", "child-1"):
            with pytest.raises(Archived):
                store.get_run(run)
        with pytest.raises(Archived, match="perdure run unarchive trip"):
            store.run(parent, 1, id="trip")
        assert (store.runs(), store.threads(), store.ops.verify().ok) == ([], [], True)
        store.ops.unarchive_run("trip")
        assert run_seen(store, "trip") == expected
        assert store.run(parent, 1, id="trip").result() == expected[0]
        assert store.get_run("child-1").result() == 2
        assert (store.ops.archives(), store.ops.verify().ok) == ([], True)


def test_what_is_in_use_is_not_archived(tmp_path: Path) -> None:
    @perdure.durable(name="archived waiting")
    def waiting(store_thread: str) -> None:
        store.thread(store_thread).save({"n": 1})
        perdure.ask("Go on?")

    with perdure.open(tmp_path / "a.db") as store:
        store.run(waiting, "needed", id="open")
        with pytest.raises(UsageError, match="unfinished run"):
            store.ops.archive("needed", tmp_path / "archive.db")
        with pytest.raises(UsageError, match="two places"):
            store.ops.archive_run("open", tmp_path / "archive.db")
        finished(store)
        with pytest.raises(UsageError, match="archive that run"):
            store.ops.archive("run:trip", tmp_path / "archive.db")
        store.fork("trip", id="fork")
        with pytest.raises(UsageError, match="fork 'fork'"):
            store.ops.archive_run("trip", tmp_path / "archive.db")
        assert store.get_run("trip").result()


def test_the_same_line_beside_an_archive_does_not_begin_the_run_anew(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the run's row, which is then gone, while the stub was not there yet when it looked."""
    add_backup, errors = catalogue.add_backup, list[Exception]()

    def again() -> None:
        try:
            other.run(parent, 1, id="trip")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=again)

    def slow(*args: Any) -> Program[None]:
        thread.start()
        blocked = b"SELECT count(*) FROM pg_locks WHERE NOT granted"
        until(lambda: not thread.is_alive() or (watch.execute(blocked).fetchone() or (0,))[0])
        yield from add_backup(*args)

    monkeypatch.setattr(archive, "add_backup", slow)
    with (
        perdure.open(postgres_url) as store,
        perdure.open(postgres_url) as other,
        psycopg.connect(postgres_url, autocommit=True) as watch,
    ):
        expected = finished(store)
        store.ops.archive_run("trip", tmp_path / "archive.db")
        thread.join()
        assert [type(error) for error in errors] == [Archived]
        assert store.runs() == []
        store.ops.unarchive_run("trip")
        assert run_seen(store, "trip") == expected


def test_what_changes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.thread("a").save({"n": 1})
        before = archive._copy

        def copy_and_change(*args: Any) -> None:
            before(*args)
            store.thread("a").annotate({"user": "alice"})

        monkeypatch.setattr(archive, "_copy", copy_and_change)
        with pytest.raises(Conflict, match="nothing was removed"):
            store.ops.archive("a", tmp_path / "archive.db")
        assert store.thread("a").load().state == {"n": 1}


def test_what_a_run_left_in_its_states_since_is_not_taken_for_archived(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        finished(store)
        store.ops.archive_run("trip", tmp_path / "archive.db")
        store.ops.unarchive_run("trip")
        store.thread("run:trip").pin(name="kept")
        with pytest.raises(Conflict, match="nothing was removed"):
            store.ops.archive_run("trip", tmp_path / "archive.db")
        store.ops.archive_run("trip", tmp_path / "other.db")
        store.ops.unarchive_run("trip")
        assert [pin.name for pin in store.thread("run:trip").pins()] == ["kept"]


def test_the_store_itself_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    with perdure.open(tmp_path / "a.db") as store:
        store.thread("a").save({"n": 1})
        expected = finished(store)
        for place in ("a.db", "link.db"):
            with pytest.raises(UsageError, match="the store itself"):
                store.ops.archive("a", tmp_path / place)
            with pytest.raises(UsageError, match="the store itself"):
                store.ops.archive_run("trip", tmp_path / place)
        assert store.thread("a").load().state == {"n": 1}
        assert run_seen(store, "trip") == expected


def test_deleting_and_erasing_take_the_stub_and_name_the_archive(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        finished(store)
        for name in ("deleted", "erased"):
            store.thread(name).save({"n": 1})
            store.ops.archive(name, tmp_path / "archive.db")
        store.ops.archive_run("trip", tmp_path / "archive.db")
        store.delete_thread("deleted")
        store.thread("deleted").save({"n": 2})
        assert any("archive.db" in place for place in store.ops.erase("erased").may_remain)
        store.delete_run("trip")
        assert [stub.name for stub in store.ops.archives()] == ["child-1"]
        store.delete_run("child-1")
        assert finished(store)


def test_a_tenants_transfer_takes_the_stubs_along(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.thread("a").save({"n": 1})
        store.ops.archive("a", tmp_path / "archive.db")
        with pytest.raises(Archived):
            store.ops.transfer(tmp_path / "b.db", threads=["a"])
        store.ops.transfer(tmp_path / "b.db", tenant="default")
    with perdure.open(tmp_path / "b.db") as other:
        other.ops.unarchive("a")
        assert other.thread("a").load().state == {"n": 1}


def test_the_archive_of_an_encrypted_store_is_encrypted(tmp_path: Path) -> None:
    key = b"k" * 32
    with perdure.open(tmp_path / "a.db", keys=key) as store:
        store.thread("a").save({"word": "hush-hush"})
        store.ops.archive("a", tmp_path / "archive.db")
        assert b"hush-hush" not in (tmp_path / "archive.db").read_bytes()
        with pytest.raises(perdure.errors.KeyMissing), perdure.open(tmp_path / "archive.db") as plain:
            plain.thread("a").load()
        (tmp_path / "archive.db").rename(tmp_path / "moved.db")
        store.ops.unarchive("a", tmp_path / "moved.db")
        assert store.thread("a").load().state == {"word": "hush-hush"}


def test_a_name_that_is_archived_is_not_taken_by_a_transfer(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store, perdure.open(tmp_path / "b.db") as other:
        for one in (store, other):
            one.thread("a").save({"n": 1})
            finished(one)
        other.ops.archive("a", tmp_path / "archive.db")
        other.ops.archive_run("trip", tmp_path / "archive.db")
        with pytest.raises(Archived, match="thread 'a' is archived at"):
            store.ops.transfer(tmp_path / "b.db", threads=["a"])
        with pytest.raises(Archived, match="run 'trip' is archived at"):
            store.ops.transfer(tmp_path / "b.db", runs=["trip"])
        with pytest.raises(UsageError, match="the target has one of that name"):
            other.ops.transfer(tmp_path / "a.db", tenant="default")
        assert (other.threads(), other.runs(), len(other.ops.archives())) == ([], [], 3)


@pytest.mark.parametrize("kind", ["thread", "run"])
def test_a_kill_at_any_statement_loses_nothing(tmp_path: Path, kind: str) -> None:
    url, place = str(tmp_path / "a.db"), str(tmp_path / "archive.db")
    with perdure.open(url) as store:
        make_thread(store, "rich", 20)
        expected = finished(store) if kind == "run" else everything(store, "rich")

    def state() -> Any:
        with perdure.open(url) as store:
            try:
                return run_seen(store, "trip") if kind == "run" else everything(store, "rich")
            except Archived:
                return None

    def stubs() -> int:
        with perdure.open(url) as store:
            return int(query(store, "SELECT count(*) FROM archived")[0][0])

    with ForkServer("archive_kit:archive_and_die") as nursery:
        for back in (False, True):
            for at in itertools.accumulate(itertools.count(1), lambda at, _: at + 1 + at // (3 if SOAK else 1)):
                ended = list(nursery.start(url, place, kind, back, at).lines())
                seen = state()
                assert seen in (expected, None)
                assert (stubs() > 0) == (seen is None)
                if ended == ["done"]:
                    assert (seen is None) != back
                    break
                if (seen is None) != back:  # the rest is left to the next compaction
                    break
    with perdure.open(url) as store:
        store.ops.compact()
        assert query(store, "SELECT count(*) FROM archived") == [(0,)]
        assert store.ops.verify().ok
