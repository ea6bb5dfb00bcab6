"""Metrics and spans of runs and their steps: how they ended, and how long they took.

A span is open while a body runs, so that spans of user code are its children. The span of an execution has links to the
span that started the run and to that of the execution before. Both are stored with the run if tracing is on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any

import orjson

from perdure.errors import Damaged, LeaseLost, StoreError
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.model_answers import attributes_of_answer
from perdure.runs.execution.operation import Operation, T
from perdure.runs.execution.scope import StepCall
from perdure.runs.journal import rows
from perdure.storage import metrics
from perdure.storage.program import Batch, Rows, read


def measured_run(sink: metrics.Sink, execution: Execution, execute: Operation[str]) -> Operation[str]:
    """Measure the execution of a run by this process."""
    row = execution.row
    sink.record(metrics.RUN_EVENTS, 1, "started" if row.fence == 1 else "resumed")
    spans = (yield from _stored_spans(execution)) if sink.traces else {}
    token = sink.begin("perdure.run", {"perdure.function": row.function}, {"perdure.run": row.id}, spans)
    if token is not None and (span := sink.span_of(token)):
        yield from _store_spans(execution, {**spans, "resumed": span})
    begun, status = perf_counter(), "lost"
    failure: BaseException | None = None
    try:
        status = yield from execute
        return status
    except BaseException as error:
        failure = error
        raise
    finally:
        sink.record(metrics.RUN_EVENTS, 1, status)
        sink.record(metrics.RUN_TIME, perf_counter() - begun, status)
        sink.end(token, {"perdure.status": status}, failure)


def _stored_spans(execution: Execution) -> Operation[dict[str, str]]:
    """Return the spans that started the run ("started") and executed it last ("resumed"), as far as they are known."""
    try:
        text = yield from read(partial(rows.value_of, execution.tenant, execution.row.run, rows.TRACE))
        return {} if text is None else dict(orjson.loads(text))
    except (StoreError, Damaged, ValueError):
        return {}  # traces do not fail a run


def _store_spans(execution: Execution, spans: dict[str, str]) -> Operation[None]:
    def program() -> Generator[Batch, list[Rows], None]:
        yield Batch(rows.trace_statement(execution.tenant, execution.row.run, spans))

    with suppress(StoreError, LeaseLost):  # a lost lease ends the execution at its next step
        yield from execution.journal.write_fenced(program)


def active_span() -> str:
    """Return the active span as W3C's traceparent; "" if tracing is off."""
    return "" if (sink := metrics.sink) is None else sink.span_of(None)


class Result:
    """The result of a body that is being measured."""

    value: Any = None


@contextmanager
def measuring(sink: metrics.Sink, call: StepCall) -> Iterator[Result]:
    """Measure one call of the body of a step or an effect."""
    kind = call.spec.kind
    attributes = {"perdure.step": call.name, "perdure.step.kind": kind}
    ids = {"perdure.run": call.execution.row.id, "perdure.path": call.path}
    if (tool := getattr(call.caller, "tool", None)) is not None:
        attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool.name}
        ids |= {"gen_ai.tool.call.id": tool.id} if tool.id else {}
    token = sink.begin(f"perdure.{kind}", attributes, ids)
    begun, result = perf_counter(), Result()
    failure: BaseException | None = None
    try:
        yield result
    except BaseException as error:
        failure = error
        raise
    finally:
        sink.record(metrics.STEP_TIME, perf_counter() - begun, kind, metrics.error_type(failure))
        request = {**dict(zip(call.spec.binder.signature.parameters, call.args, strict=False)), **call.kwargs}
        sink.end(token, attributes_of_answer(result.value, request), failure)


def measured_body(sink: metrics.Sink, call: StepCall, operation: Operation[T]) -> Operation[T]:
    """Measure an operation that calls the body of a step or an effect."""
    with measuring(sink, call) as result:
        result.value = yield from operation
        return result.value  # type: ignore[no-any-return]


def count_event(name: str, count: int = 1) -> None:
    """Count an event of `count` runs."""
    if (sink := metrics.sink) is not None and count:
        sink.record(metrics.RUN_EVENTS, count, name)
