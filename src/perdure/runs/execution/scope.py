"""Where the code is: the scope of the running branch, found through a context variable.

A step is its path in the call tree plus its name. Each branch of `perdure.gather`, `map` and `first` has a scope with a
counter of its own, numbered when the branch is made, so that paths do not depend on who runs first. An asyncio task has
a scope that takes no number: it is named after what it runs (`for_task`), so that a task more or less changes no other
path. A raw thread of the user's has no scope.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from perdure.errors import NotInRun, UsageError
from perdure.runs.execution.task_names import keyed_hash, task_name
from perdure.runs.journal.entries import Entry

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution
    from perdure.runs.functions.keys import IdempotencyKey
    from perdure.runs.functions.specs import StepSpec

_NAMES_MAX = 10_000  # of tasks that one scope tells apart; more are told apart by their functions only
_PREFIX_MAX = 400  # characters: tasks of tasks of tasks
current: ContextVar[Scope | None] = ContextVar("perdure_scope", default=None)


class Unwind(BaseException):
    """Ends the code of a run from inside, past every `except Exception`. Never reaches a user's caller."""

    waits = False  # True: the branch that it ends waits until the others have come to their end too


class Scope:
    """One branch of a run. `stop`, once set, is raised by every further journal call of the branch."""

    __slots__ = (
        "by_name",
        "count",
        "deadlines",
        "execution",
        "home",
        "is_async",
        "is_over",
        "parent",
        "prefix",
        "stop",
        "tasks",
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
        self.deadlines = deadlines  # of perdure.timeout: path and time
        self.parent: Scope | None = None
        self.is_over = False  # its task has ended
        self.home: Scope = self  # of a task: the branch that it belongs to
        self.tasks: dict[str, int] | None = None  # how many tasks of each name were made here
        self.by_name = False  # errors of its calls go to a model as text: their classes do not matter
        self.view: Any = None  # what a branch sees of perdure.state(): see state.py

    @property
    def body(self) -> StepCall | None:
        """The step or effect whose body runs; None in the durable function itself."""
        return None

    def take(self) -> str:
        """The path of the next call."""
        self.count += 1
        path = f"{self.prefix}{self.count}"
        while self.execution.adopted and path in self.execution.adopted:  # another task makes that call now
            self.count += 1
            path = f"{self.prefix}{self.count}"
        return path

    def take_recorded(self, path: str, moved: str) -> str:
        """Take a call that is recorded elsewhere in the same branch for the one at `path`, which is given back."""
        if path == f"{self.prefix}{self.count}":
            self.count -= 1
        self.execution.adopted.add(moved)
        self.execution.index.reach(moved)
        return moved

    def branch(self) -> Scope:
        """A scope for a new branch, numbered now. Raises NonDeterministic if a call had this number."""
        path = self.take()
        self.execution.check_branch(path)
        return self.inside(f"{path}.")

    def for_task(self, coro: Any) -> Scope:
        """A scope for an asyncio task, named after what it runs: the first, second … of that name made here."""
        key = self.execution.naming_key()
        name = task_name(coro, key)
        if self.tasks is None:
            self.tasks = {}
        if len(self.tasks) >= _NAMES_MAX and name not in self.tasks:
            name = name.partition("-")[0]
        number = self.tasks[name] = self.tasks.get(name, 0) + 1
        prefix = f"{self.prefix}{number}@{name}."
        if len(prefix) > _PREFIX_MAX:
            prefix = f"{self.home.prefix}{number}@{name}-{keyed_hash(self.prefix.encode(), key)}."
        made = self.inside(prefix)
        made.home = self.home
        return made

    def inside(self, prefix: str) -> Scope:
        """A scope for a new branch whose calls have paths that begin so."""
        made = Scope(self.execution, prefix, is_async=self.is_async, deadlines=self.deadlines)
        made.parent = self
        if self.execution.index.ahead:
            self.execution.made[prefix] = made
        if self.execution.state is not None:
            self.execution.state.branched(self, made)
        return made

    def end(self) -> None:
        self.is_over = True

    def ended(self) -> None:
        """The branch has come to its end, and its maker takes its result."""
        if self.view is not None and self.execution.state is not None:
            self.execution.state.check(self)

    def check(self) -> None:
        """Raise what ended this branch or the run, again and again: user code may catch everything."""
        if self.execution.stop is not None:
            raise self.execution.stop
        if self.execution.closing is not None:
            raise self.execution.closing
        scope: Scope | None = self
        while scope is not None:  # what ended a branch ended those inside it
            if scope.stop is not None:
                raise scope.stop
            scope = scope.parent


class StepCall(Scope):
    """One call of a step or an effect, and what its body sees: the same run, in which journal calls are plain calls."""

    __slots__ = (
        "args",
        "args_hash",
        "attempt",
        "begun",
        "caller",
        "deadline",
        "duration_us",
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
        self.text = text  # of the arguments; none: the function has ended, and `kwargs` is what the journal has of them
        self.args_hash = args_hash
        self.key: IdempotencyKey | None = None  # of an effect
        self.attempt = 1
        self.tried = 0  # attempts that do not count: made before an operator retried the run
        self.deadline = 0  # of an effect: until when its request may arrive
        self.duration_us = 0  # that the last body ran
        self.begun = False
        self.outside: BaseException | None = None  # what the caller was handling when the body began
        self.has_happened = False  # its body returned, and what it returned cannot be stored
        self.is_last = False  # the run is ending: it is not run again
        self.is_unsettled = False  # on_doubt="retry" came after an attempt that may have happened, and still may have

    @property
    def body(self) -> StepCall:
        return self

    def entry(self, value: bytes | None = None, extra: dict[str, Any] | None = None) -> Entry:
        at = self.execution.ctx.clock_us()
        return Entry(self.path, self.spec.name, at, self.args_hash, self.attempt, value, extra, self.duration_us)


Provider = Callable[["StepSpec"], Scope | None]
_providers: list[Provider] = []


def add_provider(provider: Provider) -> None:
    """Let an adapter say what stands for the run of a step where there is none; it gives None where it does not know
    either, and raises where an effect must not run."""
    _providers.append(provider)


def outside_scope(spec: StepSpec) -> Scope | None:
    return next((scope for provider in _providers if (scope := provider(spec)) is not None), None)


def need_scope(what: str) -> Scope:
    """The scope of the running branch. Raises NotInRun outside of a run, UsageError inside a step."""
    scope = current.get()
    if scope is None:
        raise NotInRun(
            f"{what} was called outside of a durable run: call it in a function that store.run() runs. A thread of "
            "your own loses the run; use perdure.gather or perdure.map for parallel work"
        )
    if scope.body is not None:
        raise UsageError(
            f"{what} was called inside step {scope.body.name!r}: a step's body is recorded as a whole. "
            "Call it in the durable function"
        )
    return scope
