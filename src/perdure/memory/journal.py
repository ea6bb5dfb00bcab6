"""Memory in a durable function: a write commits with its journal entry, so exactly once; a read is recorded.

A replay answers from the entries, and neither writes nor reads. This holds for memory of the database that the run is
in; other memory is refused (`RunJournal.joins`). Inside a step's body memory is used plainly: if the step is run again,
so is what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from perdure.errors import Conflict, NotFound, UsageError
from perdure.memory import rows
from perdure.memory.flows import Commit, SummaryOf, Written, decoded, with_summaries, write_versions
from perdure.memory.rows import NewVersion
from perdure.runs.calls.failures import describe_error, mark_recorded
from perdure.runs.calls.saving import RunJournal
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import DONE, Entry
from perdure.storage.program import Flow, Program, dry_write, either
from perdure.threads.context import StoreContext
from perdure.values.codec import encode

T = TypeVar("T")
_RUNS = RunJournal()
CommitTogether = Callable[[Callable[[], Program[Any]], Any], Flow[Any]]
Record = Callable[..., Operation[None]]


class _WrittenOtherwise(Exception):
    """It was written otherwise than the entry says. The transaction is undone, and done again with this."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written


def read(ctx: StoreContext, name: str, args: list[Any], flow: Flow[T]) -> Flow[T]:
    """A read; in a run it is recorded with its result."""
    if not _RUNS.joins(ctx):
        return flow

    def work(record: Record) -> Operation[T]:
        found = yield from flow
        yield from record(found)
        return found

    return _call(ctx, name, args, work)


def write(
    ctx: StoreContext,
    name: str,
    args: Callable[[], list[Any]],
    make: Callable[[Commit], Flow[Written]],
    shape: Callable[[Written], T],
) -> Flow[T]:
    """A write; in a run its versions are committed with the entry that says which they are."""
    if not _RUNS.joins(ctx):
        return (yield from decoded(shape, (yield from make(write_versions))))

    def work(record: Record) -> Operation[T]:
        def commit(ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int) -> Flow[Written]:
            tenant = yield from ctx.ensure_tenant()

            def attempt(summary_of: SummaryOf) -> Flow[Written]:
                summary, seen = summary_of(path)
                op = partial(rows.write_versions, tenant, path, [*summary, *versions], now, last=False, seen=seen)
                foreseen: Written = yield from dry_write(op)
                while True:
                    try:
                        yield from record(shape(foreseen), partial(_as_foreseen, op, foreseen))  # type: ignore[misc]
                        return foreseen
                    except _WrittenOtherwise as other:
                        foreseen = other.written

            return (yield from with_summaries(ctx, attempt))

        return shape((yield from make(commit)))

    return (yield from _call(ctx, name, args(), work))


def together(
    ctx: StoreContext, name: str, args: list[Any], make: Callable[[CommitTogether], Flow[T]], alone: CommitTogether
) -> Flow[T]:
    """A write whose result is known before it is committed: in a run with the entry that says it, else by `alone`."""
    if not _RUNS.joins(ctx):
        return make(alone)
    return _call(ctx, name, args, lambda record: make(lambda op, result: record(result, op)))  # type: ignore[arg-type, return-value]


def _as_foreseen(op: Callable[[], Program[Written]], foreseen: Written) -> Any:
    written = yield from op()
    if [row and row._replace(id=0) for row in written] != [row and row._replace(id=0) for row in foreseen]:
        raise _WrittenOtherwise(written)


def _call(ctx: StoreContext, name: str, args: list[Any], work: Callable[[Record], Operation[T]]) -> Flow[T]:
    scope = current.get()
    assert scope is not None
    operation = partial(_operation, scope, scope.take(), name, digest(encode(args, ctx.codec)), work)
    return either(lambda: run_operation(scope, operation()), lambda: arun_operation(scope, operation()))


def _operation(
    scope: Scope, path: str, name: str, args_hash: bytes, work: Callable[[Record], Operation[T]]
) -> Operation[T]:
    execution = scope.execution
    _, ended = yield from recorded_call(scope, path, name, args_hash)
    if ended is not None:
        return (yield from answer(execution, ended))  # type: ignore[no-any-return]

    def record(found: Any, same_tx: Any = None, **extra: Any) -> Operation[None]:
        value = execution.encoded(found)
        entry = Entry(path, name, execution.ctx.clock_us(), args_hash, value=value, extra=extra or None)
        return execution.journal.record((DONE, entry), same_tx=same_tx)

    try:
        return (yield from work(record))
    except (Conflict, NotFound, UsageError) as error:  # the code may catch it, and must see it again
        yield from record(None, error=describe_error(error, execution.ctx.codec))
        mark_recorded(error, path)
        raise
