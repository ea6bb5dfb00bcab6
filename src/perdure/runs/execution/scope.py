"""Scopes: the branch of a run that code is in, held in a context variable. A scope numbers the calls of its branch.

A step is identified by its path in the call tree and its name. Each branch of `perdure.gather`, `map` and `first` has a
scope with a counter of its own. It is numbered when it is made, so paths do not depend on which branch runs first. The
scope of an asyncio task takes no number. It is named after what the task runs (`for_task`), so an additional task
changes no other path. A thread that the user starts has no scope.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.errors import (
    Damaged,
    InDoubt,
    JournalDamaged,
    LeaseLost,
    NonDeterministic,
    NotApproved,
    NotInRun,
    RunMismatch,
    RunStuck,
    StoreError,
    UsageError,
    ValueProblem,
)
from perdure.runs.execution.task_names import keyed_hash, plain_part, task_name
from perdure.runs.journal.entries import Entry

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution
    from perdure.runs.functions.keys import IdempotencyKey
    from perdure.runs.functions.specs import StepSpec

_NAMES_MAX = 10_000  # task names in one scope; further tasks are named after their functions alone
_PREFIX_MAX = 400  # characters; tasks inside tasks have ever longer prefixes
# Errors of the run itself. They are never returned to a model.
OF_THE_RUN: Final = (
    StoreError,
    ValueProblem,
    Damaged,
    UsageError,
    NotInRun,
    NonDeterministic,
    InDoubt,
    LeaseLost,
    JournalDamaged,
    RunStuck,
    RunMismatch,
)
current: ContextVar[Scope | None] = ContextVar("perdure_scope", default=None)


class Unwind(BaseException):
    """Base of what ends the code of a run from inside, past every `except Exception`. Never reaches a user's caller."""

    waits = False  # True: the branch that it ends waits until the other branches have ended too


class ToolName(NamedTuple):
    """A tool call of a model, as traces name it."""

    name: str
    id: str | None


class Scope:
    """One branch of a run. `stop`, once set, is raised by every further journal call of the branch."""

    __slots__ = (
        "by_name",
        "count",
        "deadlines",
        "declined",
        "execution",
        "holds",
        "home",
        "is_async",
        "is_over",
        "parent",
        "prefix",
        "stop",
        "tasks",
        "tool",
        "view",
    )

    def __init__(
        self,
        execution: Execution,
        prefix: str = "",
        *,
        is_async: bool,
        deadlines: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.execution = execution
        self.prefix = prefix
        self.is_async = is_async
        self.count = 0
        self.stop: BaseException | None = None
        self.deadlines = deadlines  # path and time of each perdure.timeout around it
        self.parent: Scope | None = None
        self.is_over = False  # its task has ended
        self.home: Scope = self  # for a task: the branch that it belongs to
        self.tasks: dict[str, int] | None = None  # number of tasks made here, by name
        self.holds = False  # True: an error of the run itself ends it, whatever catches the error (`hold`)
        self.declined: NotApproved | None = None  # in a scope that holds: a person's no to its last effect
        self.by_name = False  # True: errors of its calls go to a model as text, so their classes do not matter
        self.tool: ToolName | None = None  # the tool call of a model that it runs
        self.view: Any = None  # the branch's view of perdure.state() (calls/state.py)

    @property
    def body(self) -> StepCall | None:
        """The step or effect whose body runs; None in the durable function itself."""
        return None

    def take(self) -> str:
        """Count the next call and return its path."""
        self.count += 1
        path = f"{self.prefix}{self.count}"
        while self.execution.adopted and path in self.execution.adopted:  # another task has made that call
            self.count += 1
            path = f"{self.prefix}{self.count}"
        return path

    def take_recorded(self, path: str, moved: str) -> str:
        """Match the call at `path` with one recorded at `moved` in the same branch. Return `moved`, and free `path`."""
        if path == f"{self.prefix}{self.count}":
            self.count -= 1
        self.execution.adopted.add(moved)
        self.execution.index.reach(moved)
        return moved

    def branch(self) -> Scope:
        """Return a scope for a new branch, numbered now. Raises NonDeterministic if a call is recorded at its path."""
        path = self.take()
        self.execution.check_branch(path)
        return self.inside(f"{path}.")

    def for_task(self, coro: Any) -> Scope:
        """Return a scope for an asyncio task. It is named after what the task runs, and numbered among equal names."""
        return self._named(task_name(coro, self.execution.naming_key()))

    def for_call(self, name: str, id: str | None = None) -> Scope:
        """Return a scope for a call of another framework. It is named after what is called and the call's own id.

        An error of the run itself in this scope ends the run.
        """
        part = plain_part(name)
        scope = self._named(f"{part}-{keyed_hash(id.encode(), self.execution.naming_key())}" if id else part)
        scope.holds = True
        return scope

    def _named(self, name: str) -> Scope:
        key = self.execution.naming_key()
        if self.tasks is None:
            self.tasks = {}
        if len(self.tasks) >= _NAMES_MAX and name not in self.tasks:
            name = name.partition("-")[0]
        number = self.tasks[name] = self.tasks.get(name, 0) + 1
        prefix = f"{self.prefix}{number}@{name}."
        if len(prefix) > _PREFIX_MAX:
            prefix = f"{self.home.prefix}{number}@{name}-{keyed_hash(self.prefix.encode(), key)}."
        scope = self.inside(prefix)
        scope.home = self.home
        return scope

    def inside(self, prefix: str) -> Scope:
        """Return a scope for a new branch whose calls have paths with this prefix."""
        scope = Scope(self.execution, prefix, is_async=self.is_async, deadlines=self.deadlines)
        scope.parent, scope.holds = self, self.holds
        if self.execution.index.ahead:
            self.execution.scopes[prefix] = scope
        if self.execution.state is not None:
            self.execution.state.branched(self, scope)
        return scope

    def hold(self, error: Exception) -> None:
        """Stop the run if an error is its own, and not of a body that it called. Keep a person's no in `declined`.

        A framework would catch it, and tell a model that a payment failed which may have happened.
        """
        if isinstance(error, OF_THE_RUN):
            self.execution.halt(error)
        elif isinstance(error, NotApproved):
            self.declined = error

    def end(self) -> None:
        self.is_over = True

    def ended(self) -> None:
        """Check the branch's view of the state. Called at its end, before its result is used."""
        if self.view is not None and self.execution.state is not None:
            self.execution.state.check(self)

    def check(self) -> None:
        """Raise the exception that ended this branch or the run. Every call raises it, as user code may catch it."""
        if self.execution.stop is not None:
            raise self.execution.stop
        if self.execution.closing is not None:
            raise self.execution.closing
        scope: Scope | None = self
        while scope is not None:  # the end of a branch ends the branches inside it
            if scope.stop is not None:
                raise scope.stop
            scope = scope.parent


class StepCall(Scope):
    """One call of a step or an effect, and the scope of its body, in which journaled calls are plain calls."""

    __slots__ = (
        "args",
        "args_hash",
        "attempt",
        "begun",
        "caller",
        "deadline",
        "duration_us",
        "emitted",
        "has_happened",
        "is_last",
        "is_unsettled",
        "key",
        "kwargs",
        "name",
        "outside",
        "path",
        "spec",
        "text",
        "tried",
    )

    def __init__(
        self,
        caller: Scope,
        spec: StepSpec,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        text: bytes,
        args_hash: bytes,
    ) -> None:
        self.execution = caller.execution
        self.stop = None
        self.caller = caller
        self.spec = spec
        self.name = spec.name
        self.path = path
        self.args = args
        self.kwargs = kwargs
        self.text = text  # the arguments; empty after the function has ended: then `kwargs` has the recorded ones
        self.args_hash = args_hash
        self.key: IdempotencyKey | None = None  # effects only
        self.attempt = 1
        self.tried = 0  # attempts before an operator retried the run, which do not count
        self.deadline = 0  # effects only: until when the request may arrive
        self.duration_us = 0  # of the last body
        self.begun = False
        self.emitted: Any = None  # what this attempt emits (streams/writer.py)
        self.outside: BaseException | None = None  # the exception that the caller handled when the body began
        self.has_happened = False  # the body returned, but its result cannot be stored
        self.is_last = False  # the run is ending, and the body is not run again
        self.is_unsettled = False  # an attempt that on_doubt="retry" repeated may still have happened

    @property
    def body(self) -> StepCall:
        return self

    def entry(self, value: bytes | None = None, extra: dict[str, Any] | None = None) -> Entry:
        at = self.execution.ctx.clock_us()
        return Entry(self.path, self.spec.name, at, self.args_hash, self.attempt, value, extra, self.duration_us)


Provider = Callable[["StepSpec"], Scope | None]
_providers: list[Provider] = []


def add_provider(provider: Provider) -> None:
    """Register an adapter's provider of a scope for steps that are called outside of a run.

    The provider returns None if it has no scope, and raises if an effect must not run there.
    """
    _providers.append(provider)


def outside_scope(spec: StepSpec) -> Scope | None:
    return next((scope for provider in _providers if (scope := provider(spec)) is not None), None)


def need_scope(what: str) -> Scope:
    """Return the scope of the running branch. Raises NotInRun outside of a run, UsageError inside a step."""
    scope = current.get()
    if scope is None:
        raise NotInRun(
            f"{what} was called outside of a durable run: call it in a function that store.run() runs. A thread of "
            "your own loses the run; use perdure.gather or perdure.map for parallel work"
        )
    if scope.body is not None:
        raise refused_in(
            scope.body,
            f"{what} was called inside step {scope.body.name!r}: a step's body is recorded as a whole. "
            "Call it in the durable function",
        )
    return scope


def refused_in(body: StepCall, why: str) -> UsageError:
    """Return the error for a call that a body must not make.

    In the body of a framework's tool it ends the run: the framework may make a result of it, which a model would see.
    """
    error = UsageError(why)
    if body.caller.holds:
        body.caller.hold(error)
    return error
