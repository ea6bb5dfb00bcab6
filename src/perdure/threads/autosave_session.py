"""One autosave: what has changed, what was saved, and when the next save is due.

What is saved is the state at one call: it becomes text there and then, on the thread that made the call, whatever
happens to it afterwards. A writer (`autosave_writers.py`) puts that text into the store, at once or in the background,
and the session keeps the books: which changes are durable, which are not, and since when.

A session whose policy learns leaves what it knows in the metadata of its saves, and marks its last one as the end. A
newest save without that mark is of a process that died: that is how failures are counted, without a commit of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import orjson
from blake3 import blake3

from perdure.errors import NotFound, ThreadDeleted, UsageError
from perdure.storage.events import event
from perdure.storage.program import Flow
from perdure.threads import flows
from perdure.threads.context import Context, Line
from perdure.threads.policies import Machine, Memory, Policy
from perdure.values.codec import decode, encode

KEY = "autosave"  # in a checkpoint's metadata: what the next session should know
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, datetime, date, timedelta})
# A text is put by for the background's clock only if making it takes less than this part of the time between two.
_SPARE_SHARE = 0.02
_log = logging.getLogger("perdure")


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state at one call."""

    text: bytes
    digest: bytes
    upto: int  # which changes are in it: the session's count at the call
    memory: Memory | None
    later: float | None = None  # when the first change was made that is not in it


class Unsaved(NamedTuple):
    """What a crash now would cost: changes that are not durable yet, and for how long the oldest has not been."""

    thread: str
    changes: int
    seconds: float


class Writer(Protocol):
    """Where snapshots go. At most one is being written and one waits; a newer one takes the place of that."""

    in_background: bool

    def put(self, snapshot: Snapshot) -> None: ...

    def look(self) -> None:
        """The time of the next save by the clock may have changed."""


class Session:
    """One autosave from its beginning to its end."""

    def __init__(self, ctx: Context, line: Line, policy: Policy, initial: Mapping[str, Any] | None, note: str | None):
        self.ctx, self.line, self._policy = ctx, line, policy
        self._initial, self._note = initial, note
        self.lock = threading.RLock()  # around every use of the state, and around making its text
        self.data: dict[Any, Any] = {}
        self.is_open = False
        self.together = 0  # how many `with state.together():` the code is in: no save falls inside of one
        self.writer: Writer
        self._machine: Machine
        self._total = 0  # changes since the beginning
        self.loose: Any = None  # the key of what was handed out and may be changed by now
        self._loose_at = 0.0
        self._is_held = False  # something mutable was handed out or put in: it may change without a word
        self._newest = self._durable = Snapshot(b"", b"", 0, None)  # what was taken last, what is written
        self._digest = b""  # of what was taken last
        self._spare: Snapshot | None = None  # of a change that was not due: for the clock of the background
        self._spare_at = self._cost_s = 0.0
        self._error: Exception | None = None
        self._retry = False
        self._needs_end = False

    # --- its beginning

    def begin(self) -> Flow[None]:
        """Load the newest state, or take the initial one."""
        if any(session.line is self.line for session in _open()):
            raise UsageError(
                f"this handle of thread {self.line.name!r} is in an autosave already, and the two would undo each "
                "other's changes: use its state"
            )
        codec, memory, died = self.ctx.codec, None, False
        try:
            _, loaded, _ = yield from flows.load(self.ctx, self.line)
        except ThreadDeleted:
            raise
        except NotFound:
            # A copy: what is done with it here is no change of what the caller has.
            self.data = decode(encode(dict(self._initial or {}), codec), codec)
        else:
            self.data = decode(loaded.data, codec)
            if not isinstance(self.data, dict):
                raise UsageError(
                    f"the newest state of thread {self.line.name!r} is a {type(self.data).__name__}, and autosave "
                    "keeps a mapping: use save(), or another thread"
                )
            self._digest = self._newest.digest = _digest(loaded.data)
            memory, died = _remembered(loaded.record.metadata)
        self._machine = self._policy.start(self.ctx.ticks(), memory, died=died)
        self._needs_end = died and self._machine.memory(self.ctx.ticks()) is not None
        self.is_open = True
        with _sessions_lock:
            _sessions.add(self)

    # --- what its user does; with the lock

    def use(self) -> None:
        """Something is asked of the state. What was handed out before may have been changed: that counts now."""
        if self.loose is not None:
            self.loose = None
            self.changed()

    def hand_out(self, key: Any, value: Any) -> Any:
        if type(value) not in _IMMUTABLE and self.is_open:
            self.loose, self._loose_at = key, self.ctx.ticks()
            if not self._is_held:
                self._is_held = True
                self.writer.look()
        return value

    def before_change(self, key: Any = None) -> None:
        if not self.is_open:
            raise UsageError(
                f"this autosave of thread {self.line.name!r} has ended: what is changed now would not be saved"
            )
        if self.loose is not None:
            self._total += self.loose != key  # taken out to be put back: one change, not two
            self.loose = None

    def changed(self, count: int = 1, value: Any = None) -> None:
        """So many changes were made: save if that makes it worth while."""
        now = self.ctx.ticks()
        self._total += count
        self._is_held = self._is_held or type(value) not in _IMMUTABLE
        if count and self._newest.later is None:
            self._newest.later = now
            self.writer.look()
        if self.together:
            return
        self.raise_error()
        if self._retry or self._machine.due(now, self._total - self._newest.upto):
            self.take(now)
        elif self.writer.in_background and self._machine.due_at() is not None:
            self._put_by(now)

    def take(self, now: float, *, memory: Memory | None = None, always: bool = False) -> None:
        """Save the state as it is now, unless that is what was saved last."""
        snapshot = self._snapshot(memory or self._machine.memory(now))
        self._spare = None
        if snapshot.digest == self._digest and not always:
            self._newest.upto, self._newest.later, self._retry = self._total, None, False
            self._machine.saved(self.ctx.ticks(), None)
            return
        self._hand_over(snapshot, now)

    def _hand_over(self, snapshot: Snapshot, now: float, stall_s: float | None = None) -> None:
        before, self._newest = self._newest, snapshot
        try:
            self.writer.put(snapshot)
        except BaseException:
            before.later, self._newest = before.later or now, before
            raise
        self._digest, self._retry, self._needs_end = snapshot.digest, False, snapshot.memory is not None
        ended = self.ctx.ticks()
        self._machine.saved(ended, ended - now if stall_s is None else stall_s)

    def _snapshot(self, memory: Memory | None) -> Snapshot:
        started = self.ctx.ticks()
        text = encode(self.data, self.ctx.codec, moving=True)
        snapshot = Snapshot(text, _digest(text), self._total, memory)
        self._cost_s = self.ctx.ticks() - started
        return snapshot

    def _put_by(self, now: float) -> None:
        """Keep the text of a state that is not due yet: the background's clock must not look at a live one."""
        if now - self._spare_at >= self._cost_s / _SPARE_SHARE:
            self._spare, self._spare_at = self._snapshot(self._machine.memory(now)), now
            self.writer.look()

    def finish(self) -> None:
        """The last save, if there is anything to save. Also marks the end, for a policy that learns from ends."""
        now = self.ctx.ticks()
        if self.loose is not None:
            self.loose = None
            self._total += 1
        if self._error is not None:
            kind, name = type(self._error).__name__, self.line.name
            found = event("autosave.failed", thread=name, error=kind)
            _log.warning("thread %r: an autosave failed (%s); the state is saved again", name, kind, extra=found)
            self._error = None
        if not self._digest and not self.data:
            return  # a new thread, and nothing was put into its state
        memory = self._machine.memory(now)
        marked = None if memory is None else {**memory, "ended": True}
        self.take(now, memory=marked, always=self._needs_end or self._retry)

    # --- what its writer does

    def write(self, snapshot: Snapshot) -> Flow[None]:
        metadata = None if snapshot.memory is None else {KEY: snapshot.memory}
        yield from flows.save(self.ctx, self.line, snapshot.text, note=self._note, metadata=metadata)
        snapshot.text = b""
        if snapshot.upto >= self._durable.upto:
            self._durable = snapshot

    def failed(self, snapshot: Snapshot, error: Exception) -> None:
        """The background could not write it. The next change says so, and the one after that tries again."""
        with self.lock:
            if snapshot is not self._newest:
                return  # a newer one, which holds everything that this one does, comes next
            durable = self._durable
            self._newest, self._digest = durable, durable.digest
            durable.later = durable.later or self.ctx.ticks()
            self._error, self._retry = error, True

    def timer_s(self, *, live: bool) -> float | None:
        """How long until the clock alone makes a save due; None: it does not. `live`: the state itself can be looked at
        then; else there must be a text that was put by."""
        due_at = self._machine.due_at()
        waits = (self._is_held or self._newest.later is not None) if live else self._spare is not None
        is_on = waits and self.is_open and not self.together
        return max(0.0, due_at - self.ctx.ticks()) if is_on and due_at is not None else None

    def ring(self, *, live: bool) -> None:
        """The time has come: save the state as it is (`live`), or the text that was put by."""
        with self.lock:
            now = self.ctx.ticks()
            if not self.is_open or self.together:
                return
            spare, self._spare = self._spare, None
            try:
                if live:
                    self.take(now)
                elif spare is not None and spare.digest != self._digest:
                    spare.later = self._newest.later if spare.upto < self._total else None
                    self._hand_over(spare, now, self._cost_s)
                else:
                    self._machine.saved(now, None)
            except Exception as error:
                self._machine.saved(now, None)  # not again at once
                self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # --- what others ask

    def unsaved(self) -> Unsaved:
        durable, loose = self._durable, self.loose is not None
        since = durable.later if durable.later is not None else self._loose_at if loose else None
        seconds = 0.0 if since is None else max(0.0, self.ctx.ticks() - since)
        changes = self._total - durable.upto + loose
        return Unsaved(self.line.name, changes if since is not None else 0, seconds)

    def end(self) -> None:
        self.is_open = False
        with _sessions_lock:
            _sessions.discard(self)


def _digest(text: bytes) -> bytes:
    return blake3(text).digest(16)


def _remembered(metadata: str | None) -> tuple[Memory | None, bool]:
    """What the last session left, and whether it ended without an end."""
    known = orjson.loads(metadata).get(KEY) if metadata else None
    if not isinstance(known, dict):
        return None, False
    return known, known.get("ended") is not True


_sessions: WeakSet[Session] = WeakSet()
_sessions_lock = threading.Lock()


def _open() -> list[Session]:
    with _sessions_lock:
        return list(_sessions)


def open_sessions(ctx: Context) -> list[Session]:
    """The autosaves of a store, as one tenant sees it, that are open in this process."""
    return [
        session
        for session in _open()
        if session.ctx.driver is ctx.driver and session.ctx.tenant_name == ctx.tenant_name
    ]
