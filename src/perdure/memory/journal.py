"""Memory in a durable function: a write commits with its journal entry, so exactly once; a read is recorded.

A replay answers from the entries, and neither writes nor reads. This holds for memory of the store that the run is in.
Inside a step's body memory is used plainly: if the step is run again, so is what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from perdure.errors import Conflict, NotFound, UsageError
from perdure.memory import rows
from perdure.memory.flows import Commit
from perdure.memory.models import Item, Namespace
from perdure.memory.rows import ItemRow, NewVersion
from perdure.runs.calls.failures import describe_error, mark_recorded
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.operation import Body, Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import DONE, Entry
from perdure.storage.program import Call, Flow, Program, either, rehearse
from perdure.threads.context import StoreContext
from perdure.values.codec import encode

T = TypeVar("T")
Written = list[ItemRow | None]
_CLASSES: dict[str, type] = {"item": Item, "namespace": Namespace}


class _WrittenOtherwise(Exception):
    """It was written otherwise than the entry says. The transaction is undone, and done again with this."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written


def read(ctx: StoreContext, name: str, args: list[Any], flow: Flow[T]) -> Flow[T]:
    """A read that is recorded with its result."""

    def work(execution: Any, record: Callable[[Any], Operation[None]], is_async: bool) -> Operation[T]:
        found = yield from _inside(execution, flow, is_async)
        yield from record(found)
        return found

    return _call(ctx, name, args, work)


def write(
    ctx: StoreContext,
    name: str,
    args: list[Any],
    make: Callable[[Commit], Flow[Written]],
    shape: Callable[[Written], T],
) -> Flow[T]:
    """A write whose versions are committed with the entry that says which they are."""

    def work(execution: Any, record: Callable[..., Operation[None]], is_async: bool) -> Operation[T]:
        def commit(ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int) -> Flow[Written]:
            tenant = yield from ctx.ensure_tenant()
            op = partial(rows.write_versions, tenant, path, versions, now, last=False)
            foreseen: Written = yield from rehearse(op)
            while True:
                try:
                    yield from record(shape(foreseen), partial(_as_foreseen, op, foreseen))  # type: ignore[misc]
                    return foreseen
                except _WrittenOtherwise as other:
                    foreseen = other.written

        return shape((yield from _inside(execution, make(commit), is_async)))

    return _call(ctx, name, args, work)


def _as_foreseen(op: Callable[[], Program[Written]], foreseen: Written) -> Any:
    written = yield from op()
    if [row and row._replace(id=0) for row in written] != [row and row._replace(id=0) for row in foreseen]:
        raise _WrittenOtherwise(written)


def _call(ctx: StoreContext, name: str, args: list[Any], work: Callable[..., Operation[T]]) -> Flow[T]:
    scope = current.get()
    assert scope is not None
    path, args_hash = scope.take(), digest(encode(args, ctx.codec))
    do = partial(_operation, scope, path, name, args_hash, work)
    return either(lambda: run_operation(scope, do(False)), lambda: arun_operation(scope, do(True)))


def _operation(
    scope: Scope, path: str, name: str, args_hash: bytes, work: Callable[..., Operation[T]], is_async: bool
) -> Operation[T]:
    execution = scope.execution
    _, ended = yield from recorded_call(scope, path, name, args_hash)
    if ended is not None:
        return _revived((yield from answer(execution, ended)))  # type: ignore[no-any-return]

    def record(found: Any, same_tx: Any = None, **extra: Any) -> Operation[None]:
        value = execution.encoded(_plain(found))
        entry = Entry(path, name, execution.ctx.clock_us(), args_hash, value=value, extra=extra or None)
        return execution.journal.record((DONE, entry), same_tx=same_tx)

    try:
        return (yield from work(execution, record, is_async))
    except (Conflict, NotFound, UsageError) as error:  # the code may catch it, and must see it again
        yield from record(None, error=describe_error(error, execution.ctx.codec))
        mark_recorded(error)
        raise


def _inside(execution: Any, flow: Flow[T], is_async: bool) -> Operation[T]:
    """A flow as part of an operation: what is no transaction, such as an embedder, is called as a body is."""
    driver = execution.ctx.driver
    try:
        want = next(flow)
        while True:
            try:
                if isinstance(want, Call):
                    perform = want.aperform if is_async else want.perform
                    found = yield Body(partial(perform, driver), is_async)
                else:
                    found = yield want
            except BaseException as error:
                want = flow.throw(error)
            else:
                want = flow.send(found)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _plain(found: Any) -> Any:
    """A result as the journal keeps it: readable, and without a class of ours."""
    if isinstance(found, list):
        return [_plain(one) for one in found]
    for name, cls in _CLASSES.items():
        if isinstance(found, cls):
            given = {field.name: getattr(found, field.name) for field in fields(cls)}
            return {name: {key: value for key, value in given.items() if value is not None}}
    return found


def _revived(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_revived(one) for one in plain]
    if isinstance(plain, dict):
        [(name, given)] = plain.items()
        cls = _CLASSES[name]
        return cls(**{field.name: given.get(field.name) for field in fields(cls)})
    return plain
