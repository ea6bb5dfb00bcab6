"""The SQLite driver with blocking callers: transactions, groups, faults at every step, errors, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import perdure
from perdure.errors import Busy, DiskFull, OutcomeUnknown, StoreClosed, StoreError, UsageError
from perdure.storage.program import Batch, ConstraintFailed, Program, Sql, Transaction
from perdure.storage.sqlite import driver as driver_module
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.opening import Role, Target, connect

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, 'v')")
KEYS = Sql("SELECT key FROM meta WHERE key <> 'store' ORDER BY key")
LARGE = Sql("INSERT INTO body (tenant, salt, diff) VALUES (1, x'00', :diff)")


def put(*keys: str) -> Program[int]:
    for key in keys:
        yield Batch(PUT(key=key))
    return len(keys)


def keys() -> Program[list[str]]:
    [rows] = yield Batch(KEYS(), last=True)
    return [key for (key,) in rows]


def write(*names: str, solo: bool = False) -> Transaction:
    return Transaction(partial(put, *names), write=True, solo=solo)


@pytest.fixture(params=["file", "memory"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteDriver]:
    driver = SqliteDriver(":memory:" if request.param == "memory" else tmp_path / "a.db")
    yield driver
    driver.close()


def test_a_program_sees_its_own_writes_and_returns_its_result(driver: SqliteDriver) -> None:
    def put_and_look() -> Program[list[Any]]:
        return (yield Batch(PUT(key="a"), KEYS()))

    assert driver.run(Transaction(put_and_look, write=True)) == [[], [("a",)]]
    assert driver.run(Transaction(keys)) == ["a"]


def test_a_statement_of_several_texts_gives_the_rows_of_the_last(driver: SqliteDriver) -> None:
    several = Sql(sqlite=("SELECT 1", "INSERT INTO meta VALUES (:key, 'v')", "SELECT value FROM meta WHERE key = :key"))

    def program() -> Program[Any]:
        return (yield Batch(several(key="k"), last=True))

    assert driver.run(Transaction(program, write=True)) == [[("v",)]]


def test_an_error_in_a_program_undoes_all_of_it(driver: SqliteDriver) -> None:
    def fails() -> Program[None]:
        yield Batch(PUT(key="a"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        driver.run(Transaction(fails, write=True))
    assert driver.run(Transaction(keys)) == []


def test_going_on_after_the_last_batch_is_a_defect_and_undone(driver: SqliteDriver) -> None:
    """As by a program inside of `journal.commit`, whose entry follows: PostgreSQL would commit without the entry."""

    def goes_on() -> Program[None]:
        yield Batch(PUT(key="a"), last=True)
        yield Batch(KEYS())

    with pytest.raises(UsageError, match="called its last"):
        driver.run(Transaction(goes_on, write=True))
    assert driver.run(Transaction(keys)) == []


def test_a_unique_violation_is_a_constraint_failed(driver: SqliteDriver) -> None:
    driver.run(write("a"))
    with pytest.raises(ConstraintFailed) as caught:
        driver.run(write("b", "a"))
    assert caught.value.kind == "unique"
    assert isinstance(caught.value.__cause__, apsw.ConstraintError)
    assert driver.run(Transaction(keys)) == ["a"]


@pytest.mark.parametrize("driver", ["file"], indirect=True)  # in memory there is no connection that only reads
def test_a_read_transaction_that_writes_is_refused(driver: SqliteDriver) -> None:
    with pytest.raises(UsageError, match="write=True"):
        driver.run(Transaction(partial(put, "a")))
    assert driver.run(write("b")) == 1
    assert driver.run(Transaction(keys)) == ["b"]


def test_wrong_sql_is_a_store_error_with_its_cause(driver: SqliteDriver) -> None:
    def wrong() -> Program[None]:
        yield Batch(Sql("SELECT * FROM nowhere")())

    for transaction in (Transaction(wrong), Transaction(wrong, write=True)):
        with pytest.raises(StoreError, match="nowhere") as caught:
            driver.run(transaction)
        assert isinstance(caught.value.__cause__, apsw.SQLError)
    assert driver.run(write("still works")) == 1


def test_a_change_of_the_schema_counts_as_a_change(driver: SqliteDriver) -> None:
    def create() -> Program[None]:
        yield Batch(Sql("CREATE TABLE extra (a)")(), last=True)

    def count() -> Program[Any]:
        return (yield Batch(Sql("SELECT count(*) FROM extra")(), last=True))

    driver.run(Transaction(create, write=True))
    assert driver.run(Transaction(count)) == [[(0,)]]


def test_a_read_of_several_batches_sees_one_moment(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")

    def reads() -> Program[tuple[Any, Any]]:
        [before] = yield Batch(KEYS())
        driver.run(write("meanwhile"))  # a writer does not wait for this reader
        [after] = yield Batch(KEYS())
        return before, after

    assert driver.run(Transaction(reads)) == ([], [])
    assert driver.run(Transaction(keys)) == ["meanwhile"]
    driver.close()


def test_a_listener_is_first_told_to_look_and_then_of_each_commit(tmp_path: Path) -> None:
    """A commit between a worker's look and its subscription would be missed otherwise."""
    driver = SqliteDriver(tmp_path / "a.db")
    notifications = driver.listen()
    heard = [notifications.wait(0), notifications.wait(0)]
    driver.run(write("a"))
    assert [*heard, notifications.wait(0)] == [True, False, True]
    driver.close()


def test_closing_is_final_and_may_be_repeated(driver: SqliteDriver) -> None:
    driver.run(write("a"))
    driver.close()
    driver.close()
    for transaction in (Transaction(keys), write("b")):
        with pytest.raises(StoreClosed, match="open it again"):
            driver.run(transaction)


def test_the_last_to_close_leaves_one_file_and_its_locks(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")
    driver.run(write("a"))
    assert driver.run(Transaction(keys)) == ["a"]
    driver.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.db", "a.db-lock", "a.db-lock-next"]


def test_the_log_stays_small_while_much_is_written(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db", durability="normal")

    def large() -> Program[None]:
        yield Batch(LARGE(diff=bytes(200_000)), last=True)

    largest = 0
    for _ in range(150):  # 30 MB
        driver.run(Transaction(large, write=True))
        largest = max(largest, (tmp_path / "a.db-wal").stat().st_size)
    assert largest < 6_000_000
    driver.close()


# Groups


class Crowd:
    """Holds the first commit back until `size` more jobs wait, so that they form one group."""

    def __init__(self, path: Path) -> None:
        self.commits = 0
        self.size = 0
        self.committing = threading.Event()
        self.driver = SqliteDriver(path, hook=self.hook)

    def hook(self, name: str) -> None:
        if name != "commit":
            return
        self.commits += 1
        if self.commits == 1:
            self.committing.set()
            assert self.driver._queue is not None
            while len(self.driver._queue.waiting) < self.size:
                time.sleep(0.001)

    def run(self, *transactions: Transaction) -> list[Any]:
        self.size = len(transactions)
        results: list[Any] = [None] * self.size

        def call(index: int, transaction: Transaction) -> None:
            try:
                results[index] = self.driver.run(transaction)
            except Exception as error:
                results[index] = error

        first = threading.Thread(target=self.driver.run, args=(write("first", solo=True),))
        first.start()
        self.committing.wait()  # else one of the others could lead
        others = [threading.Thread(target=call, args=pair) for pair in enumerate(transactions)]
        for thread in others:
            thread.start()
        for thread in [first, *others]:
            thread.join()
        return results


def test_waiting_writers_share_one_commit_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "a.db")
    assert crowd.run(write("a"), write("b", "c"), write("d", "e", "f")) == [1, 2, 3]
    assert crowd.driver.run(Transaction(keys)) == ["a", "b", "c", "d", "e", "f", "first"]
    assert crowd.commits == 2
    crowd.driver.close()


def test_an_error_in_a_group_is_its_jobs_alone(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "a.db")
    results = crowd.run(write("a"), write("x", "first"), write("b"), write("y", "first"), write("c"))
    assert [type(result) for result in results] == [int, ConstraintFailed, int, ConstraintFailed, int]
    assert crowd.driver.run(Transaction(keys)) == ["a", "b", "c", "first"]
    crowd.driver.close()


def test_solo_transactions_join_nobody(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "a.db")
    crowd.run(write("a", solo=True), write("b", solo=True), write("c", solo=True))
    assert crowd.commits == 4
    crowd.driver.close()


def test_many_threads_lose_nothing(driver: SqliteDriver) -> None:
    def work(name: int) -> None:
        for index in range(40):
            driver.run(write(f"{name}-{index}"))
            assert f"{name}-{index}" in driver.run(Transaction(keys))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.run(Transaction(keys))) == 240


# Faults


class Stop(Exception):
    """Raised by a hook."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_fault_at_each_step_leaves_all_or_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    steps: list[str] = []
    fail_at = -1

    def hook(name: str) -> None:
        steps.append(name)
        if len(steps) - 1 == fail_at:
            raise error(name)

    driver = SqliteDriver(tmp_path / "a.db", hook=hook)
    driver.run(write("0", "1"))
    assert steps == ["begin", "statement:0", "statement:1", "commit", "committed"]
    for fail_at, step in enumerate(list(steps)):
        fail = fail_at
        fail_at = -1
        before = driver.run(Transaction(keys))
        steps.clear()
        fail_at = fail
        with pytest.raises(error):
            driver.run(write(f"{step}-a", f"{step}-b"))
        fail_at = -1
        added = sorted(set(driver.run(Transaction(keys))) - set(before))
        assert added == ([f"{step}-a", f"{step}-b"] if step == "committed" else [])
    assert driver.run(write("works")) == 1
    driver.close()


class Disk(apsw.VFS):
    """A disk that fails when told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.syncs = 0
        self.fail_sync: Callable[[], Exception] | None = None
        self.fail_write: Callable[[], Exception] | None = None

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return DiskFile(self, name, flags)


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self.disk = disk

    def xSync(self, flags: int) -> None:
        self.disk.syncs += 1
        if self.disk.fail_sync:
            raise self.disk.fail_sync()
        super().xSync(flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self.disk.fail_write:
            raise self.disk.fail_write()
        super().xWrite(data, offset)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(f"disk-{tmp_path.name}")
    yield disk
    disk.unregister()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_a_failed_fsync_the_store_closes_itself(tmp_path: Path, disk: Disk) -> None:
    driver = SqliteDriver(tmp_path / "a.db", vfs=f"disk-{tmp_path.name}")
    driver.run(write("a"))
    disk.fail_sync = lambda: apsw.IOError("fsync failed")
    with pytest.raises(OutcomeUnknown, match="may or may not be written"):
        driver.run(write("b"))
    disk.fail_sync = None
    syncs = disk.syncs
    for transaction in (write("c"), Transaction(keys)):
        with pytest.raises(StoreClosed, match="open it again"):
            driver.run(transaction)
    assert disk.syncs == syncs
    driver.close()
    again = SqliteDriver(tmp_path / "a.db")
    assert again.run(Transaction(keys))[0] == "a"
    again.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_said_and_survived(tmp_path: Path, disk: Disk) -> None:
    driver = SqliteDriver(tmp_path / "a.db", vfs=f"disk-{tmp_path.name}")
    disk.fail_write = lambda: apsw.FullError("no space")
    with pytest.raises(DiskFull, match="no space left"):
        driver.run(write("a"))
    disk.fail_write = None
    driver.run(write("b"))
    assert driver.run(Transaction(keys)) == ["b"]
    driver.close()


def test_a_writer_that_ignores_our_lock_makes_us_busy_at_the_deadline(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db", timeout_s=0.05)
    foreign = apsw.Connection(str(tmp_path / "a.db"))
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match=r"a\.db for longer than the deadline of 0\.05 s"):
        driver.run(write("a"))
    assert driver.run(Transaction(keys)) == []  # readers do not mind
    foreign.execute("ROLLBACK")
    driver.run(write("b"))
    foreign.close()
    driver.close()


def test_connections_to_snapshots_that_are_no_longer_read_give_up_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def counting(target: Target, role: Role, epoch: int = 0) -> apsw.Connection:
        opened.append(epoch)
        return connect(target, role, epoch)

    monkeypatch.setattr(driver_module, "connect", counting)
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread = store.thread("a")
        snapshots = []
        for number in range(8):
            thread.save(number)
            snapshots.append(store.snapshot(f"s{number}"))
        for snapshot in snapshots[:7]:
            snapshot.thread("a").load()
            snapshot.release()
        opened.clear()
        for _ in range(20):
            assert snapshots[7].thread("a").load().state == 7
            assert thread.load().state == 7
        assert len(opened) <= 2
