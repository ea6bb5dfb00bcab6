"""Many processes, forked children and full disks: no lock error reaches the user, nothing is lost.

What the driver alone promises (turns, deadlines, read-only places, files that are not stores, newer schemas,
network file systems) is tested in tests/unit/test_sqlite_driver*.py; here whole stores are used from outside.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import hammer
import pytest
from soak import SOAK

import perdure

PROCESSES = 8
SECONDS = 2.0 if SOAK else 1.0
_names = itertools.count()


def start(call: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", f"import hammer; hammer.{call}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.alone
def test_eight_processes_of_eight_threads_share_one_file(tmp_path: Path) -> None:
    """No lock error, nothing lost, no process starves."""
    path = str(tmp_path / "a.db")
    processes = [start(f"hammer({path!r}, 'p{number}', {SECONDS})") for number in range(PROCESSES)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results: list[dict[str, Any]] = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    counts = [len(result["saved"]) for result in results]
    longest = max(result["longest_s"] for result in results)
    print(f"\nsaves per process {counts}, {sum(counts) / SECONDS:.0f} per second, longest wait {longest:.3f} s")
    assert [result["failures"] for result in results] == [[]] * PROCESSES
    check_saved(path, [entry for result in results for entry in result["saved"]])
    assert min(counts) * 10 >= max(counts)
    assert longest < 10.0


def check_saved(path: str, saved: list[Any]) -> None:
    with perdure.open(path) as store:
        assert store.ops.stats().checkpoints == len(saved)
        for thread, checkpoint, name, number in random.Random(1).sample(saved, min(1000, len(saved))):
            loaded = store.thread(thread).load(checkpoint, strict=True)
            assert loaded.state == hammer.state_of(name, number)
        last = {thread: checkpoint for thread, checkpoint, _, _ in saved if thread != hammer.SHARED}
        for thread, checkpoint in last.items():
            assert store.thread(thread).load(strict=True).id == checkpoint
        report = store.ops.verify()
        assert report.ok, report.problems


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "a.db")
    return str(request.getfixturevalue("postgres_url"))


def test_a_forked_child_is_refused_and_the_parent_goes_on(url: str) -> None:
    """Its end harms nothing. On PostgreSQL it can open a store of its own."""
    process = start(f"fork({url!r})")
    said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    own, names = ("1 True", "['parent', 'child']") if url.startswith("postgresql") else ("refused", "['parent']")
    assert said == ["refused", "refused", "refused", own, f"2 {names} True"]


# --- a full disk


class SmallDisk(apsw.VFS):
    """Where no small file system can be mounted: a disk that is full while `full` says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.left_bytes = 1_000_000

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _SmallFile(self, name, flags)


class _SmallFile(apsw.VFSFile):
    def __init__(self, disk: SmallDisk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.left_bytes -= max(0, offset + len(data) - self.xFileSize())
        if self._disk.left_bytes < 0:
            raise apsw.FullError("no space left")
        super().xWrite(data, offset)


Place = tuple[Path, str | None, Callable[[], object]]  # folder, VFS, what makes room


@pytest.fixture(params=["file system", "vfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A folder with little space, and what makes room in it."""
    if request.param == "vfs":
        disk = SmallDisk(f"small-{next(_names)}")
        yield tmp_path, f"small-{next(_names) - 1}", lambda: setattr(disk, "left_bytes", 10_000_000)
        disk.unregister()
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root; the other variant covers the same")
    ballast = tmp_path / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    yield tmp_path, None, ballast.unlink
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # how apsw shows a VFS's error
def test_a_full_disk_is_said_loses_nothing_and_passes(small: Place) -> None:
    folder, vfs, make_room = small
    chance, saved = random.Random(1), dict[str, Any]()
    options: dict[str, Any] = {"vfs": vfs} if vfs else {}
    with perdure.open(str(folder / "a.db"), **options) as store:
        thread = store.thread("a")

        def save() -> None:
            state = {"number": len(saved), "noise": chance.randbytes(20_000)}
            saved[thread.save(state).id] = state

        def fill() -> None:
            for _ in range(200):
                save()

        with pytest.raises(perdure.errors.DiskFull, match="nothing of this operation was written"):
            fill()
        assert len(saved) > 10
        assert thread.load(strict=True).state == list(saved.values())[-1]
        for _ in range(3):  # still full, still said
            with pytest.raises(perdure.errors.DiskFull):
                save()
        check_states(store, saved)
        make_room()
        for _ in range(5):
            save()
        assert not thread.branches()[1:]
    with perdure.open(str(folder / "a.db"), **options) as store:
        check_states(store, saved)
        assert store.thread("a").load(strict=True).id == list(saved)[-1]


def check_states(store: perdure.Store, saved: dict[str, Any]) -> None:
    for checkpoint, state in saved.items():
        assert store.thread("a").load(checkpoint, strict=True).state == state
    assert store.ops.verify().ok
    assert store.ops.stats().checkpoints == len(saved)
