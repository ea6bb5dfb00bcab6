"""Memory in a durable function: a write commits with its journal entry, so exactly once, and a read is recorded.

A replay answers from the entries and neither writes nor reads. This holds for memory in the database of the run. Other
memory is refused (`RunJournal.joins`), and so are changes of many items. Inside a step's body memory is not journaled:
if the step runs again, so do its reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from perdure.errors import Conflict, NotFound, UsageError
from perdure.memory import rows
from perdure.memory.flows import Commit, SummaryOf, Written, decoded, with_summaries, write_versions
from perdure.memory.models import encoded_content, encoded_items
from perdure.memory.rows import NewVersion
from perdure.runs.calls.failures import describe_error, mark_recorded
from perdure.runs.calls.saving import RunJournal
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import DONE, Entry, compress
from perdure.storage.program import Flow, Program, either
from perdure.threads.context import StoreContext
from perdure.values.codec import encode
from perdure.values.crdts import Mergeable

T = TypeVar("T")
_RUNS = RunJournal()
CommitTogether = Callable[[Callable[[], Program[Any]], Any], Flow[Any]]


def read(ctx: StoreContext, name: str, args: list[Any], flow: Flow[T]) -> Flow[T]:
    """Read by `flow`. In a run the result is recorded."""
    if not _RUNS.joins(ctx):
        return flow

    def work(call: _Call) -> Operation[T]:
        result = yield from flow
        yield from call.record(result)
        return result

    return _call(ctx, name, args, work)


def write(
    ctx: StoreContext,
    name: str,
    args: Callable[[], list[Any]],
    make: Callable[[Commit], Flow[Written]],
    shape: Callable[[Written], T],
) -> Flow[T]:
    """Write by `make`, and return what `shape` makes of the rows. In a run the entry commits with the versions."""
    if not _RUNS.joins(ctx):
        return (yield from decoded(shape, (yield from make(write_versions))))

    def work(call: _Call) -> Operation[T]:
        def commit(ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int) -> Flow[Written]:
            tenant = yield from ctx.ensure_tenant()
            known = [one for one in versions if one.body is not None and one.merge is None]
            contents = {one.key: encoded_content(one.body or b"", ctx.codec) for one in known}

            def attempt(summary_of: SummaryOf) -> Flow[Written]:
                summary, seen = summary_of(path)
                op = partial(rows.write_versions, tenant, path, [*summary, *versions], now, last=False, seen=seen)
                return call.commit(op, lambda written: encoded_items(written, contents, ctx.codec))  # type: ignore[return-value]

            return (yield from with_summaries(ctx, attempt))

        return shape((yield from make(commit)))

    return (yield from _call(ctx, name, args(), work))


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run compares of values that it puts."""
    return {key: value._argument if isinstance(value, Mergeable) else value for key, value in values.items()}


def refuse(ctx: StoreContext, name: str) -> None:
    """Raise UsageError in a run, for a change that takes several transactions: none of them can hold its entry."""
    if _RUNS.joins(ctx):
        raise UsageError(
            f"memory.{name}() takes several transactions: if the run is killed meanwhile, it would be repeated, also "
            "for items that were put since. Call it in a function with @perdure.step"
        )


def together(
    ctx: StoreContext, name: str, args: list[Any], make: Callable[[CommitTogether], Flow[T]], alone: CommitTogether
) -> Flow[T]:
    """Run a write whose result is known before its commit. In a run the entry with that result commits with it.

    Outside of a run `alone` commits the write.
    """
    if not _RUNS.joins(ctx):
        return make(alone)

    def work(call: _Call) -> Operation[T]:
        def commit(op: Callable[[], Program[Any]], result: Any) -> Flow[Any]:
            text = encode(result, ctx.codec)
            return call.commit(op, lambda _: text)  # type: ignore[return-value]

        return make(commit)

    return _call(ctx, name, args, work)


class _Call(NamedTuple):
    """A call of a run that is not in the journal yet."""

    execution: Execution
    path: str
    name: str
    args_hash: bytes

    def record(self, result: Any, **extra: Any) -> Operation[None]:
        """Record how the call ended."""
        return self.execution.journal.record(self._draft(self.execution.encoded(result), extra or None))

    def commit(self, op: Callable[[], Program[T]], text_of: Callable[[T], bytes]) -> Operation[T]:
        """Run a write and record it in one transaction. `text_of` encodes the call's result from that of the write."""
        kind, entry = self._draft()
        return self.execution.journal.commit(
            op, (kind, entry), lambda result: replace(entry, value=compress(text_of(result)))
        )

    def _draft(self, value: bytes | None = None, extra: dict[str, Any] | None = None) -> tuple[int, Entry]:
        at = self.execution.ctx.clock_us()
        return DONE, Entry(self.path, self.name, at, self.args_hash, value=value, extra=extra)


def _call(ctx: StoreContext, name: str, args: list[Any], work: Callable[[_Call], Operation[T]]) -> Flow[T]:
    scope = current.get()
    assert scope is not None
    call = _Call(scope.execution, scope.take(), name, digest(encode(args, ctx.codec)))
    operation = partial(_operation, scope, call, work)
    return either(lambda: run_operation(scope, operation()), lambda: arun_operation(scope, operation()))


def _operation(scope: Scope, call: _Call, work: Callable[[_Call], Operation[T]]) -> Operation[T]:
    execution = call.execution
    _, ended = yield from recorded_call(scope, call.path, call.name, call.args_hash)
    if ended is not None:
        return (yield from answer(execution, ended))  # type: ignore[no-any-return]
    try:
        return (yield from work(call))
    except (Conflict, NotFound, UsageError) as error:  # the function may catch it, so a replay must raise it again
        yield from call.record(None, error=describe_error(error, execution.ctx.codec))
        mark_recorded(error, call.path)
        raise
