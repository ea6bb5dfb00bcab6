"""Recorded time, random values and patches of the code: every replay returns the values of the first execution.

They are written with the next entry, before any body runs. So no body can have seen a value that is not recorded.
"""

from __future__ import annotations

import random as chance
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from perdure.runs.execution.execution import Execution
from perdure.runs.execution.scope import need_scope
from perdure.runs.journal.entries import VALUE, Entry, decompress
from perdure.runs.journal.kinds import CallKind, declare
from perdure.threads.checks import check_name
from perdure.threads.models import moment

PATCHED = declare(CallKind("perdure.patched", "patch"))


def record_once(name: str, draw: Callable[[], Any]) -> Any:
    """Return the recorded value; if there is none, draw one and buffer it for the journal."""
    scope = need_scope(f"{name}()")
    scope.check()
    execution, path = scope.execution, scope.take()
    recorded = execution.recorded(path, name, None)
    if recorded:
        value = recorded[-1].entry.value
        return execution.decoded(decompress(value)) if value is not None else None
    drawn = draw()
    execution.journal.buffer(VALUE, Entry(path, name, execution.ctx.clock_us(), value=execution.encoded(drawn)))
    return drawn


def now() -> datetime:
    """Return the time in UTC; on replay, the recorded time."""
    time: datetime = record_once("perdure.now", lambda: moment(need_scope("perdure.now()").execution.ctx.clock_us()))
    return time


def random() -> float:
    """Return a random number from 0 to 1; on replay, the recorded number."""
    return float(record_once("perdure.random", chance.random))


def uuid() -> UUID:
    """Return a random UUID; on replay, the recorded UUID."""
    value: UUID = record_once("perdure.uuid", uuid4)
    return value


def patched(name: str) -> bool:
    """Return whether this run takes the changed code path.

    True for a run that first reaches this call with the new code. False for one that passed it with the old code.
    """
    check_name(name, "patch")
    scope = need_scope("perdure.patched()")
    scope.check()
    execution = scope.execution
    with execution.counting:  # two branches may call this at once: both must get the same answer
        if name not in execution.patches:
            execution.patches[name] = _decide_patch(execution, name)
        return execution.patches[name]


def _decide_patch(execution: Execution, name: str) -> bool:
    path = f"patch:{name}"
    recorded = execution.index.at(path)
    if recorded:
        return recorded[-1].entry.value == b"true"
    value = not execution.index.ahead  # an entry lies ahead, so the old code has passed this call
    if not execution.replay:
        text = b"true" if value else b"false"
        execution.journal.buffer(VALUE, Entry(path, PATCHED.name, execution.ctx.clock_us(), value=text))
    return value
