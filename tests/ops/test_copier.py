"""The process that copies a frozen file: it takes its share of the disk and no more, and does what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import perdure
from perdure.ops.copies import backup_sqlite, copier
from perdure.ops.copies.backup import bottom
from perdure.ops.copies.copier import ALONE_S, LARGE_BYTES, PIECE_BYTES, SHARE, SMALL_BYTES, Pace
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.storage.sqlite.opening import connect, open_gate

MB = 1 << 20
DISK_S = 0.5e-9  # per byte: 2 GB/s


class Clock:
    """A copy of so many bytes on a clock of its own."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.now_s = 0.0
        self.rested_s = 0.0
        self.pieces: list[int] = []

    def copy(self, size: int, took: Callable[[int], float], *, committed: bool) -> float:
        """How long it takes."""
        start_s = self.now_s
        while size > 0:
            count = min(self.pace.piece_bytes, size)
            self.pieces.append(count)
            took_s = took(count)
            self.now_s += took_s
            rest_s = self.pace.rest_s(count, took_s, self.now_s, committed=committed)
            self.now_s += rest_s
            self.rested_s += rest_s
            size -= count
        return self.now_s - start_s


def on_a_disk(count: int) -> float:
    return count * DISK_S


def test_alone_a_copy_never_rests() -> None:
    clock = Clock(Pace())
    assert clock.copy(400 * MB, on_a_disk, committed=False) == pytest.approx(400 * MB * DISK_S)
    assert set(clock.pieces) == {PIECE_BYTES}


def test_while_others_commit_a_copy_takes_its_share_of_the_disk() -> None:
    clock = Clock(Pace())
    took_s = clock.copy(400 * MB, on_a_disk, committed=True)
    assert took_s == pytest.approx(400 * MB * DISK_S / SHARE, rel=0.03)
    assert set(clock.pieces) == {PIECE_BYTES, SMALL_BYTES}
    assert clock.pieces.count(PIECE_BYTES) == 1, "it went on as if it were alone"


def test_where_every_piece_is_late_a_copy_does_not_rest_on_top_of_that() -> None:
    """Processors that are busy make a piece six times as long. Resting in proportion would make the copy so too."""

    def late(count: int) -> float:
        clock.turn += 1
        return on_a_disk(count) + (0.003 if clock.turn % 10 else 0.0)

    class Late(Clock):
        turn = 0

    clock = Late(Pace())
    took_s = clock.copy(400 * MB, late, committed=True)
    assert clock.rested_s < 0.05 * took_s
    assert clock.pieces.count(LARGE_BYTES) > len(clock.pieces) / 2


def test_when_others_have_stopped_a_copy_runs_on_as_if_alone() -> None:
    clock = Clock(Pace())
    clock.copy(40 * MB, on_a_disk, committed=True)
    clock.copy(int(ALONE_S / DISK_S), on_a_disk, committed=False)
    clock.pieces.clear()
    rested_s = clock.rested_s
    clock.copy(100 * MB, on_a_disk, committed=False)
    assert set(clock.pieces) == {PIECE_BYTES}
    assert clock.rested_s == rested_s
    clock.copy(2 * PIECE_BYTES, on_a_disk, committed=True)
    assert clock.pace.piece_bytes == SMALL_BYTES


def run_copier(source: Path, target: Path, told: bytes) -> list[bytes]:
    command = [sys.executable, "-I", "-S", copier.__file__, str(source), str(target), "0"]
    done = subprocess.run(command, input=told, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.splitlines()


@pytest.mark.parametrize("size", [1, 4096, 17 * MB, 17 * MB + 4096, 17 * MB + 5])
def test_every_byte_is_copied_and_told_of(size: int, tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(size))
    target.touch()
    told = run_copier(source, target, b"copy\n")
    assert target.read_bytes() == source.read_bytes()
    assert told[-1] == b"%d %d" % (size, size)


def test_nothing_is_copied_if_whoever_started_it_dies_before_the_file_is_frozen(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(MB))
    target.touch()
    assert run_copier(source, target, b"") == []
    assert target.read_bytes() == b""


def test_a_copier_that_cannot_start_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "copier.py"
    broken.write_text("raise SystemExit('no room for a process')")
    monkeypatch.setattr(backup_sqlite, "_COPIER", broken)
    monkeypatch.setattr(backup_sqlite, "_FROZEN_MIN_BYTES", 0)
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.thread("x").save({"n": 1})
        with pytest.raises(perdure.errors.StoreError, match="no room for a process"):
            store.ops.backup(tmp_path / "b.db")
        store.thread("x").save({"n": 2})
    assert not [name for name in os.listdir(tmp_path) if name.startswith("b.db")]


def test_somebody_else_who_brings_in_the_log_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite lets one connection at a time do it, and turns others away at once."""
    path = str(tmp_path / "a.db")
    held, may_end = threading.Event(), threading.Event()

    def wait(_tries: int) -> bool:
        held.set()
        may_end.wait(30)
        return False

    def bring_in_slowly() -> None:
        other = apsw.Connection(path)
        other.execute("SELECT count(*) FROM record").fetchall()
        other.set_busy_handler(wait)  # waits for the reader below, and keeps the right to bring in meanwhile
        with pytest.raises(apsw.BusyError):
            other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        other.close()

    with perdure.open(path) as store:
        store.thread("x").save({"n": 1})
        reader, helper = apsw.Connection(path), apsw.Connection(path)
        reader.execute("BEGIN; SELECT count(*) FROM record").fetchall()
        slow = threading.Thread(target=bring_in_slowly)
        slow.start()
        assert held.wait(30)
        monkeypatch.setattr(backup_sqlite, "_OTHERS_S", 0.0)
        with pytest.raises(apsw.BusyError):
            backup_sqlite._bring_in(helper)
        monkeypatch.setattr(backup_sqlite, "_OTHERS_S", 30.0)
        monkeypatch.setattr(backup_sqlite, "sleep", lambda _s: may_end.set())  # it was turned away once: now let go
        assert backup_sqlite._bring_in(helper)
        slow.join()
        reader.close()
        helper.close()


def times_started_over(log: Path) -> int:
    with open(log, "rb") as file:
        return int.from_bytes(file.read(16)[12:], "big")


def test_a_log_that_grew_during_a_backup_keeps_its_length(tmp_path: Path) -> None:
    """Lengthening a file makes every commit's sync dearer: the log of the next backup need not grow again."""
    path = str(tmp_path / "a.db")
    log = Path(path + "-wal")

    def large() -> Program[None]:
        yield Batch(Sql("INSERT OR REPLACE INTO meta (key, value) VALUES ('large', :large)")(large="x" * MB), last=True)

    with perdure.open(path, durability="normal") as store:
        store.thread("x").save({"n": 0})
        reader = apsw.Connection(path)
        reader.execute("BEGIN; SELECT count(*) FROM record").fetchall()
        while log.stat().st_size < 24 * MB:
            drive(store._context.driver, write(large))
        reader.close()
        before = times_started_over(log)
        for _ in range(3):
            drive(store._context.driver, write(large))
        assert times_started_over(log) > before
        assert log.stat().st_size >= 24 * MB


def test_a_connection_that_has_read_nothing_brings_in_the_log_too(tmp_path: Path) -> None:
    """Asked at once, SQLite does nothing and says that all is well."""
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("x").save({"n": 1})
        helper = apsw.Connection(path)
        assert backup_sqlite._bring_in(helper)
        helper.close()
        before = times_started_over(Path(path + "-wal"))
        store.thread("x").save({"n": 2})
        assert times_started_over(Path(path + "-wal")) == before + 1


def test_a_log_that_is_lengthened_while_others_commit_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for those who go on, nor for who finds file and log after a crash."""
    monkeypatch.setattr(backup_sqlite, "_LENGTHEN_BYTES", 64 << 10)
    path, crashed = str(tmp_path / "a.db"), str(tmp_path / "crashed.db")
    saved = 0
    begun, ends = threading.Event(), threading.Event()

    def save() -> None:
        nonlocal saved
        while not ends.is_set() or saved < 20:
            store.thread("x").save({"n": saved})
            saved += 1
            begun.set()

    with perdure.open(path) as store:
        target = bottom(store._context.driver)._target
        helper, gate = connect(target, "write", "writer"), open_gate(target)
        monkeypatch.setattr(backup_sqlite, "_LOG_PART", os.path.getsize(path) / (2 * MB))
        saver = threading.Thread(target=save)
        saver.start()
        assert begun.wait(30)
        backup_sqlite._lengthen_log(helper, gate, target)
        ends.set()
        saver.join()
        assert Path(path + "-wal").stat().st_size >= 1.9 * MB
        helper.close()
        gate.close()
        subprocess.run(["cp", path, crashed], check=True)  # by a process: closing it here would drop SQLite's locks
        shutil.copyfile(path + "-wal", crashed + "-wal")
        assert store.thread("x").load().state == {"n": saved - 1}
    for place in (path, crashed):
        with perdure.open(place) as found:
            assert found.thread("x").load().state == {"n": saved - 1}
            assert found.ops.verify().checkpoints == saved
