"""`thread.autosave(policy)`: a state that is changed like a dict, and saved when its policy is due and at the end.

The values in the state are the caller's own objects, not copies or proxies. Setting or deleting a key is a change.
Reading a mutable value (`state["messages"]`) counts as a change too, because it usually is one. It counts at the next
use of the state, when the change is complete. If nothing changed, the text is the same and nothing is written. Changes
through another reference (`messages.append(…)`) are part of every save; `state.changed()` counts them.

A state is encoded during a use of it, on the calling thread, under a lock that all reads and changes take. So
threads that set keys of one state never tear a save. A thread that changes a value in place while another thread uses
the state can tear one, because nothing is copied. The background thread writes texts and never reads the live state. At
most one text is being written and one waits; a newer one replaces the waiting one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from blake3 import blake3

from perdure.errors import NotFound, PerdureError, ThreadDeleted, UsageError
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive
from perdure.threads import failures, flows
from perdure.threads.autosave_policies import Adaptive, Policy, check_change_count
from perdure.threads.checks import check_note
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.failures import AutosaveInfo, Session
from perdure.threads.save_engine import save
from perdure.threads.saves import Save, journal_of
from perdure.values.codec import decode, encode

_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, datetime, date, timedelta})
_log = logging.getLogger("perdure")


class Unsaved(NamedTuple):
    """The changes that a crash now would lose, and the seconds since everything was durable."""

    thread: str
    changes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Snapshot:
    """The state at one moment (`at`): its text until that is written, and the number of changes it includes."""

    text: bytes
    digest: bytes
    upto: int
    at: float


class AutoState(MutableMapping[str, Any]):
    """The state of an autosave: a mutable mapping whose values are your own objects.

    Use it once, as `with thread.autosave(policy) as state:` or with `async with`.
    """

    def __init__(
        self,
        ctx: StoreContext,
        cursor: Cursor,
        policy: Policy,
        note: str | None,
        initial: Mapping[str, Any] | None,
        background: bool,
    ) -> None:
        if not hasattr(policy, "due"):
            raise UsageError(f"autosave({policy!r}): expected a policy, such as perdure.autosave.every(5)")
        if initial is not None and not isinstance(initial, Mapping):
            raise UsageError(f"autosave(initial=…) takes a mapping, not {type(initial).__name__}")
        self._ctx, self._cursor, self._policy, self._note = ctx, cursor, policy, check_note(note)
        self._initial, self._background = initial, background
        self._lock = threading.RLock()  # held while the state is read, changed or encoded
        self._data: dict[Any, Any] = {}
        self._is_open = self._was_open = False
        self._total = 0  # changes since the beginning
        self._handed_out = False  # a mutable value was read, and may have been changed since
        self._cost_s = 0.0  # seconds that the last save blocked the caller
        self._newest = self._durable = _Snapshot(b"", b"", 0, 0.0)
        self._session: Session | None = None  # adaptive policies: observes failures
        self._is_marked = False  # the store knows that the session is open
        self._error: Exception | None = None  # of the background writer: raised at the next change
        self._writer: _BackgroundWriter | None = None

    # --- the mapping

    def __getitem__(self, key: str) -> Any:
        with self._lock:
            self._count_handed_out()
            value = self._data[key]
            self._handed_out = self._is_open and type(value) not in _IMMUTABLE
            return value

    def __setitem__(self, key: str, value: Any) -> None:
        with self._changing():
            self._data[key] = value

    def __delitem__(self, key: str) -> None:
        with self._changing():
            del self._data[key]

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter([*self._data])  # the keys of one moment: other threads may add and remove some

    def __len__(self) -> int:
        with self._lock:
            return len(self._data)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._data

    def __repr__(self) -> str:
        with self._lock:
            return f"AutoState({self._data!r})"

    def setdefault(self, key: str, default: Any = None) -> Any:
        with self._lock:
            if key not in self._data:
                self[key] = default
            return self[key]

    def update(self, other: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any) -> None:  # type: ignore[override]
        """Set several keys as one change: no save falls between them."""
        with self._changing():
            self._data.update({**dict(other), **more})

    def __ior__(self, other: Mapping[str, Any]) -> AutoState:
        self.update(other)
        return self

    def clear(self) -> None:
        with self._changing():
            self._data.clear()

    # --- saving and counting by the caller

    def changed(self, count: int = 1) -> None:
        """Count changes that were made through another reference to a value of the state."""
        check_change_count(count, "state.changed")
        with self._lock:
            self._handed_out = False
            with self._changing(count):
                pass

    def save(self) -> None:
        """Save now, whatever the policy. The state is durable when this returns."""
        self._save_now()
        if self._writer is not None:
            self._writer.flush()

    async def asave(self) -> None:
        """`save`, awaited."""
        self._save_now()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.flush)

    @property
    def unsaved(self) -> Unsaved:
        """The `changes` that a crash now would lose, made in the last `seconds`."""
        durable = self._durable
        changes = self._total - durable.upto + self._handed_out
        return Unsaved(self._cursor.name, changes, max(0.0, self._ctx.ticks() - durable.at) if changes else 0.0)

    # --- noticing changes; the caller holds the lock

    def _count_handed_out(self) -> None:
        """Count one change if a mutable value was read before: it may have been changed since."""
        if self._handed_out:
            self._handed_out = False
            self._count(1)

    @contextmanager
    def _changing(self, count: int = 1) -> Iterator[None]:
        with self._lock:
            if not self._is_open:
                raise UsageError(f"this autosave of thread {self._cursor.name!r} has ended: changes would not be saved")
            self._total += self._handed_out
            self._handed_out = False
            yield
            self._count(count)

    def _count(self, count: int) -> None:
        """Count changes, and save if the policy is due."""
        self._total += count
        self._raise_error()
        newest = self._newest
        if self._policy.due(self._total - newest.upto, self._ctx.ticks() - newest.at, self._cost_s):
            self._take()

    # --- saving; the caller holds the lock

    def _save_now(self) -> None:
        with self._changing(0):
            self._raise_error()
            self._take()

    def _take(self) -> None:
        """Save the state as it is now, unless it equals the last save."""
        now = self._ctx.ticks()
        text = encode(self._data, self._ctx.codec)
        snapshot = _Snapshot(text, blake3(text).digest(16), self._total, now)
        if snapshot.digest == self._newest.digest:
            self._newest.upto, self._newest.at = self._total, now
            return
        if self._writer is not None:
            self._newest = snapshot
            self._writer.put(snapshot)
        else:
            drive(self._ctx.driver, self._write(snapshot))
            self._newest = snapshot
        self._cost_s = self._ctx.ticks() - now

    def _write(self, snapshot: _Snapshot) -> Flow[None]:
        request = Save(self._ctx, self._cursor, self._note, text=snapshot.text)
        yield from save(request)
        snapshot.text = b""
        self._durable = snapshot
        if self._session is not None and not self._is_marked:
            yield from self._observe(is_end=False)

    def _observe(self, *, is_end: bool) -> Flow[None]:
        """Record the beginning or the end of the session. A failure to do so is no failure of the state."""
        session, policy = self._session, self._policy
        tenant, thread = (yield from self._ctx.tenant()), self._cursor.thread
        if session is None or not isinstance(policy, Adaptive) or tenant is None or thread is None:
            return
        session = replace(session, tenant=tenant, thread=thread)
        try:
            if is_end:
                yield from failures.ended(session, policy, self._cost_s, self._ctx.clock_us())
            else:
                yield from failures.opened(session, policy, self._cost_s)
                self._is_marked = True
        except PerdureError as error:
            fields = event("autosave.not_observed", thread=self._cursor.name, error=type(error).__name__)
            _log.debug("thread %r: autosave could not note its session", self._cursor.name, extra=fields)

    def _failed(self, snapshot: _Snapshot, error: Exception) -> None:
        """Note that the background could not write a snapshot. The next change raises its error; a later one saves."""
        with self._lock:
            if snapshot is self._newest:  # else a newer snapshot with the same changes is written next
                self._newest, self._error = self._durable, error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # --- beginning and end

    def _begin(self) -> Flow[None]:
        """Load the newest state, or start with a copy of the initial one."""
        if self._was_open:
            raise UsageError("an autosave is for one use: call thread.autosave(…) again")
        if journal_of(self._ctx) is not None:
            raise UsageError(
                "autosave in a durable function would save at other points each time it is replayed: keep its state in "
                "perdure.state(), or use autosave inside a step"
            )
        if any(state._cursor is self._cursor for state in _open_states()):
            raise UsageError(
                f"this handle of thread {self._cursor.name!r} is in an autosave already, and the two would undo each "
                "other's changes: use its state"
            )
        codec = self._ctx.codec
        if isinstance(self._policy, Adaptive):
            self._session = Session(AutosaveInfo(), self._ctx.clock_us(), os.urandom(8).hex())
        try:
            row, loaded, _ = yield from flows.load(self._ctx, self._cursor)
        except ThreadDeleted:
            raise
        except NotFound:
            self._data = decode(encode(dict(self._initial or {}), codec), codec)
        else:
            self._data = decode(loaded.data, codec)
            if not isinstance(self._data, dict):
                raise UsageError(
                    f"the newest state of thread {self._cursor.name!r} is a {type(self._data).__name__}, and autosave "
                    "keeps a mapping: use save(), or another thread"
                )
            self._newest.digest = blake3(loaded.data).digest(16)
            yield from self._learn(row.thread)
        self._newest.at = self._ctx.ticks()
        self._is_open = self._was_open = True
        with _states_lock:
            _states[id(self)] = self

    def _learn(self, thread: int) -> Flow[None]:
        """Adapt the policy to what earlier sessions of the thread have measured."""
        tenant = yield from self._ctx.tenant()
        if self._session is None or not isinstance(self._policy, Adaptive) or tenant is None:
            return
        now, mark = self._session.began_us, self._session.mark
        ours = [state._session.mark for state in _open_states() if state._session is not None]
        self._session = yield from failures.begin(tenant, thread, now, mark, ours.__contains__)
        self._policy = self._session.policy(self._policy)
        self._cost_s = self._session.before.cost_s

    def _finish(self) -> Exception | None:
        """Save a last time, unless the state is empty and unsaved. Refuse later changes. Return the error, or None."""
        with self._lock:
            if self._error is not None:
                _log_failure(self._cursor.name, self._error, "an autosave failed; the state is saved again")
                self._error = None
            try:
                if self._newest.digest or self._data:
                    self._save_now()
            except Exception as error:
                self._end()
                return error
            finally:
                self._is_open = False
                with _states_lock:
                    _states.pop(id(self), None)
        return None

    def _end(self) -> Exception | None:
        """Wait for the background to finish. Return its error."""
        if self._writer is not None:
            self._writer.close()
        if self._is_marked:
            drive(self._ctx.driver, self._observe(is_end=True))
        return self._error

    def __enter__(self) -> Self:
        drive(self._ctx.driver, self._begin())
        self._writer = _BackgroundWriter(self) if self._background else None
        return self

    async def __aenter__(self) -> Self:
        await adrive(self._ctx.driver, self._begin())
        self._writer = _BackgroundWriter(self)  # a change cannot be awaited, so the event loop's thread never writes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raise_at_end(self._finish() or self._end(), error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raise_at_end(self._finish() or await asyncio.to_thread(self._end), error)

    def _raise_at_end(self, problem: Exception | None, error: BaseException | None) -> None:
        """Raise the error of the last save. If the body raised, add it to that error as a note instead."""
        if problem is None:
            return
        _log_failure(self._cursor.name, problem, "the last autosave failed")
        if error is None:
            raise problem
        message = str(problem) if isinstance(problem, PerdureError) else type(problem).__name__
        error.add_note(f"and the last autosave of thread {self._cursor.name!r} failed: {message}")


class _BackgroundWriter:
    """A thread that writes snapshots in order, so that changing the state waits only for encoding."""

    def __init__(self, state: AutoState) -> None:
        self._state = state
        # `with` enters this lock, not the condition: Ctrl-C can interrupt the condition's methods before they release.
        self._lock = threading.RLock()
        self._wakeup = threading.Condition(self._lock)
        self._waiting: _Snapshot | None = None
        self._is_busy = self._is_closing = False
        # A daemon, because a database that hangs must not keep the process alive. Leaving the `with` waits for it.
        self._thread = threading.Thread(target=self._run, name="perdure-autosave", daemon=True)
        self._thread.start()

    def put(self, snapshot: _Snapshot) -> None:
        with self._lock:
            self._waiting = snapshot
            self._wakeup.notify_all()

    def flush(self) -> None:
        """Wait until everything is written. Raises the error of the last write."""
        with self._lock:
            self._wakeup.wait_for(lambda: self._waiting is None and not self._is_busy)
        self._state._raise_error()

    def close(self) -> None:
        """Write the snapshot that still waits, and end the thread."""
        with self._lock:
            self._is_closing = True
            self._wakeup.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_busy = False
                self._wakeup.notify_all()
                self._wakeup.wait_for(lambda: self._waiting is not None or self._is_closing)
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    return
                self._is_busy = True
            try:
                drive(self._state._ctx.driver, self._state._write(snapshot))
            except Exception as error:
                self._state._failed(snapshot, error)


def _log_failure(thread: str, problem: Exception, message: str) -> None:
    kind = type(problem).__name__
    _log.error("thread %r: %s (%s)", thread, message, kind, extra=event("autosave.failed", thread=thread, error=kind))


_states: WeakValueDictionary[int, AutoState] = WeakValueDictionary()  # by id: a mapping has no hash
_states_lock = threading.Lock()


def _open_states() -> list[AutoState]:
    with _states_lock:
        return list(_states.values())


def unsaved_changes(ctx: StoreContext) -> tuple[Unsaved, ...]:
    """Return the unsaved changes of each autosave of a store's tenant that is open in this process."""
    return tuple(
        state.unsaved
        for state in _open_states()
        if state._ctx.driver is ctx.driver and state._ctx.tenant_name == ctx.tenant_name
    )
