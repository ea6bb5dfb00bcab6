"""The decorators `@durable`, `@step` and `@effect`.

A decorated function is still a function, so methods, `iscoroutinefunction` and documentation work. `.direct` calls the
body without a run. `.perdure` is its spec. `.on_thread`, which is awaited, calls a plain function in an async run
without blocking the loop.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from perdure.errors import NotInRun, UsageError
from perdure.runs.calls import effects, steps
from perdure.runs.calls.approvals import approval_of
from perdure.runs.calls.bodies import usual_path, warn_once
from perdure.runs.calls.outcome import check_errors
from perdure.runs.calls.timeouts import check_seconds, limited
from perdure.runs.execution.execution import executing
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current, outside_scope
from perdure.runs.functions.callbacks import check_callbacks
from perdure.runs.functions.inputs import annotations_of, is_key, receiver_of, signature_of
from perdure.runs.functions.keys import IdempotencyKey
from perdure.runs.functions.retry import Retry
from perdure.runs.functions.specs import CO_COROUTINE, DurableSpec, StepSpec, add_durable, add_step, plain_name
from perdure.runs.journal.rows import TASK
from perdure.storage.events import event
from perdure.threads.checks import check_name

# The options of store.run(), start() and perdure.spawn(), and a name that a parameter of a durable function can have.
_OF_STARTING = {"id": "order_id", "queue": "queue_name", "priority": "rank", "delay_s": "wait_s", "tags": "labels",
                "key": "item_key", "debounce_s": "quiet_s", "singleton": "single"}  # fmt: skip
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)


class Journaled(Protocol[P, R_co]):
    """A decorated function, called like the original, also as a method."""

    @property
    def perdure(self) -> StepSpec: ...

    def direct(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    async def on_thread(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Journaled[P, R_co]: ...

    @overload
    def __get__(
        self: Journaled[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...


class Effect(Protocol[A_contra, B_contra, R_co]):
    """A decorated effect. Perdure fills in its key, so a call has fewer arguments than the function.

    A type cannot take a parameter out of a signature. Type checkers know the result and the first two arguments.
    """

    @property
    def perdure(self) -> StepSpec: ...

    def direct(self, *args: Any, **kwargs: Any) -> R_co: ...

    async def on_thread(self, *args: Any, **kwargs: Any) -> R_co: ...

    @overload
    def __call__(self, a: A_contra, b: B_contra, /, *args: Any, **kwargs: Any) -> R_co: ...

    @overload
    def __call__(self, a: A_contra, /, **kwargs: Any) -> R_co: ...

    @overload
    def __call__(self, **kwargs: Any) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Effect[A_contra, B_contra, R_co]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Effect[B_contra, Any, R_co]: ...


class EffectDecorator(Protocol):
    """`@perdure.effect(…)`. The last positional parameter of a function is its key, as far as a type can say."""

    @overload
    def __call__(self, fn: Callable[[A, B, IdempotencyKey], R], /) -> Effect[A, B, R]: ...

    @overload
    def __call__(self, fn: Callable[[A, IdempotencyKey], R], /) -> Effect[A, Any, R]: ...

    @overload
    def __call__(self, fn: Callable[..., R], /) -> Effect[Any, Any, R]: ...


class CallOptions(TypedDict, total=False):
    """The options that steps and effects share; `step` and `effect` document them."""

    name: str | None
    retries: int
    backoff_s: float
    retry_on: Any
    timeout_s: float | None
    ignore: tuple[str, ...]


class EffectOptions(CallOptions, total=False):
    reconcile: Callable[..., Any] | None
    undo: Callable[..., Any] | None
    on_doubt: Literal["ask", "retry", "fail"]
    definite: type[Exception] | tuple[type[Exception], ...]
    approve: bool | str | dict[str, Any] | Callable[..., bool] | None


@overload
def step(fn: Callable[P, R], /) -> Journaled[P, R]: ...


@overload
def step(**options: Unpack[CallOptions]) -> Callable[[Callable[P, R]], Journaled[P, R]]: ...


def step(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a step: its result or error is recorded, and it runs again only if neither was recorded.

    `retries`, `backoff_s` and `retry_on` repeat a body that fails. `timeout_s` limits each attempt. `ignore` names
    arguments that are no input, such as clients. A generator streams its chunks to `run.stream()` and is recorded once.
    """
    if fn is None:
        return functools.partial(_decorate_step, **options)
    return _decorate_step(fn, **options)


def _decorate_step(fn: Callable[..., Any], **options: Unpack[CallOptions]) -> Any:
    spec = _spec(fn, "step", options, CallOptions)
    add_step(spec)
    return _wrapped(spec, steps.step_operation)


def _check_options(kind: str, options: Mapping[str, object], known: Any) -> None:
    unknown = options.keys() - known.__annotations__.keys()
    if unknown:
        elsewhere = "; steps and effects have it" if unknown <= CallOptions.__annotations__.keys() else ""
        has = ", ".join(known.__annotations__)
        raise UsageError(f"@perdure.{kind} has no option {min(unknown)!r}{elsewhere}; it has {has}")


@overload
def effect(fn: Callable[[A, B, IdempotencyKey], R], /) -> Effect[A, B, R]: ...


@overload
def effect(fn: Callable[[A, IdempotencyKey], R], /) -> Effect[A, Any, R]: ...


@overload
def effect(fn: Callable[..., R], /) -> Effect[Any, Any, R]: ...


@overload
def effect(**options: Unpack[EffectOptions]) -> EffectDecorator: ...


def effect(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function an effect: it changes the outside world, and is recorded before it runs and after it ran.

    Its idempotency key is a parameter `key: perdure.IdempotencyKey`, or `perdure.idempotency_key()`. `timeout_s`
    (default 60) is how long the body and its request may take. An error out of the body leaves the outcome unknown,
    unless it is definite: a class of the effect's own package, an HTTP 4xx response, or a class named in `definite`.
    `reconcile` settles an unknown outcome: it returns `perdure.outcome.Done(result)`, `NotDone()` or `Unknown()`.
    Without it, or after `Unknown()`, `on_doubt` decides: "ask" a person, "retry" with the same key, or "fail". If the
    outcome is still open after `retries` and ten more attempts, a person is asked whatever `on_doubt` says. `undo`
    takes the effect back when the run is undone. Both callbacks get the parameters that they name: the effect's
    arguments, and `key` for `reconcile`, `result` and `effect_key` for `undo`. `approve=True` asks a person
    first; a text is the question, in which `{name}` stands for an argument; a function decides by the arguments whether
    to ask; a dict has the options of `perdure.ask`, and the function as `when`.
    """
    if fn is None:
        return functools.partial(_decorate_effect, **options)
    return _decorate_effect(fn, **options)


def _decorate_effect(fn: Callable[..., Any], **options: Unpack[EffectOptions]) -> Any:
    spec = _spec(fn, "effect", options, EffectOptions)
    spec.on_doubt = options.get("on_doubt", "ask")
    if spec.on_doubt not in ("ask", "retry", "fail"):
        raise UsageError(f'on_doubt is "ask", "retry" or "fail", not {spec.on_doubt!r}')
    spec.reconcile, spec.undo = options.get("reconcile"), options.get("undo")
    check_callbacks(fn, spec.reconcile, spec.undo, spec.ignore)
    spec.approve = approval_of(fn, options.get("approve"), spec.ignore)
    spec.deadline_s = 60.0 if spec.timeout_s is None else spec.timeout_s
    spec.definite = check_errors(options.get("definite", ()), "definite", "say that the effect did not happen")
    add_step(spec)
    return _wrapped(spec, effects.effect_operation)


def _spec(fn: Any, kind: Literal["step", "effect"], options: CallOptions, known: Any) -> StepSpec:
    _check(fn, kind)
    _check_options(kind, options, known)
    retry = Retry(options.get("retries", 0), options.get("backoff_s", 1.0), options.get("retry_on", (Exception,)))
    ignore, timeout_s = _names(options.get("ignore", ())), _seconds(options.get("timeout_s"))
    return StepSpec(fn, _name(options.get("name"), fn), kind, ignore=ignore, retry=retry, timeout_s=timeout_s)


class DurableOptions(TypedDict, total=False):
    name: str | None
    version: str | None
    undo_on: type[Exception] | tuple[type[Exception], ...]
    timeout_s: float | None


@overload
def durable(fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def durable(**options: Unpack[DurableOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def durable(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function durable: `store.run(fn, …)` resumes it after a crash. Called directly, it is a plain function.

    `name` identifies it in stored runs (default: its own name). With a `version`, only code with the same version
    resumes its runs. Without one, any code with its name does, and replay detects a difference that matters.
    `undo_on` names the errors that are decisions, such as SoldOut: if one of them leaves the function, the effects are
    undone. After any other error they stand, and the run can be retried (`run.retry()`) or undone (`run.undo()`).
    `timeout_s` limits the whole run, with its waits and restarts, from its creation. After that it fails with
    TimeoutError, whatever the code catches. A body that is running is not interrupted: it ends first. The object of a
    method, `store.run(agent.work, …)`, is an argument: `perdure.register` says how its class is saved and loaded.
    """
    if fn is None:
        return functools.partial(_decorate_durable, **options)
    return _decorate_durable(fn, **options)


def _decorate_durable(fn: Callable[..., Any], **options: Unpack[DurableOptions]) -> Any:
    _check(fn, "durable")
    if receiver_of(fn, signature_of(fn)) == "cls":
        raise UsageError(
            f"{plain_name(fn)} is a class method, and its runs could not record for which class: make it a method, "
            "whose object is recorded, or a static method"
        )
    _check_parameters(fn)
    _check_options("durable", options, DurableOptions)
    name, version = options.get("name"), options.get("version")
    if version is not None and (not isinstance(version, str) or not version):
        raise UsageError(f"version={version!r}: a text that is not empty, such as version='2'")
    errors = check_errors(options.get("undo_on", ()), "undo_on", "the effects are undone for")
    spec = DurableSpec(fn, _name(name, fn), version or "", errors, _seconds(options.get("timeout_s")))
    add_durable(spec)
    fn.perdure_durable = spec  # type: ignore[attr-defined]
    return fn


def _check_parameters(fn: Callable[..., Any]) -> None:
    """Refuse parameters that store.run(), store.start() and perdure.spawn() take for themselves."""
    for name, parameter in signature_of(fn).parameters.items():
        if name in _OF_STARTING and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"{fn.__name__}() has a parameter {name!r}, which store.run({name}=…) takes for itself: the function "
                f"would not get it. Rename it, such as {_OF_STARTING[name]!r}"
            )


def durable_spec(fn: Callable[..., Any]) -> DurableSpec:
    """Return the spec of a durable function. Raises UsageError for any other function."""
    spec = getattr(fn, "perdure_durable", None)
    if isinstance(spec, DurableSpec):
        return spec
    raise UsageError(f"{getattr(fn, '__name__', fn)!r} is not durable: put @perdure.durable above it")


def durable_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[DurableSpec, tuple[Any, ...]]:
    """Return the spec of a durable function and the arguments of its call. The first one of a method is its object."""
    receiver = getattr(fn, "__self__", None)
    return durable_spec(fn), args if receiver is None else (receiver, *args)


def _whole(scope: Scope, operation: Operation[Any]) -> Operation[Any]:
    """Return the operation of a call, limited by the deadlines of its branch."""
    return scope.execution.policy.whole(limited(scope, operation))


Actor = Callable[[Scope, StepSpec, tuple[Any, ...], dict[str, Any]], Operation[Any]]


def _wrapped(spec: StepSpec, actor: Actor) -> Any:
    fn = spec.fn
    decorated: Any
    if spec.is_async:

        async def journaled(call: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (caller := current.get()) is not None:
                caller.execution.unawaited.pop(call, None)
            scope = _scope(spec)
            if scope is None:
                return await spec.body(*args, **kwargs)
            return await arun_operation(scope, _whole(scope, actor(scope, spec, args, kwargs)))

        @functools.wraps(fn)
        def begun(*args: Any, **kwargs: Any) -> Any:
            scope, call = current.get(), object()
            is_run = scope is not None and scope.body is None
            if is_run and scope is not None and not scope.execution.is_async:
                raise UsageError(
                    f"{spec.kind} {spec.name!r} is async, and was called in run {scope.execution.row.id!r}: "
                    "async steps need an async durable function. Make it `async def` and await the call, or make the "
                    f"{spec.kind} a plain function"
                )
            coroutine: Any = journaled(call, args, kwargs)
            coroutine.__name__, coroutine.__qualname__ = fn.__name__, fn.__qualname__
            if is_run and scope is not None:
                scope.execution.unawaited[call] = coroutine
            return coroutine

        decorated = _as_coroutine_function(begun)
    else:
        straight = effects.effect if spec.kind == "effect" else steps.step

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            scope = current.get()
            if scope is not None and (path := usual_path(scope, spec)):
                return straight(scope, spec, path, args, kwargs)
            scope = _scope(spec)
            if scope is None:
                return spec.body(*args, **kwargs)
            return run_operation(scope, _whole(scope, actor(scope, spec, args, kwargs)))

        async def on_thread(*args: Any, **kwargs: Any) -> Any:
            scope = _scope(spec)
            if scope is None:
                from asyncio import to_thread

                return await to_thread(spec.body, *args, **kwargs)
            return await arun_operation(scope, _whole(scope, actor(scope, spec, args, kwargs)))

        decorated = called
        decorated.on_thread = on_thread
    if spec.kind == "effect":
        _hide_key(decorated, fn)
    decorated.perdure = spec
    decorated.direct = functools.partial(_direct, spec)
    return decorated


def _as_coroutine_function(fn: Any) -> Any:
    """Mark a plain function that returns a coroutine, so that `iscoroutinefunction` is True for it."""
    if sys.version_info >= (3, 12):
        import inspect

        return inspect.markcoroutinefunction(fn)
    # Since 3.11 the flag does not change how the function is called: only `iscoroutinefunction` reads it.
    fn.__code__ = fn.__code__.replace(co_flags=fn.__code__.co_flags | CO_COROUTINE)
    return fn


def _hide_key(decorated: Any, fn: Callable[..., Any]) -> None:
    """Remove the key from an effect's signature: frameworks that make a tool of it must show what a caller passes."""
    signature = signature_of(fn)
    keys = {name for name, annotation in annotations_of(fn, signature).items() if is_key(annotation)}
    if keys:
        shown = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        decorated.__signature__ = signature.replace(parameters=shown)
        decorated.__annotations__ = {name: kind for name, kind in fn.__annotations__.items() if name not in keys}


def _direct(spec: StepSpec, /, *args: Any, **kwargs: Any) -> Any:
    """Call the body without a run: `book.direct(…)`."""
    return spec.body(*args, **kwargs)


def _scope(spec: StepSpec) -> Scope | None:
    """Return the scope of a call's run; None for a plain call. Raises NotInRun for an effect that has no run."""
    scope = current.get()
    if scope is None:
        scope = outside_scope(spec)
    if scope is None:
        if spec.kind == "effect":
            raise NotInRun(
                f"effect {spec.name!r} was called without a run, so nothing would be written down: call it in a "
                f"durable function that store.run(fn, …) runs, or say {spec.name}.direct(…) if you mean it. A thread "
                "of your own loses the run: use perdure.gather or perdure.map"
            )
        if executing and threading.current_thread() is not threading.main_thread():
            _warn_of_thread(spec)
        return None
    if scope.body is not None:
        if spec.kind == "effect":
            steps.refuse_nested(spec, scope)
        return None
    return scope


def _warn_of_thread(spec: StepSpec) -> None:
    """Warn once per step that it is not recorded. Perdure cannot know whether the run started the thread."""
    warn_once(
        spec,
        "step %s is not recorded: it was called in a thread without a run, while a run executes in this process. "
        "If that run started the thread, use perdure.gather or perdure.map; if not, say %s.direct(…)",
        spec.name,
        spec.fn.__name__,
        extra=event("step.unrecorded", step=spec.name),
    )


def _check(fn: Any, decorator: str) -> None:
    if isinstance(fn, classmethod | staticmethod):
        raise UsageError(f"put @perdure.{decorator} below @{type(fn).__name__}, next to the function")
    if not callable(fn) or isinstance(fn, type) or not hasattr(fn, "__code__"):
        raise UsageError(f"@perdure.{decorator} is for functions, not {fn!r}")


def _name(name: str | None, fn: Callable[..., Any]) -> str:
    chosen = check_name(plain_name(fn) if name is None else name, "function")
    for taken in ("perdure.", TASK):
        if chosen.startswith(taken):
            raise UsageError(f"name={chosen!r}: names that begin with {taken!r} are Perdure's own")
    return chosen


def _names(ignore: Any) -> tuple[str, ...]:
    if isinstance(ignore, str):
        raise UsageError(f"ignore takes a tuple of names: ignore=({ignore!r},)")
    return tuple(ignore)


def _seconds(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise UsageError(f"timeout_s={timeout_s!r}: a number of seconds above 0")
    if timeout_s is not None:
        check_seconds(timeout_s, "timeout_s")
    return None if timeout_s is None else float(timeout_s)
