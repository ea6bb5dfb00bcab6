"""The functions that user code calls inside a run: ask, sleep, receive, spawn and others. An async run awaits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from perdure.errors import UsageError
from perdure.runs.calls import asks, children, messages
from perdure.runs.calls.bodies import send_chunk
from perdure.runs.calls.steps import answer, wait_until
from perdure.runs.calls.tags import check_tags, tag_operation, tags_text
from perdure.runs.calls.timeouts import check_seconds, limited, recorded_call
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current, need_scope
from perdure.runs.execution.turn import SENT, member_name
from perdure.runs.execution.unwinds import ContinueAsNew, Undo
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal.entries import DONE, NOTE, WAIT, Entry, opening
from perdure.runs.journal.kinds import CallKind, declare
from perdure.threads.checks import check_name, check_priority

T = TypeVar("T")
_YEAR_MAX = 9000
SLEEP = declare(CallKind("perdure.sleep", waits_for="sleep", is_changeable=False))
EMIT = declare(CallKind("perdure.emit", is_changeable=False))


def place(call: str) -> tuple[Scope, str]:
    """Return the branch and the path of a call, and take the path now.

    The order of the calls decides their paths, not the order in which they are awaited, perhaps in tasks.
    """
    scope = need_scope(call)
    scope.check()
    return scope, scope.take()


def do(scope: Scope, operation: Operation[T]) -> Any:
    """Run an operation and return its result; in an async run, return an awaitable."""
    operation = limited(scope, operation)
    return arun_operation(scope, operation) if scope.is_async else run_operation(scope, operation)


def ask(
    question: str,
    *,
    options: list[Any] | None = None,
    schema: Any = None,
    timeout_s: float | None = None,
    on_timeout: Any = TimeoutError,
    approvers: list[str] | None = None,
    quorum: int = 1,
) -> Any:
    """Ask a person and wait for the answer. The run is parked meanwhile and needs no process. Await it in an async run.

    `options` lists the answers to choose from; `schema` is a type or a JSON schema that the answer must fit.
    `approvers` names who may answer, `quorum` how many of them must give the same answer. If no answer comes within
    `timeout_s`, `on_timeout` is raised if it is an exception class, else returned.
    """
    scope, path = place("perdure.ask()")
    asked = asks.question(
        question,
        options=options,
        schema=schema,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
        approvers=approvers,
        quorum=quorum,
    )
    return do(scope, asks.question_at(scope, path, asked))


def sleep(seconds: float) -> Any:
    """Wait for a number of seconds, also across restarts. The run is parked meanwhile. Await it in an async run."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise UsageError(f"perdure.sleep({seconds!r}): a number of seconds from 0 on")
    check_seconds(seconds, "perdure.sleep()")
    scope, path = place("perdure.sleep()")
    return do(scope, _sleep_operation(scope, path, lambda now: now + int(seconds * 1e6)))


def sleep_until(when: datetime) -> Any:
    """Wait until a point in time, also across restarts. Await it in an async run."""
    if not isinstance(when, datetime):
        raise UsageError(f"perdure.sleep_until() wants a datetime, not {type(when).__name__}")
    if when.year > _YEAR_MAX:
        raise UsageError(f"perdure.sleep_until({when}): not after the year {_YEAR_MAX}")
    due = int(when.timestamp() * 1e6)
    scope, path = place("perdure.sleep_until()")
    return do(scope, _sleep_operation(scope, path, lambda _: due))


def _sleep_operation(scope: Scope, path: str, due_at: Callable[[int], int]) -> Operation[None]:
    execution, name = scope.execution, SLEEP.name
    recorded, ended = yield from recorded_call(scope, path, name)
    if ended is not None:
        yield from answer(execution, ended)
        return
    first = opening(recorded)
    if first is None:
        due = due_at(execution.shared_clock_us())
        yield from execution.journal.record((WAIT, Entry(path, name, execution.ctx.clock_us(), extra={"due": due})))
    else:
        due = int((first.extra or {})["due"])
    yield from wait_until(execution, path, due, SLEEP, SLEEP.waiting(path))
    yield from execution.journal.record((DONE, Entry(path, name, execution.ctx.clock_us())))


def receive(topic: str = "", *, timeout_s: float | None = None, default: Any = None) -> Any:
    """Return the next message to this run, in the order sent; wait if there is none. Await it in an async run.

    If none comes within `timeout_s`, return `default`.
    """
    messages.check_topic(topic)
    if timeout_s is not None:
        check_seconds(timeout_s, "perdure.receive(timeout_s=…)")
    if need_scope("perdure.receive()").execution.turn is not None and topic == "":
        raise UsageError("a member of a team gets its messages one by one, as the second argument of its handler")
    scope, path = place("perdure.receive()")
    return do(scope, messages.receive_operation(scope, path, topic, timeout_s, default))


def send(run_id: str | Callable[..., Any], value: Any, topic: str = "", *, now: bool = False) -> Any:
    """Send a message to another run exactly once. Await it in an async run.

    A member of a team sends to a member, by its name or its function, or to a run. The message leaves when the turn
    ends, with all that the turn does; `now=True` sends it at once.
    """
    target = check_name(member_name(run_id), "run")
    messages.check_topic(topic)
    if (scope := need_scope("perdure.send()")).execution.turn is not None and not now:
        scope.check()
        messages.send_later(scope, target, value, topic)
        return SENT
    scope, path = place("perdure.send()")
    return do(scope, messages.send_operation(scope, path, target, value, topic))


def call(member: str | Callable[..., Any], message: Any, *, timeout_s: float | None = None) -> Any:
    """Send a message to a member of a team and wait for what its handler returns. Await it in an async run.

    Raises TimeoutError after `timeout_s`, and RunFailed if the message went to the dead letters. The caller is parked
    meanwhile: its other messages wait.
    """
    target = check_name(member_name(member), "member")
    if timeout_s is not None:
        check_seconds(timeout_s, "perdure.call(timeout_s=…)")
    scope, path = place("perdure.call()")
    return do(scope, messages.call_operation(scope, (path, scope.take()), target, message, timeout_s))


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    id: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    delay_s: float = 0.0,
    tags: Mapping[str, str | int] | None = None,
    **kwargs: Any,
) -> Any:
    """Start a child run exactly once. Return a `Child`; its `result()` waits for the end. Await it in an async run.

    Queue and priority are those of the parent by default. Tags are not inherited.
    """
    from perdure.runs.calls.decorators import durable_call

    need_scope("perdure.spawn()")
    spec, args = durable_call(fn, args)
    if id is not None:
        check_name(id, "run")
    if queue is not None:
        check_name(queue, "queue")
    if priority is not None:
        check_priority(priority)
    delay_us = int(check_seconds(delay_s, "perdure.spawn(delay_s=…)") * 1e6) if delay_s else 0
    options = children.ChildOptions(id, queue, priority, delay_us, tags_text(check_tags(tags)))
    scope, path = place("perdure.spawn()")
    return do(scope, children.spawn_operation(scope, path, spec, args, kwargs, options))


def subtask(fn: Callable[..., Any], *args: Any, limit_tokens: int = 2_500, **kwargs: Any) -> Any:
    """Run a durable function as a child run and return its result, if it is small. Await it in an async run.

    The parent gets at most `limit_tokens` of it: a longer text is cut, and says which run has the whole. So what a
    helper read and wrote stays out of the parent's context. Any other result that is too large raises UsageError: let
    the child return a summary. Tokens are estimated from above. Errors of the child are raised as by `Child.result`.
    """
    from perdure.runs.calls.decorators import durable_call

    if not isinstance(limit_tokens, int) or limit_tokens < 1:
        raise UsageError(f"perdure.subtask(limit_tokens={limit_tokens!r}): a number of tokens, at least 1")
    need_scope("perdure.subtask()")
    spec, args = durable_call(fn, args)
    scope, path = place("perdure.subtask()")
    return do(scope, _subtask_operation(scope, (path, scope.take()), spec, args, kwargs, limit_tokens))


def _subtask_operation(
    scope: Scope,
    paths: tuple[str, str],
    spec: DurableSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit_tokens: int,
) -> Operation[Any]:
    child = yield from children.spawn_operation(scope, paths[0], spec, args, kwargs, children.ChildOptions())
    result = yield from children.result_operation(scope, paths[1], child.id)
    return children.bounded(result, child.id, limit_tokens, scope.execution.ctx.codec)


def tag(**tags: str | int | None) -> Any:
    """Add tags to this run, or change them; None removes one. Await it in an async run.

    `store.runs(tags=…)` finds the run by them.
    """
    changes = check_tags(tags, removes=True)
    scope, path = place("perdure.tag()")
    return do(scope, tag_operation(scope, path, changes))


def emit(value: Any) -> None:
    """Emit a value (progress, a token, a message) to the readers of the run: `run.stream()` and `perdure run tail`.

    In the body of a step, readers in all processes get it within moments, as an event of kind "chunk". It is kept until
    the step's end is recorded, and may be at most 64 KB. Between steps it is recorded with the next entry. The run's
    code never reads it back.
    """
    scope = current.get()
    if scope is None:
        need_scope("perdure.emit()")
        raise AssertionError
    if scope.body is not None:
        send_chunk(scope.body, value)
        return
    execution = scope.execution
    scope.check()
    path = scope.take()
    if execution.recorded(path, EMIT.name, None):
        return
    entry = Entry(path, EMIT.name, execution.ctx.clock_us(), value=execution.encoded(value))
    execution.journal.buffer(NOTE, entry)


def continue_as_new(*args: Any, **kwargs: Any) -> NoReturn:
    """Begin this run again with new arguments and an empty journal, for agents that never end.

    Everything recorded so far is dropped: pass what is still needed as arguments. Earlier effects can no longer be
    undone.
    """
    scope = need_scope("perdure.continue_as_new()")
    scope.check()
    if scope.execution.turn is not None:
        raise UsageError("a member of a team begins anew with each message: keep what it needs in its state")
    stop = ContinueAsNew(args, kwargs)
    scope.execution.halt(stop)
    raise stop


def undo(reason: str = "") -> NoReturn:
    """Undo this run's effects, newest first, and end the run.

    Code that catches the exception cannot continue: every further call raises it again.
    """
    scope = need_scope("perdure.undo()")
    scope.check()
    stop = Undo(reason)
    scope.execution.halt(stop)
    raise stop
