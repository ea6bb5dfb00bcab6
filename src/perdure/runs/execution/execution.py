"""The execution of one claimed run: its journal, its pending writes, and why it must stop.

An execution writes only with the fence that it claimed. If a write finds the fence moved, another process has the run.
Then `stop` is set, and every further journal call raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import LeaseLost, NonDeterministic
from perdure.runs.execution.journal_writer import JournalWriter
from perdure.runs.execution.landed_writes import LandedWrites
from perdure.runs.execution.matching import BranchThreads
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.policy import CallPolicy
from perdure.runs.execution.scope import Scope, Unwind
from perdure.runs.execution.unwinds import Expired, Interrupted, stop_for
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import (
    CHANGE,
    DONE,
    NAMING,
    NOTE,
    SPAWN,
    VALUE,
    Entry,
    EntryInStore,
    Recorded,
    compress,
    decompress,
)
from perdure.runs.journal.index import JournalIndex, branch_of, outer_branch
from perdure.runs.journal.journal import read_value
from perdure.runs.journal.mail import MailRow
from perdure.runs.journal.rows import FenceToken
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Program, read
from perdure.threads.context import Cursor, StoreContext
from perdure.values.codec import decode, encode

if TYPE_CHECKING:
    from perdure.runs.calls.state import StateManager


class KeptTurn(NamedTuple):
    """What an owner keeps of a member from one turn to the next: the message that waits, and the state's place."""

    row: RunRow
    mail: MailRow | None
    cursor: Cursor
    text: bytes  # of the state
    turns: int  # since the run was claimed


executing: set[object] = set()  # the executions of this process, of all stores
LEASE_US = 30_000_000  # the default of `perdure.open(lease_s=)`
NAMING_KEY_BYTES = 32
_ANSWERS = (DONE, CHANGE, VALUE, NOTE, SPAWN)


class ReplayEnd(Unwind):
    """Ends a replay at the first call that is not recorded."""

    waits = True

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"{name} at {path} is not recorded")
        self.path, self.name = path, name


class Execution:
    """A claimed run in this process."""

    policy = CallPolicy()
    receiver: Any = None  # the object of a durable method
    ahead_us = 0  # a drill sets the clock ahead, so that a sleep of a day takes no time
    shared_naming_key = b""  # a drill gives the tasks of all its runs the same names

    def __init__(
        self,
        ctx: StoreContext,
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
        self.token = FenceToken(tenant, row.run, row.fence)
        self.is_async = is_async
        self.lease_us = lease_us
        self.replay = replay
        self.root = Scope(self, is_async=is_async)
        self.stop: BaseException | None = None
        self.waits: list[Wait] = []
        self.index = JournalIndex()
        self.journal = JournalWriter(self)
        self.replay_end: ReplayEnd | None = None  # at the first call that the journal did not answer
        self.on_replay_end: Callable[[], None] | None = None
        self.patches: dict[str, bool] = {}
        self.kept_values: set[bytes] = set()  # the hashes of large values that are stored, and which the run refers to
        self.state: StateManager | None = None  # set by the first perdure.state()
        self.replayed_cursors: set[int] = set()  # handles of threads whose saves were answered from the journal
        self.unawaited: dict[object, Any] = {}  # coroutines of steps and effects that have not begun
        self.in_worker = False  # True: code that would end the process leaves its run stuck
        self.alive = True
        self.undoing = False
        self.skew_us = 0  # how far the database's clock is ahead of ours
        self.busy = 0
        self.acting: set[Any] = set()  # async runs: the tasks whose effects are under way
        self.closing: BaseException | None = None  # raised in branches that outlive the function
        self.deadline_us: int | None = None  # when the time of the whole run is over
        self.renewed_us = 0  # when the lease was last renewed
        self.on_stop: Callable[[], None] | None = None
        self.resources: Any = None  # what it has opened (calls/resources.py)
        self.stream: Any = None  # a StreamWriter, which takes what its steps emit; None in replays and tasks
        self.emitted = 0  # how many values it has stored
        self.supervisor: Any = None  # async runs: a Supervisor
        self.orphans: list[Any] = []  # sync runs: thread pools that the code does not wait for (parallel/threads.py)
        self.lost_prefixes: list[str] = []  # prefixes of branches whose waits no longer count
        self.threads = BranchThreads()  # sync runs
        self.writes = LandedWrites(self)  # async runs
        self.scopes: dict[str, Scope] = {"": self.root}  # by prefix, while recorded calls lie ahead
        self.adopted: set[str] = set()  # paths of recorded calls that another task of their branch makes now
        self._naming_key = b""
        self.key_head = b""  # common start of the keys of all its effects (runs/calls/effects.py)
        self.turn: Any = None  # an AgentTurn, while a member of a team handles a message
        self.kept: KeptTurn | None = None  # what the turn before has left to this one
        self.addresses: dict[str, Any] = {}  # of a member: the runs that it has sent to, by the names that it used
        self.counting = threading.Lock()  # guards decisions that one parallel branch makes for all

    def __repr__(self) -> str:
        return f"<Execution of run {self.row.id!r}, fence {self.row.fence}>"

    # --- what was recorded

    def recorded(self, path: str, name: str, digest: bytes | None) -> Sequence[Recorded]:
        """Return the journal's rows at a path; empty for a new call.

        Raises NonDeterministic if another call, or other arguments, are recorded there. In a replay, raises ReplayEnd
        if no end is recorded.
        """
        journaled = self.index.at(path)
        if not journaled:
            if self.index.below(f"{path}."):
                raise self._differs(path, "parallel branches", f"{name}()")
            if self.replay:
                raise self.end_of_replay(path, name)
            return journaled
        entry = journaled[0].entry
        if entry.name != name:
            raise self._differs(path, f"{entry.name}()", f"{name}()")
        if digest is not None and entry.args_hash is not None and entry.args_hash != digest:
            raise self._differs(path, f"{name}() with arguments {entry.args_hash.hex()}", f"arguments {digest.hex()}")
        if self.replay and not any(recorded.kind in _ANSWERS for recorded in journaled):
            self.index.reach(path)
            raise self.end_of_replay(path, name)  # the call began, but its end is not recorded
        self.index.read(path)
        if self.state is not None:
            self.state.replayed(journaled)
        return journaled

    def check_branch(self, path: str) -> None:
        """Raise NonDeterministic if a call is recorded where a branch begins. A path is one or the other."""
        if self.index.ahead and (journaled := self.index.at(path)):
            raise self._differs(path, f"{journaled[0].entry.name}()", "a parallel branch")

    def has_scope(self, path: str) -> bool:
        """Return whether this execution has begun the branch of a recorded call."""
        return branch_of(path) in self.scopes

    def may_come_to(self, path: str) -> bool:
        """Return whether the code can still come to a recorded call: it has passed neither the call nor its branch."""
        prefix = branch_of(path)
        while prefix not in self.scopes:
            prefix = outer_branch(prefix)
        scope, number = self.scopes[prefix], path[len(prefix) :].partition(".")[0]
        return number.isdigit() and not scope.is_over and scope.count < int(number)

    def passed_by(self, actual: str, *, can_wait: bool) -> NonDeterministic:
        """Return the error for a new effect that comes before a recorded effect which no other branch comes to."""
        path, *_ = list(self.index.effects_ahead)
        why = "" if can_wait else ", a blocking call that holds up the tasks which may come to it: make it async"
        return self._differs(
            path, f"{self.index.at(path)[0].entry.name}()", f"the new effect {actual} comes first{why}"
        )

    def naming_key(self) -> bytes:
        """Return the secret key of the hashes in task names. It is recorded, so that forks have it too."""
        if not self._naming_key:
            journaled = self.index.at(NAMING)
            if journaled:
                self._naming_key = bytes.fromhex(self.decoded(decompress(journaled[-1].entry.value or b"")))
                return self._naming_key
            self._naming_key = self.shared_naming_key or self.ctx.entropy(NAMING_KEY_BYTES)
            if not self.replay:
                value = self.encoded(self._naming_key.hex())
                self.journal.buffer(VALUE, Entry(NAMING, NAMING, self.ctx.clock_us(), value=value))
        return self._naming_key

    def end_of_replay(self, path: str, name: str) -> ReplayEnd:
        """Return the ReplayEnd for a call without a recorded end.

        The first one is kept in `replay_end`, even if the code catches it.
        """
        end = ReplayEnd(path, name)
        if self.replay_end is None:
            self.replay_end = end
            if self.on_replay_end is not None:
                self.on_replay_end()
        return end

    def _differs(self, path: str, expected: str, actual: str) -> NonDeterministic:
        error = NonDeterministic(
            f"run {self.row.id!r} diverged from its journal at step {path}: recorded {expected}, now {actual}. Either "
            "the code was changed: guard the change with perdure.patched(), or finish the run with the old code; or it "
            "depends on what is not recorded: time, chance, a global, the order of a set, what a step changed in its "
            "arguments. Use perdure.now(), perdure.random(), or what a step returns",
            path=path,
            expected=expected,
            actual=actual,
        )
        self.halt(error)
        return error

    def ended_early(self, scope: Scope, how: str) -> NonDeterministic | None:
        """Return the error if the function or a branch ends before calls that are recorded; None if it may end here."""
        # Branches that the scope has numbered are not checked: they may have lost a race, or been cancelled.
        prefix = scope.prefix
        numbers = [
            (int(number), path)
            for path in self.index.below(prefix)
            if (number := path[len(prefix) :].partition(".")[0]).isdigit()
        ]
        ahead, path = min(numbers, default=(0, ""))
        if ahead <= scope.count and not prefix:
            # An effect in a branch that was not made. A branch that was made may have been cancelled before its effect.
            path = next((path for path in list(self.index.effects_ahead) if not self.has_scope(path)), "")
        elif ahead <= scope.count:
            path = ""
        return self._differs(path, f"{self.index.at(path)[0].entry.name}()", how) if path else None

    def never_awaited(self) -> list[str]:
        """Close the coroutines of steps and effects that were never awaited and so did not run. Return their names."""
        left = [coroutine for coroutine in self.unawaited.values() if getcoroutinestate(coroutine) == CORO_CREATED]
        for coroutine in left:
            coroutine.close()
        return [coroutine.__qualname__ for coroutine in left]

    def value(self, entry: Entry) -> Operation[Any]:
        """Return the value of an entry, from its body, its row or its blob."""
        return self.decoded((yield from self.text(entry)))

    def text(self, entry: Entry) -> Operation[bytes]:
        if entry.value is not None:
            return decompress(entry.value)
        if isinstance(entry, EntryInStore):
            return decompress((yield from read(partial(read_value, self.tenant, entry))))
        if entry.extra is not None and "blob" in entry.extra:
            body = yield from read(partial(read_blob, self.tenant, entry.extra["blob"]))
            return decompress(body)
        return b"null"

    def decoded(self, text: bytes) -> Any:
        return decode(text, self.ctx.codec)

    def encoded(self, value: Any) -> bytes:
        """Encode a value that refers to no large value in an object."""
        return compress(encode(value, self.ctx.codec))

    def on_lease_lost(self) -> None:
        """Stop the execution because another process has the run. Raises LeaseLost."""
        self.stop = LeaseLost(
            f"run {self.row.id!r} was taken over by another process (or cancelled) while this one held it; this one "
            "stops here. What it had recorded stands, and what it had not is decided there"
        )
        if self.on_stop is not None:
            self.on_stop()
        raise self.stop

    def halt(self, error: BaseException) -> None:
        """Stop the code, whatever it catches: every further journal call raises this error.

        The tasks of an async run are cancelled, because they may wait for each other.
        """
        if self.stop is None:
            self.stop = error
            if self.on_stop is not None:
                self.on_stop()

    def check_time(self) -> None:
        """Stop the code if the time of the whole run is over. An undo is not stopped."""
        if self.deadline_us is not None and not self.undoing and self.deadline_us <= self.shared_clock_us():
            seconds = (self.deadline_us - self.row.created_at) / 1e6
            self.halt(
                Expired(f"run {self.row.id!r} did not end within {seconds:g} s: timeout_s of {self.row.function}")
            )

    def interrupt(self, why: str = "its process was interrupted") -> None:
        """Stop the code so that the run is released. Sync code ends at its next journal call, async code at once."""
        self.halt(Interrupted(why))

    @property
    def loop_is_closed(self) -> bool:
        """Whether the event loop of an async run was closed, so that none of its code can run."""
        return self.supervisor is not None and bool(self.supervisor.loop.is_closed())

    def apply_request(self, request: str | None) -> None:
        """Stop the code at its next journal call because of an operator's request; None is no request."""
        if request is not None and self.stop is None and not (self.undoing and request in rows.ENDS):
            self.stop = stop_for(request)
            if self.stop is not None and self.on_stop is not None:
                self.on_stop()

    # --- time

    def set_clock(self) -> None:
        """Set `skew_us` from the lease of a run that was claimed just now: the server's clock has set the lease."""
        if self.ctx.driver.dialect != "sqlite":
            self.skew_us = self.row.lease_until - self.lease_us - self.ctx.clock_us()

    def shared_clock_us(self) -> int:
        """Return the approximate time of the clock that all owners share, without a query.

        It is behind by the time that the answer to the claim took to arrive.
        """
        return self.ctx.clock_us() + self.skew_us + self.ahead_us

    def now_us(self) -> Operation[int]:
        """Return the time of the clock that all owners share."""
        if self.ctx.driver.dialect == "sqlite":
            return self.ctx.clock_us() + self.ahead_us
        return (yield from read(partial(_now, self.ctx.clock_us()))) + self.ahead_us

    async def loop_sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    async def suspend(self, wait: Wait) -> None:
        """Wait, in an async run, until there may be news. Raises Parked if the run parks."""
        await self.supervisor.suspend(wait)


def _now(now: int) -> Program[int]:
    [[[time]]] = yield Batch(rows.NOW(now=now), last=True)
    return int(time)
