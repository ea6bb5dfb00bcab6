"""One run while this process has it: its journal as it was read, what is being written, and why it must stop.

A session writes only with the fence that it claimed. If a write finds the fence moved, another process has the run:
`stop` is set, and every further journal call raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any

from perdure.errors import LeaseLost, NonDeterministic, OutcomeUnknown, StoreError, Unavailable
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_statements, out_of_line, read_blob
from perdure.runs.journal.entries import (
    CHANGE,
    DONE,
    KIND_NAMES,
    NOTE,
    SPAWN,
    VALUE,
    Entry,
    Recorded,
    completion,
    entry_digest,
    pack,
    squeeze,
    unsqueeze,
)
from perdure.runs.journal.index import JournalIndex
from perdure.runs.journal.rows import Hold, Line, RunRow
from perdure.runs.session import points
from perdure.runs.session.acting import Act, CannotWait, Pause, Wait
from perdure.runs.session.requests import Interrupted, stop_for
from perdure.runs.session.scope import Scope, Unwind
from perdure.storage.base import ConstraintFailed
from perdure.storage.cells import JOURNAL
from perdure.storage.program import Batch, Program, Rows, Sql, Transaction, read
from perdure.threads.context import Context
from perdure.values.codec import decode, encode

if TYPE_CHECKING:
    from perdure.runs.calls.state import StateManager

LEASE_US = 30_000_000
# A database that is away: so long we try to write down.
_PATIENCE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, None)
_HAS_ROW = Sql(
    "SELECT body FROM journal WHERE tenant = :tenant AND run = :run AND seq = :seq AND kind = :kind", opens={0: JOURNAL}
)
_CARRIED_S = 0.0005  # how soon to look again whether another branch has written what was put off
Beside = Callable[[], Generator[Batch, list[Rows], Any]]
Fenced = Callable[[Hold], Program[Any]]  # an operation that writes nothing if the fence has moved
_HOLDS = Sql(
    """SELECT run FROM run WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'
    {for_update}"""
)
_ANSWERS = (DONE, CHANGE, VALUE, NOTE, SPAWN)


class ReplayEnd(Unwind):
    """Replay has come to the first call that is not recorded."""

    waits = True

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"{name} at {path} is not recorded")
        self.path, self.name = path, name


class Session:
    """A claimed run in this process."""

    ahead_us = 0  # a drill lets time pass faster: nobody wants to wait for a sleep of a day

    def __init__(
        self,
        ctx: Context,
        tenant: int,
        row: RunRow,
        *,
        is_async: bool,
        lease_us: int = LEASE_US,
        replay: bool = False,
    ) -> None:
        self.ctx = ctx
        self.tenant = tenant
        self.row = row
        self.hold = Hold(tenant, row.run, row.fence)
        self.is_async = is_async
        self.lease_us = lease_us
        self.replay = replay
        self.root = Scope(self, is_async=is_async)
        self.stop: BaseException | None = None
        self.waits: list[Wait] = []
        self.index = JournalIndex()
        self.replay_end: ReplayEnd | None = None  # the first call that replay found no answer to
        self.on_replay_end: Callable[[], None] | None = None
        self.patches: dict[str, bool] = {}
        self.state: StateManager | None = None  # once the code has asked for it: perdure.state()
        self.replayed_lines: set[int] = set()  # handles of threads whose saves were answered from the journal
        self.stuck_by: BaseException | None = None
        self.can_park = True  # False where only calls are ours, not the code around them: a task of an adapter
        self.unawaited: dict[object, Any] = {}  # coroutines of steps and effects that have not begun
        self.alive = True
        self.undoing = False
        self.skew_us = 0  # how far the database's clock is ahead of ours
        self.busy = 0
        self.acting: set[Any] = set()  # of an async run: the tasks whose effects are under way
        self.closing: BaseException | None = None  # raised by branches that outlive the function
        self.renewed_us = 0  # when the lease was last renewed
        self.on_stop: Callable[[], None] | None = None
        self.on_chunk: Callable[[str, str, Any], None] | None = None
        self.supervisor: Any = None  # of an async run: runs/session/tasks.py
        self.strays: list[Any] = []  # of a sync run: teams that nobody waits for (runs/parallel/parallel_threads.py)
        self.beaten: list[str] = []  # prefixes of branches whose waits do not count any more
        self.key_head = b""  # what the keys of all its effects begin with: runs/calls/effects.py
        self._pending: list[tuple[int, Entry]] = []
        self._put_off = self._durable = 0  # how many entries were put off, and how many of these are written
        self._carried: list[tuple[int, Entry]] | None = None  # those that a branch is writing right now
        self._broken: StoreError | None = None  # they could not be written
        self._lock = threading.Lock()
        self.counting = threading.Lock()  # of what one parallel branch decides for all of them

    def __repr__(self) -> str:
        return f"<Session of run {self.row.id!r}, fence {self.row.fence}>"

    # --- what was recorded

    def recorded(self, path: str, name: str, digest: bytes | None) -> Sequence[Recorded]:
        """What the journal has at a path. Raises NonDeterministic if it is another call, or has other arguments."""
        found = self.index.at(path)
        if not found:
            if self.replay:
                raise self.end_of_replay(path, name)
            return found
        entry = found[0].entry
        if entry.name != name:
            raise self._differs(path, f"{entry.name}()", f"{name}()")
        if digest is not None and entry.input is not None and entry.input != digest:
            raise self._differs(path, f"{name}() with arguments {entry.input.hex()}", f"arguments {digest.hex()}")
        if self.replay and not any(recorded.kind in _ANSWERS for recorded in found):
            raise self.end_of_replay(path, name)  # it began, and how it ended is not recorded
        self.index.read(path)
        if self.state is not None:
            self.state.replayed(found)
        return found

    def end_of_replay(self, path: str, name: str) -> ReplayEnd:
        """What ends a replay at a call that has no answer yet. The first one counts, whatever the code does with it."""
        end = ReplayEnd(path, name)
        if self.replay_end is None:
            self.replay_end = end
            if self.on_replay_end is not None:
                self.on_replay_end()
        return end

    def _differs(self, path: str, expected: str, actual: str) -> NonDeterministic:
        error = NonDeterministic(
            f"run {self.row.id!r} did not go the way that its journal says: at step {path} it did {expected} before, "
            f"and now {actual}. Either the code was changed: guard the change "
            "with perdure.patched(), or finish the run with the old code; or it depends on what is not recorded: "
            "time, chance, a global, the order of a set, what a step changed in its arguments. Use perdure.now(), "
            "perdure.random(), or what a step returns",
            path=path,
            expected=expected,
            actual=actual,
        )
        self.stop = self.stop or error
        return error

    def ended_early(self, scope: Scope, how: str) -> NonDeterministic | None:
        """What it means if the function, or a branch, has ended now: that it came further before is on record. None: it
        did not."""
        # It has numbered the branches that it made: those that lost a race, or were cancelled, need not come as far.
        prefix = scope.prefix
        numbers = [
            (int(number), path)
            for path in (self.index.unread() if self.can_park else ())
            if path.startswith(prefix) and (number := path[len(prefix) :].partition(".")[0]).isdigit()
        ]
        ahead, path = min(numbers, default=(0, ""))
        return self._differs(path, f"{self.index.at(path)[0].entry.name}()", how) if ahead > scope.count else None

    def never_awaited(self) -> list[str]:
        """The steps and effects that were called, and not awaited: they did not run. They are closed."""
        left = [coroutine for coroutine in self.unawaited.values() if getcoroutinestate(coroutine) == CORO_CREATED]
        for coroutine in left:
            coroutine.close()
        return [coroutine.__qualname__ for coroutine in left]

    def final(self, found: Sequence[Recorded]) -> Entry | None:
        """How a call ended, if that stands: where others run the code again after an error, an error does not."""
        ended = completion(found)
        more = None if ended is None else ended.more
        if more is not None and "error" in more and not self.can_park and not (more.get("done") or more.get("doubt")):
            return None
        return ended

    def value(self, entry: Entry) -> Act[Any]:
        """The value that an entry holds, from its body or from a blob."""
        return self.decoded((yield from self.text(entry)))

    def text(self, entry: Entry) -> Act[bytes]:
        if entry.value is not None:
            return unsqueeze(entry.value)
        if entry.more is not None and "blob" in entry.more:
            body = yield from read(partial(read_blob, self.tenant, entry.more["blob"]))
            return unsqueeze(body)
        return b"null"

    def decoded(self, text: bytes) -> Any:
        return decode(text, self.ctx.codec)

    def encoded(self, value: Any) -> bytes:
        return squeeze(encode(value, self.ctx.codec))

    # --- what is being written

    def later(self, kind: int, entry: Entry) -> None:
        """Write an entry with the next one: for what nobody outside can have seen yet."""
        if self.replay:
            raise self.end_of_replay(entry.path, entry.name)
        if self.state is not None and kind == DONE:
            entry = self.state.delta_into(entry)
        with self._lock:
            self._pending.append((kind, entry))
            self._put_off += 1

    @property
    def has_pending(self) -> bool:
        return self._durable < self._put_off

    def flush(self) -> Act[None]:
        """Write what was put off: before a body runs, so that the journal never lags behind the world."""
        target = self._put_off
        while self._durable < target and (yield from self._until_carried(target)):
            if self._durable < target:
                yield from self.record()

    def _until_carried(self, target: int) -> Act[bool]:
        """Another branch is writing what was put off here: wait until it has. False: that cannot be waited for."""
        while self._durable < target:
            if self._broken is not None:
                raise self._broken
            if self._carried is None:
                break
            try:
                yield Pause(_CARRIED_S, for_others=True)
            except CannotWait:
                # Then it is written twice and read as one: such an entry says the same at the same path.
                with self._lock:
                    copies = [draft for draft in (*(self._carried or ()), *self._pending) if draft[0] != NOTE]
                yield from self._write((), copies)
                return False
        return True

    def record(
        self,
        *drafts: tuple[int, Entry],
        beside: Beside | None = None,
        stateless: bool = False,
        other: str | None = None,
    ) -> Act[None]:
        """Write entries, and whatever else belongs to them, in one transaction, and what was put off with them. Durable
        when it returns. `other` is the id of a run that `beside` writes to."""
        if self.replay and drafts:
            raise self.end_of_replay(drafts[0][1].path, drafts[0][1].name)
        if self.state is not None and drafts and not stateless:  # what changed in the state goes with it
            yield from self.state.recording(drafts, beside, partial(self.record, stateless=True, other=other))
            return
        target = self._put_off
        if not target:  # nothing ever was
            yield from self._write((), drafts, beside, other)
            return
        # The end of a step brings nothing to light that its beginning did not: it need not wait for what was put off.
        is_end = beside is None and bool(drafts) and all(kind == DONE for kind, _ in drafts)
        while True:
            with self._lock:
                is_carrier = self._carried is None and bool(self._pending)
                if is_carrier:
                    put_off, self._pending = self._pending, []
                    self._carried, until = put_off, self._put_off
            if is_carrier or is_end or self._durable >= target or not (yield from self._until_carried(target)):
                break
        if not is_carrier:
            yield from self._write((), drafts, beside, other)
            return
        try:
            yield from self._write(put_off, drafts, beside, other)
            self._durable = until
        except StoreError as error:
            self._broken = error
            raise
        except BaseException:
            with self._lock:  # what goes with it refused, and undid the transaction: this is still to be written
                self._pending[:0] = put_off
            raise
        finally:
            self._carried = None

    def _write(
        self,
        put_off: Sequence[tuple[int, Entry]],
        drafts: Sequence[tuple[int, Entry]],
        beside: Beside | None = None,
        other: str | None = None,
    ) -> Act[None]:
        taken = [*put_off, *drafts] if put_off else drafts
        if not taken:
            return
        lines, recorded, statements, digest = self._lines(taken)
        kind, entry = drafts[0] if drafts else taken[-1]
        if points.hook is not None:
            points.reach(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        if beside is None and not statements:
            op: Fenced = partial(rows.append, lines=lines)
        else:
            op = partial(_append_beside, lines=lines, statements=statements, beside=beside, other=other)
        try:
            answer = yield from self.surely(op, partial(self._is_written, lines[-1]))
        except StoreError as error:
            self.stop = self.stop or error  # the code has seen what is not recorded: it must not go on
            raise
        except Exception:
            self.index.release(len(lines))  # what goes with it refused, and undid the transaction
            raise
        if points.hook is not None:
            points.reach(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")
        if answer is None:
            self.lose()
        assert answer is not None
        self.index.add(recorded, digest)
        if answer[0] is not None:
            self.heed(answer[0])

    def _lines(self, taken: Sequence[tuple[int, Entry]]) -> tuple[list[Line], list[Recorded], list[Any], int]:
        """Drafts as rows, as what the index keeps of them, the statements that store large values apart, and the sum of
        the rows' hashes."""
        lines, recorded, statements, digest = [], [], [], 0
        for seq, (kind, entry) in enumerate(taken, self.index.reserve(len(taken))):
            if entry.value is not None and len(entry.value) >= BLOB_MIN_BYTES:
                statements += blob_statements(self.tenant, self.row.run, entry.value)
                entry = out_of_line(entry)
            body = pack(entry)
            digest += entry_digest(self.row.run, seq, kind, body)
            lines.append(Line(seq, kind, body))
            recorded.append(Recorded(seq, kind, entry))
        return lines, recorded, statements, digest

    def closing_lines(self) -> Act[list[Line]]:
        """What was put off, for the transaction that ends the session."""
        if any(len(entry.value or b"") >= BLOB_MIN_BYTES for _, entry in self._pending):
            yield from self.flush()  # it is more than a line
        with self._lock:
            taken, self._pending = self._pending, []
            self._durable = self._put_off
        lines, recorded, _, digest = self._lines(taken)
        self.index.add(recorded, digest)
        return lines

    def write_beside(self, beside: Beside) -> Act[None]:
        """Write something for the run that is no entry of its journal, and may be written twice. Raises LeaseLost."""
        if not (yield from self.surely(partial(_beside, beside=beside), _unknown)):
            self.lose()

    def surely(self, op: Fenced, happened: Callable[[], Act[bool]]) -> Act[Any]:
        """Commit `op`, retrying while the database is unavailable. If the acknowledgement of the COMMIT was lost, check
        first whether it landed. Every write of a run comes through here, and gets the run's fence.

        A body has run by now: giving up at once would leave an effect in doubt that we know the end of.
        """
        unknown = doubted = False
        for pause in _PATIENCE_PAUSES:
            try:
                if unknown and (yield from happened()):
                    return (None,)
                unknown = False
                return (yield Transaction(partial(op, self.hold), write=True))
            except OutcomeUnknown:
                if pause is None:
                    raise
                unknown = doubted = True
            except ConstraintFailed:
                # It is there: the first attempt was still on its way when we looked.
                if doubted and (yield from happened()):
                    return (None,)
                raise
            except Unavailable:
                if pause is None:
                    raise
            yield Pause(pause)
        raise AssertionError("the last attempt returns or raises")

    def _is_written(self, line: Line) -> Act[bool]:
        key = {"tenant": self.tenant, "run": self.row.run, "seq": line.seq, "kind": line.kind}
        body = yield from read(partial(_row, key))
        return bool(body == line.body)

    def lose(self) -> None:
        """Another process has the run."""
        self.stop = LeaseLost(
            f"run {self.row.id!r} was taken over by another process (or cancelled) while this one held it; this one "
            "stops here. What it had recorded stands, and what it had not is decided there"
        )
        if self.on_stop is not None:
            self.on_stop()
        raise self.stop

    def interrupt(self, why: str = "whoever ran it was interrupted") -> None:
        """The run is given back: its code ends at its next journal call, async code at once."""
        if self.stop is None:
            self.stop = Interrupted(why)
            if self.on_stop is not None:
                self.on_stop()

    def heed(self, request: str | None) -> None:
        """An operator asks for something: the next journal call ends the code."""
        if request is not None and self.stop is None and not (self.undoing and request == "rollback"):
            self.stop = stop_for(request)
            if self.stop is not None and self.on_stop is not None:
                self.on_stop()

    # --- time

    def shared_clock_us(self) -> int:
        """About the time by that clock, without asking: for deadlines."""
        return self.ctx.clock_us() + self.skew_us + self.ahead_us

    def now_us(self) -> Act[int]:
        """The time by the clock that all owners share."""
        if self.ctx.driver.dialect == "sqlite":
            return self.ctx.clock_us() + self.ahead_us
        return (yield from read(partial(_now, self.ctx.clock_us()))) + self.ahead_us

    async def loop_sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    async def suspend(self, wait: Wait) -> None:
        """In an async run: wait until there may be news, or the run parks."""
        await self.supervisor.suspend(wait)


def _append_beside(
    hold: Hold,
    lines: list[Line],
    statements: list[Any],
    beside: Beside | None,
    other: str | None,
) -> Program[Any]:
    locks = [] if other is None else [rows.LOCK_TWO(tenant=hold.tenant, run=hold.run, other=other)]
    answers = yield Batch(*locks, *rows.append_statements(hold, lines))
    appended = answers[len(locks)]
    if not appended:
        return None
    if statements:
        yield Batch(*statements)
    if beside is not None:
        yield from beside()
    return appended[0]


def _beside(hold: Hold, beside: Beside) -> Program[bool]:
    [held] = yield Batch(_HOLDS(**hold._asdict()))
    if held:
        yield from beside()
    return bool(held)


def _unknown() -> Act[bool]:
    """For what may be written twice, there is no need to look."""
    yield from ()
    return False


def _row(key: dict[str, int]) -> Program[bytes | None]:
    [found] = yield Batch(_HAS_ROW(**key), last=True)
    return found[0][0] if found else None


def _now(now: int) -> Program[int]:
    [found] = yield Batch(rows.NOW(now=now), last=True)
    return int(found[0][0])
