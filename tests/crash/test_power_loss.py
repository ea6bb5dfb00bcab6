"""Pulling the plug: after a power loss at any moment the store opens, is sound, and holds what it promised.

A workload runs once on a disk that logs what reached it and when. Then every moment of it is crashed, several
times: with everything unsynced lost, with everything kept, and torn sector by sector. The last test takes a
disk that lies about fsync and demands that the checker sees the loss, so that the others can fail.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest
from blake3 import blake3
from power_loss import Disk, Fate, Image, Mark, PowerLossVfs, write_image

import perdure

SOAK = 20 if os.environ.get("PERDURE_SOAK") else 1
_names = itertools.count()


@dataclass(frozen=True)
class Acked:
    """A save returned."""

    thread: str
    checkpoint: str
    number: int


@dataclass(frozen=True)
class Pruning:
    """A prune was about to start: of the thread's checkpoints only the newest so many must be there later."""

    thread: str
    keep: int


@dataclass
class Verdict:
    """What was found wrong with the stores that crashes left."""

    images: int = 0
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def state(thread: str, number: int) -> dict[str, Any]:
    """What the save number so-and-so saves: known without asking the store."""
    return {"thread": thread, "number": number, "log": [f"{thread} said {n} {n * n}" for n in range(number)]}


class Workload:
    """Saves with marks in the disk's log."""

    def __init__(self, vfs: PowerLossVfs, folder: Path, durability: Literal["full", "normal"]) -> None:
        self.vfs = vfs
        self.path = str(folder / "a.db")
        self.store = perdure.open(self.path, vfs=vfs.name, durability=durability)
        self.threads: dict[str, perdure.Thread] = {}
        self.numbers: dict[str, int] = {}

    def save(self, name: str) -> None:
        thread = self.threads.setdefault(name, self.store.thread(name))
        number = self.numbers[name] = self.numbers.get(name, 0) + 1
        saved = thread.save(state(name, number), note=f"number {number}")
        self.vfs.mark(Acked(name, saved.id, number))

    def fork(self, name: str, new: str) -> None:
        self.threads[new] = self.threads[name].fork(name=new)
        self.numbers[new] = self.numbers[name]

    def prune(self, name: str, keep: int) -> None:
        self.vfs.mark(Pruning(name, keep))
        self.threads[name].prune(keep=keep)

    def checkpoint_log(self) -> None:
        """What the writer does when the log is long: copy it into the store and start it over."""
        connection = apsw.Connection(self.path, vfs=self.vfs.name)
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        connection.close()


def short_workload(work: Workload) -> None:
    for _ in range(10):
        work.save("a")
    work.fork("a", "b")
    for _ in range(3):
        work.save("a")
        work.save("b")
    work.checkpoint_log()
    for _ in range(4):
        work.save("b")
    work.prune("a", 5)
    work.save("a")
    work.checkpoint_log()
    for name in ("a", "b", "c", "a", "b", "c", "a", "b"):
        work.save(name)
    work.store.close()


def six_saves(work: Workload) -> None:
    for _ in range(6):
        work.save("a")
    work.store.close()


def long_workload(work: Workload, chance: random.Random) -> None:
    work.save("t0")
    for _ in range(300):
        name = f"t{chance.randrange(4)}"
        action = chance.random()
        if action < 0.02:
            work.checkpoint_log()
        elif action < 0.04 and name in work.threads:
            work.prune(name, chance.randint(1, 20))
        elif action < 0.05 and name in work.threads:
            work.fork(name, f"f{len(work.threads)}")
        else:
            work.save(chance.choice([name, *work.threads]))
    work.store.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory if possible: the real disk's fsyncs prove nothing here and take long."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="pd-power-", dir=memory))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run(
    folder: Path,
    workload: Callable[[Workload], None],
    durability: Literal["full", "normal"] = "full",
    *,
    ignore_syncs: bool = False,
) -> PowerLossVfs:
    vfs = PowerLossVfs(f"power-{next(_names)}", ignore_syncs=ignore_syncs)
    try:
        (folder / "run").mkdir()
        workload(Workload(vfs, folder / "run", durability))
    finally:
        vfs.unregister()
    return vfs


def expected(marks: list[Any]) -> list[Acked]:
    """What was acknowledged and not given up by a prune, in the order of the saves."""
    kept: list[Acked] = []
    for mark in marks:
        if isinstance(mark, Acked):
            kept.append(mark)
        else:
            own = [acked for acked in kept if acked.thread == mark.thread]
            gone = set(own[: -mark.keep])
            kept = [acked for acked in kept if acked not in gone]
    return kept


def examine(image: Image, marks: list[Any], folder: Path, verdict: Verdict, prefix: bool, where: str) -> None:
    """Open what a crash left and compare it with what was acknowledged."""
    place = folder / "crashed"
    place.mkdir()
    write_image(image, place)
    verdict.images += 1
    try:
        with perdure.open(str(place / "a.db")) as store:
            check(store, marks, verdict, prefix, where)
    except perdure.PerdureError as error:
        verdict.broken.append(f"{where}: {error!r}")
    finally:
        shutil.rmtree(place)


def check(store: perdure.Store, marks: list[Any], verdict: Verdict, prefix: bool, where: str) -> None:
    report = store.ops.verify()
    if not report.ok:
        verdict.broken.append(f"{where}: {report.problems}")
    missing: Acked | None = None
    last: dict[str, Acked] = {}
    for acked in expected(marks):
        thread = store.thread(acked.thread)
        try:
            loaded = thread.load(acked.checkpoint, strict=True)
        except perdure.NotFound:
            missing = missing or acked
            if not prefix:
                verdict.lost.append(f"{where}: {acked}")
            continue
        if missing:
            verdict.broken.append(f"{where}: {acked} is there and {missing}, saved before it, is not")
        if loaded.state != state(acked.thread, acked.number) or loaded.note != f"number {acked.number}":
            verdict.broken.append(f"{where}: {acked} is wrong: {loaded.state}")
        last[acked.thread] = acked
    for name, acked in last.items():
        head = store.thread(name).load(strict=True)
        # The save under way may have become durable just before the power went.
        if head.id != acked.checkpoint and head.parent != acked.checkpoint:
            verdict.broken.append(f"{where}: the head of {name} is {head}, not {acked}")
        if head.state != state(name, head.state["number"]):
            verdict.broken.append(f"{where}: the head of {name} is wrong: {head.state}")
    thread = store.thread("afterwards")
    saved = thread.save({"works": True})
    assert thread.load().id == saved.id


def crash_everywhere(
    vfs: PowerLossVfs, folder: Path, *, tearings: int, moments: float = 1.0, prefix: bool = False
) -> Verdict:
    """Crash at each event of the log (or at a part of them), several times; never check the same image twice."""
    verdict = Verdict()
    disk = Disk(vfs.log)
    chance = random.Random(len(vfs.log))
    seen: set[bytes] = set()
    while not disk.at_end:
        event = disk.step()
        if chance.random() > moments:
            continue
        fates: list[Fate] = ["dropped", "kept"]
        fates += ["torn"] * tearings
        for fate in fates if not isinstance(event, Mark) else fates[:1]:
            image = disk.image(fate, chance)
            digest = fingerprint(image, len(disk.marks))
            if digest in seen:
                continue
            seen.add(digest)
            examine(image, disk.marks, folder, verdict, prefix, f"event {disk.position}, {fate}")
    return verdict


def fingerprint(image: Image, marks: int) -> bytes:
    hasher = blake3(str(marks).encode())
    for name in sorted(image):
        hasher.update(f"{name} {len(image[name])} ".encode())
        hasher.update(image[name])
    return hasher.digest()


def test_full_durability_survives_a_power_loss_at_every_moment(folder: Path) -> None:
    """Nothing acknowledged is lost, whatever of the unsynced writes arrived."""
    vfs = run(folder, short_workload)
    verdict = crash_everywhere(vfs, folder, tearings=2 * SOAK, moments=0.15 if SOAK == 1 else 1.0)
    print(f"\n{len(vfs.log)} events, {vfs.syncs} fsyncs, {verdict.images} crashes")
    assert verdict.images > (25 if SOAK == 1 else 300)
    assert not verdict.broken
    assert not verdict.lost


def test_normal_durability_loses_only_a_tail(folder: Path) -> None:
    """What survives is a prefix of what was acknowledged, and it is sound."""
    vfs = run(folder, short_workload, "normal")
    verdict = crash_everywhere(vfs, folder, tearings=SOAK, prefix=True, moments=0.1 if SOAK == 1 else 1.0)
    print(f"\n{len(vfs.log)} events, {vfs.syncs} fsyncs, {verdict.images} crashes")
    assert verdict.images > (25 if SOAK == 1 else 300)
    assert not verdict.broken


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_random_workloads_survive_random_power_losses(folder: Path, durability: Literal["full", "normal"]) -> None:
    for seed in range(SOAK):
        vfs = run(folder, lambda work: long_workload(work, random.Random(seed)), durability)  # noqa: B023
        verdict = crash_everywhere(
            vfs, folder, tearings=1, moments=0.004 if SOAK == 1 else 0.02, prefix=durability == "normal"
        )
        print(f"\n{len(vfs.log)} events, {vfs.syncs} fsyncs, {verdict.images} crashes")
        assert not verdict.broken
        assert not verdict.lost
        shutil.rmtree(folder / "run")


def test_a_second_crash_during_recovery_loses_nothing_either(folder: Path) -> None:
    """The image of a crash is opened on the same sort of disk, and that is crashed again, everywhere."""
    vfs = run(folder, six_saves)
    disk = Disk(vfs.log)
    while len(disk.marks) < 6:
        disk.step()
    first = disk.image("dropped", random.Random(1))
    (folder / "again").mkdir()
    write_image(first, folder / "again")
    second = PowerLossVfs(f"power-{next(_names)}")
    for mark in disk.marks:
        second.mark(mark)
    with perdure.open(str(folder / "again" / "a.db"), vfs=second.name) as store:
        assert store.thread("a").load().state == state("a", 6)
    second.unregister()
    # Before the log's file is opened by the second run, it is not in its images: start after that.
    starts = max(index for index, event in enumerate(second.log) if type(event).__name__ == "Opened") + 1
    again, verdict, chance = Disk(second.log), Verdict(), random.Random(2)
    while not again.at_end:
        again.step()
        if again.position < starts:
            continue
        for fate in ("dropped", "kept", "torn", "torn"):
            examine(again.image(fate, chance), again.marks, folder, verdict, False, f"{again.position} {fate}")
    assert verdict.images > 10
    assert not verdict.broken
    assert not verdict.lost


def test_the_checker_sees_what_a_lying_disk_loses(folder: Path) -> None:
    """The negative control: with fsyncs that do nothing, acknowledged saves must be found missing or broken."""
    vfs = run(folder, short_workload, ignore_syncs=True)
    verdict = crash_everywhere(vfs, folder, tearings=1, moments=0.1)
    assert verdict.lost
    assert verdict.broken  # torn without order, even the file's structure goes


def test_fsyncs_are_counted_and_each_save_costs_one(tmp_path: Path) -> None:
    """Full durability is one fsync per save; normal is none. A benchmark sets how long each takes."""
    counts = {}
    for durability in ("full", "normal"):
        vfs = PowerLossVfs(f"power-{next(_names)}", sync_delay_s=0.0001, record=False)
        store = perdure.open(str(tmp_path / f"{durability}.db"), vfs=vfs.name, durability=durability)
        thread = store.thread("a")
        thread.save({"n": 0})
        before = vfs.syncs
        for number in range(10):
            thread.save({"n": number})
        counts[durability] = vfs.syncs - before
        store.close()
        vfs.unregister()
        assert vfs.log == []
    assert counts == {"full": 10, "normal": 0}
