"""Power loss on demand: a VFS for SQLite that remembers what is on the disk and what is only on its way there.

`PowerLossVfs` passes everything through to the real file system and logs every write, truncation, deletion and
fsync. `Disk` replays that log up to any moment and makes the image that a power loss would leave then: what was
synced is there; of what was not, everything, nothing, or any part of it in units of 512 bytes. One run of a
workload so gives every crash it could have had.

What is modelled: data reaches the disk at fsync, or earlier in any order; a file grows before its data arrives
(it reads as zeros) or after; a new name and a deleted one are safe once the folder was synced, which SQLite
does with the first fsync of a new log or journal, or by deleting with `syncdir`. Bytes of a sector that were
not written are not harmed (SQLite calls that powersafe overwrite, and its log relies on it). The `-shm` file
is memory, never part of an image.

The VFS also counts fsyncs and can make each take as long as on a slower disk, for benchmarks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import apsw

SECTOR_BYTES = 512
Fate = Literal["dropped", "kept", "torn"]
Image = dict[str, bytes]  # file name (without its folder) -> content


@dataclass(frozen=True, slots=True)
class Opened:
    """A file was opened; `content` is what was there before, None if it was made."""

    name: str
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Written:
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Deleted:
    name: str
    synced: bool


@dataclass(frozen=True, slots=True)
class Synced:
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something the workload said, for example which save has returned."""

    note: Any


Event = Opened | Written | Truncated | Deleted | Synced | Mark


class PowerLossVfs(apsw.VFS):
    """Register with a name, then `perdure.open(path, vfs=name)`; `unregister()` when done.

    `record=False` logs nothing (for benchmarks). `ignore_syncs` is a disk that lies: it says yes to every fsync
    and does nothing; what a test finds then shows that it can find something.
    """

    def __init__(
        self, name: str, *, sync_delay_s: float = 0.0, record: bool = True, ignore_syncs: bool = False
    ) -> None:
        super().__init__(name, "")
        self.name = name
        self.sync_delay_s = sync_delay_s
        self.ignore_syncs = ignore_syncs
        #: how many fsyncs SQLite asked for
        self.syncs = 0
        self.log: list[Event] = []
        self._record = record
        self._known: set[str] = set()

    def mark(self, note: Any) -> None:
        """Note in the log that the workload has come to a point, for example that a save returned."""
        self.add(Mark(note))

    def add(self, event: Event) -> None:
        if self._record:
            self.log.append(event)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        before = None
        short = Path(path).name if path else ""
        if self._record and short and short not in self._known and Path(path).exists():
            before = Path(path).read_bytes()  # opened before any lock is taken on it through this VFS
        file = _File(self, name, short, flags)
        if short and short not in self._known:
            self._known.add(short)
            self.add(Opened(short, before))
        return file

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        name = Path(filename).name
        self._known.discard(name)
        self.add(Deleted(name, bool(syncdir) and not self.ignore_syncs))


class _File(apsw.VFSFile):
    """An open file. A temporary one has no name and is in no image."""

    def __init__(self, vfs: PowerLossVfs, name: Any, short: str, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._vfs = vfs
        self._name = short

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        if self._name:
            self._vfs.add(Written(self._name, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        if self._name:
            self._vfs.add(Truncated(self._name, newsize))

    def xSync(self, flags: int) -> None:
        vfs = self._vfs
        vfs.syncs += 1
        if vfs.sync_delay_s:
            time.sleep(vfs.sync_delay_s)
        if vfs.ignore_syncs:
            return
        super().xSync(flags)
        if self._name:
            vfs.add(Synced(self._name))


@dataclass(slots=True)
class _Inode:
    """A file's content on the disk, and the changes that are not there yet, in their order."""

    durable: bytearray
    pending: list[Written | Truncated] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def after(self, fate: Fate, chance: random.Random) -> bytes:
        """The content after a power loss."""
        content = bytearray(self.durable)
        if fate == "dropped":
            return bytes(content)
        for change in self.pending:
            if fate == "kept":
                _apply(content, change)
            elif isinstance(change, Truncated):
                if chance.random() < 0.5:
                    _apply(content, change)
            else:
                _tear(content, change, chance)
        return bytes(content)


class Disk:
    """The disk under a logged workload, at one moment of it after the other."""

    def __init__(self, log: Sequence[Event]) -> None:
        self._log = log
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        #: how many events have happened
        self.position = 0
        #: what the workload has said so far
        self.marks: list[Any] = []

    @property
    def at_end(self) -> bool:
        return self.position >= len(self._log)

    def step(self) -> Event:
        """Let one more event happen."""
        event = self._log[self.position]
        self.position += 1
        match event:
            case Mark(note):
                self.marks.append(note)
            case Opened(name, content):
                self._open(name, content)
            case Synced(name):
                inode = self._names[name]
                inode.sync()
                if self._durable_names.get(name) is not inode:
                    self._sync_folder()
            case Deleted(name, synced):
                self._names.pop(name, None)
                if synced:
                    self._sync_folder()
            case Written(name) | Truncated(name):
                self._names[name].pending.append(event)
        return event

    def image(self, fate: Fate, chance: random.Random) -> Image:
        """What a power loss at this moment leaves. "torn" is different each time."""
        names = dict(self._durable_names)
        for name in {*self._names, *self._durable_names}:
            survives = fate == "kept" or (fate == "torn" and chance.random() < 0.5)
            if self._names.get(name) is self._durable_names.get(name) or not survives:
                continue
            if name in self._names:
                names[name] = self._names[name]
            else:
                del names[name]
        return {name: inode.after(fate, chance) for name, inode in names.items()}

    def _open(self, name: str, content: bytes | None) -> None:
        if name in self._names:
            return
        self._names[name] = inode = _Inode(bytearray(content or b""))
        if content is not None:
            self._durable_names[name] = inode

    def _sync_folder(self) -> None:
        self._durable_names = dict(self._names)


def write_image(image: Image, folder: Path) -> None:
    """Put an image's files into a folder."""
    for name, content in image.items():
        (folder / name).write_bytes(content)


def _apply(content: bytearray, change: Written | Truncated) -> None:
    if isinstance(change, Truncated):
        if change.size < len(content):
            del content[change.size :]
        else:
            content.extend(bytes(change.size - len(content)))
        return
    _put(content, change.offset, change.data)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _tear(content: bytearray, change: Written, chance: random.Random) -> None:
    """Some sectors of a write arrive, some do not."""
    end = change.offset + len(change.data)
    if end > len(content) and chance.random() < 0.3:
        content.extend(bytes(end - len(content)))  # the file has grown, its data has not come
    position = change.offset
    while position < end:
        upto = min(end, (position // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if chance.random() < 0.5:
            _put(content, position, change.data[position - change.offset : upto - change.offset])
        position = upto
