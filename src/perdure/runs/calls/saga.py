"""Undoing a run: settle the effects in doubt, then undo all effects, newest first, each as a journaled effect.

The decision to undo is recorded first, so undoing continues after a crash. A fork undoes only its own effects.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from perdure.errors import InDoubt, RunError, RunStuck
from perdure.runs.calls.children import has_undone
from perdure.runs.calls.doubt import ended, settle
from perdure.runs.calls.effects import effect_operation, restore_intent
from perdure.runs.calls.failures import describe_error, line_of
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.scope import StepCall
from perdure.runs.functions.callbacks import called_by_name
from perdure.runs.functions.retry import Retry
from perdure.runs.functions.specs import StepSpec, find_step, plain_name
from perdure.runs.journal import control, rows, standing
from perdure.runs.journal.entries import DONE, SPAWN, VALUE, Entry, Recorded, completion
from perdure.runs.journal.kinds import CHILD_UNDO, CallKind, declare
from perdure.runs.journal.standing import END, UNDO
from perdure.storage.program import Batch, Program, Sql, read

UNDONE = declare(CallKind("perdure.undo", "end", is_changeable=False))
_UNDO_CHILD = Sql(
    """UPDATE run SET status = 'queued', request = 'undo', wake_at = 0, changed_at = {now},
        reopened_at = CASE WHEN status IN ('done', 'failed') THEN {now} ELSE reopened_at END
    WHERE tenant = :tenant AND id = :id AND status IN ('done', 'failed', 'queued', 'waiting', 'paused', 'stuck')"""
)
_ASK_CHILD = Sql("UPDATE run SET request = 'undo' WHERE tenant = :tenant AND id = :id AND status = 'running'")


def ending(execution: Execution) -> dict[str, Any] | None:
    """Return how the run is ending, if a decision to undo it is recorded; else None."""
    recorded = execution.index.at(END)
    return recorded[-1].entry.extra if recorded else None


def has_something_to_undo(execution: Execution) -> bool:
    calls = execution.index.calls()
    return bool(standing.undoable(calls) or standing.spawned(calls) or standing.open_calls(calls))


def compensate(execution: Execution, status: str, error: dict[str, Any] | None) -> Operation[None]:
    """Settle open effects, then undo effects and children, newest first.

    Raises Parked if a person must decide first, RunStuck if an undo fails.
    """
    if not has_something_to_undo(execution):
        return
    yield from decide(execution, status, error)
    yield from settle_open(execution)
    calls = execution.index.calls()
    units = [*standing.undoable(calls), *standing.spawned(calls)]
    for done_at, recorded in sorted(units, key=lambda unit: -unit[0]):
        del done_at
        if recorded.kind == SPAWN:
            yield from _undo_child(execution, recorded.entry)
        else:
            yield from undo_effect(execution, recorded.entry)


def decide(execution: Execution, status: str, error: dict[str, Any] | None) -> Operation[None]:
    """Record that a run is to be undone, and how it will have ended, unless that is recorded already."""
    if ending(execution) is None:
        at, extra = execution.ctx.clock_us(), {"as": status, "error": error}
        yield from execution.journal.record((VALUE, Entry(END, UNDONE.name, at, extra=extra)))


def open_calls(execution: Execution) -> list[Recorded]:
    """Return the intents of this run's own effects that have no end."""
    return standing.open_calls(execution.index.calls())


def settle_open(execution: Execution) -> Operation[None]:
    """Settle every effect whose end is not recorded, also in branches that lost to another branch.

    The function has ended, so whatever else its branches waited for is dropped.
    """
    execution.waits, execution.lost_prefixes = [], []
    for recorded in open_calls(execution):
        entry = recorded.entry
        spec = _effect_named(entry.name)
        arguments = execution.decoded((yield from execution.text(entry)))
        call = StepCall(execution.root, spec, entry.path, (), arguments, b"", entry.args_hash or b"")
        restore_intent(call, entry)
        call.is_last = True
        try:
            was_done, _ = yield from settle(call)
        except InDoubt:
            if completion(execution.index.at(entry.path)) is None:
                raise  # a person must decide, and nothing parks here
            continue  # on_doubt="fail": it is recorded, and the function that could catch it has ended
        if not was_done:
            error = RunError(f"{spec.name} did not happen")
            yield from ended(call, None, {"error": describe_error(error, execution.ctx.codec)})


def _effect_named(name: str) -> StepSpec:
    spec = find_step(name)
    if spec is None:
        raise RunStuck(
            f"effect {name!r} must be settled or undone, and this process does not know it: import its module"
        )
    return spec


def undo_effect(execution: Execution, intent: Entry) -> Operation[None]:
    """Undo an effect, unless its undo is recorded. Raises RunStuck if the undo fails."""
    spec = _effect_named(intent.name)
    if spec.undo is None:
        raise RunStuck(f"effect {intent.name!r} had an undo when it ran, and has none now; give it one again")
    then, now = (intent.extra or {}).get("undo"), plain_name(spec.undo)
    if then != now:
        raise RunStuck(
            f"effect {intent.name!r} was to be undone by {then!r} when it ran, and is by {now!r} now: run it with the "
            "code that it was started with"
        )
    path = f"{UNDO}{intent.path}"
    known = completion(execution.index.at(path))
    if known is not None and "error" not in (known.extra or {}):
        return
    arguments = execution.decoded((yield from execution.text(intent)))
    ended_as = completion(execution.index.at(intent.path))
    result = None if ended_as is None else (yield from execution.value(ended_as))
    undo = _undo_spec(spec)
    if undo.is_async and not execution.is_async:
        raise RunStuck(
            f"run {execution.row.id!r} is being undone, and {undo.name} is async in a blocking run, where nothing can "
            f"await it: give effect {intent.name!r} a plain function as its undo, then `perdure run resume "
            f"{execution.row.id}`"
        )
    values = {"result": result, "effect_key": str((intent.extra or {})["key"])}
    kwargs = called_by_name(undo.fn, {**spec.binder.plan.defaults, **arguments}, values)
    try:
        yield from effect_operation(execution.root, undo, (), kwargs, path)
    except Exception as error:
        raise RunStuck(
            f"run {execution.row.id!r} is being undone, and {undo.name} failed: {line_of(error)}. "
            f"What was done before that is not undone yet; fix the cause, then `perdure run resume {execution.row.id}`"
        ) from error


def _undo_spec(spec: StepSpec) -> StepSpec:
    """Return the undo as an effect of its own. A decorated undo keeps its own options."""
    undo: Any = spec.undo
    own = getattr(undo, "perdure", None)
    if isinstance(own, StepSpec):
        # "fail" becomes "ask": a person must decide whether the effect still stands.
        on_doubt: Literal["ask", "retry"] = "ask" if own.on_doubt == "fail" else own.on_doubt
        return StepSpec(
            own.fn, f"undo {spec.name}", "effect", own.ignore, own.retry, own.timeout_s,
            reconcile=own.reconcile, on_doubt=on_doubt, deadline_s=own.deadline_s,
            definite=own.definite,
        )  # fmt: skip
    retry = Retry(retries=3, backoff_s=0.2)
    return StepSpec(undo, f"undo {spec.name}", "effect", retry=retry, deadline_s=spec.deadline_s)


def _undo_child(execution: Execution, spawn: Entry) -> Operation[None]:
    """Undo a child as one unit: the child undoes its own effects.

    A cancelled run cancels a child that has not ended, and undoes one that has.
    """
    is_cancel = (ending(execution) or {}).get("as") == "cancelled"
    run_id = str((spawn.extra or {})["child"])
    path = f"{UNDO}{spawn.path}"
    if completion(execution.index.at(path)) is not None:
        return
    while True:
        row = yield from read(partial(rows.find, execution.tenant, run_id))
        if row is None or row.status in ("cancelled", "undone", "exported"):
            break
        if row.status == "failed" and (yield from has_undone(execution.tenant, row, execution.ctx.codec)):
            break
        if row.parent != execution.row.run:  # it existed before, and belongs to another run
            break
        if is_cancel and not (yield from read(partial(standing.needs_undo, execution.tenant, row))):
            break
        now = execution.ctx.clock_us()
        write_fenced = execution.journal.write_fenced
        if is_cancel and row.status not in rows.FINISHED:
            yield from write_fenced(partial(control.ask_for, execution.tenant, row.run, "cancel", now))
        else:
            yield from write_fenced(partial(_roll_child, execution.tenant, run_id, now))
        yield Wait(path, CHILD_UNDO.waiting(spawn.path, f"run {run_id}", run=run_id), None, CHILD_UNDO)
    now = execution.ctx.clock_us()
    yield from execution.journal.record((DONE, Entry(path, "undo " + spawn.name, now, extra={"child": run_id})))


def _roll_child(tenant: int, run_id: str, now: int) -> Program[None]:
    yield Batch(_UNDO_CHILD(tenant=tenant, id=run_id, now=now), _ASK_CHILD(tenant=tenant, id=run_id))


def undone_count(execution: Execution) -> int:
    return sum(path.startswith(UNDO) and completion(recorded) is not None for path, recorded in execution.index.calls())
