"""Metrics and spans of runs and their steps: how they ended, and how long they took.

A span is open while a body runs, so that spans of user code are its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, T
from perdure.runs.execution.scope import StepCall
from perdure.storage import metrics


def measured_run(sink: metrics.Sink, execution: Execution, execute: Operation[str]) -> Operation[str]:
    """Measure the execution of a run by this process."""
    row = execution.row
    sink.record(metrics.RUN_EVENTS, 1, "started" if row.fence == 1 else "resumed")
    token = sink.begin("perdure.run", {"perdure.function": row.function}, {"perdure.run": row.id})
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


@contextmanager
def measuring(sink: metrics.Sink, call: StepCall) -> Iterator[None]:
    """Measure one call of the body of a step or an effect."""
    kind = call.spec.kind
    attributes = {"perdure.step": call.name, "perdure.step.kind": kind}
    token = sink.begin(f"perdure.{kind}", attributes, {"perdure.run": call.execution.row.id, "perdure.path": call.path})
    begun = perf_counter()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        sink.record(metrics.STEP_TIME, perf_counter() - begun, kind, metrics.error_type(failure))
        sink.end(token, {}, failure)


def measured_body(sink: metrics.Sink, call: StepCall, operation: Operation[T]) -> Operation[T]:
    """Measure an operation that calls the body of a step or an effect."""
    with measuring(sink, call):
        return (yield from operation)


def count_event(name: str, count: int = 1) -> None:
    """Count an event of `count` runs."""
    if (sink := metrics.sink) is not None and count:
        sink.record(metrics.RUN_EVENTS, count, name)
