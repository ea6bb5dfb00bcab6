"""Child runs: a child is inserted in the commit that records the call. Its parent waits for it with a recorded call."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

from blake3 import blake3

from perdure.errors import RunCancelled, RunFailed, RunMismatch, RunStuck, RunUndone, UsageError
from perdure.runs.calls.failures import describe_error, error_text, mark_recorded, rebuilt
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.instrumentation import active_span
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.scope import Scope
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal.entries import DONE, SPAWN, Entry, compress, decompress, opening
from perdure.runs.journal.journal import outcome_of
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.rows import FINISHED, NewRun, find, insert, look_up_all
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Flow, Rows, read
from perdure.threads.checks import NAME_CHARACTERS_MAX
from perdure.threads.external_rows import keys_in
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec
from perdure.values.token_estimate import cut, estimate

SPAWNING = declare(CallKind("perdure.spawn", reaches_out=True))
RESULT = declare(CallKind("perdure.result", waits_for="run"))
NAME = SPAWNING.name
_LOOK_US = 2_000_000  # interval at which a run polls for the end of a child of another run


class ChildOptions(NamedTuple):
    """The options of `perdure.spawn`. None means that of the parent."""

    id: str | None = None
    queue: str | None = None
    priority: int | None = None
    delay_us: int = 0
    tags: str | None = None


CHILD_DIGITS = 12  # of a turn's incarnation, in the ids of its children


def spawn_operation(
    scope: Scope,
    path: str,
    spec: DurableSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: ChildOptions,
) -> Operation[Child]:
    """Start a child run."""
    execution = scope.execution
    text, values = spec.binder.encoded(args, kwargs, execution.ctx.codec)
    args_hash = digest(text)
    recorded, ended = yield from recorded_call(scope, path, f"{NAME}:{spec.name}", args_hash)
    if (first := opening(recorded)) is not None:
        return Child(str((first.extra or {})["child"]))
    if ended is not None:
        yield from answer(execution, ended)
    yield from keep(execution, values)
    row = execution.row
    # A run that continued as new starts other children at the same paths.
    round_ = f"{row.since}:" if row.since else ""
    if execution.turn is not None:  # by the message: a rewound member may handle another one at the same place
        round_ = f"{row.incarnation.hex()[:CHILD_DIGITS]}:"
    run_id = options.id or _child_id(f"{row.id}/{round_}{path}")
    new = NewRun(
        run_id,
        spec.name,
        spec.version,
        compress(text),
        args_hash,
        # Derived from the parent's, so if a fork keeps its keys, its children keep theirs.
        blake3(row.incarnation + path.encode()).digest(16),
        options.queue or row.queue,
        row.priority if options.priority is None else options.priority,
        parent=row.run,
        root=row.root,
        wake_at=execution.shared_clock_us() + options.delay_us if options.delay_us else 0,
        tags=options.tags,
        trace=active_span(),
        values=values,
    )
    now = execution.ctx.clock_us()
    entry = Entry(path, f"{NAME}:{spec.name}", now, args_hash, extra={"child": run_id})
    try:
        yield from execution.journal.commit(partial(_insert, execution, new, now), (SPAWN, entry))
    except RunMismatch as error:  # recorded, because that run may be gone when this call is replayed
        extra = {"error": describe_error(error, execution.ctx.codec)}
        yield from execution.journal.record((DONE, Entry(path, f"{NAME}:{spec.name}", now, args_hash, extra=extra)))
        raise
    return Child(run_id)


def _child_id(name: str) -> str:
    """Return the name as a run's id. The end of a long name is replaced by a hash of all of it."""
    if len(name) <= NAME_CHARACTERS_MAX:
        return name
    return f"{name[: NAME_CHARACTERS_MAX - 33]}~{blake3(name.encode()).hexdigest()[:32]}"


def _insert(execution: Execution, new: NewRun, now: int) -> Generator[Batch, list[Rows], None]:
    is_new = yield from insert(execution.tenant, new, now=now)
    if is_new:
        return
    other, row = (yield from look_up_all(execution.tenant, [new.id]))[new.id], execution.row
    if other.run in (row.run, row.parent, row.root):
        raise RunMismatch(
            f"perdure.spawn(id={new.id!r}): this is the run itself, or a parent of it, which would wait for its "
            "own end; give the child an id of its own"
        )
    if (other.function, other.input) != (new.function, new.input):
        raise RunMismatch(
            f"perdure.spawn(id={new.id!r}): already a run of {other.function}, with other arguments or of another "
            "function; give the child an id of its own"
        )


class Child:
    """A child run, as its parent sees it."""

    __slots__ = ("id",)

    def __init__(self, run_id: str) -> None:
        self.id = run_id

    def __repr__(self) -> str:
        return f"<Child {self.id!r}>"

    def result(self) -> Any:
        """Wait for the child's end and return its result. Await it in an async run.

        Raises RunFailed, RunCancelled or RunUndone if the child ended without a result.
        """
        from perdure.runs.calls.calls import do, place

        scope, path = place("Child.result()")
        return do(scope, result_operation(scope, path, self.id))


def result_operation(scope: Scope, path: str, run_id: str) -> Operation[Any]:
    """Wait for a run's end, record it, and return its result or raise its error."""
    execution, name = scope.execution, RESULT.name
    _, ended = yield from recorded_call(scope, path, name)
    if ended is not None:
        return (yield from answer(execution, ended))
    yield from execution.journal.flush()
    while True:
        row = yield from read(partial(find, execution.tenant, run_id))
        if row is None:
            raise _gone(execution, path, run_id)
        if row.status in FINISHED:
            break
        # The end of a child wakes only its parent: here the origin of a fork, or another run that used the same id.
        foreign = row.parent != execution.row.run
        wake_at = execution.shared_clock_us() + _LOOK_US if foreign else None
        yield Wait(path, RESULT.waiting(path, f"run {run_id}", run=run_id), wake_at, RESULT)
    outcome = yield from read(partial(outcome_of, execution.tenant, row))
    now = execution.ctx.clock_us()
    if row.status == "done":
        yield from keep(execution, (), keys_in(decompress(outcome or b"null")))
        yield from execution.journal.record((DONE, Entry(path, name, now, value=outcome, extra={"child": run_id})))
        return execution.decoded(decompress(outcome or b"null"))
    error = outcome_error(row.status, run_id, outcome, execution.ctx.codec)
    extra = {"error": describe_error(error, execution.ctx.codec), "child": run_id}
    yield from execution.journal.record((DONE, Entry(path, name, now, extra=extra)))
    mark_recorded(error, path)
    raise error


def bounded(result: Any, run_id: str, limit_tokens: int, codec: Codec) -> Any:
    """Return a child's result if it is small enough, or the beginning of a text. Raises UsageError for other values.

    Tokens are estimated, never counted by a tokenizer: a run that resumes elsewhere must cut at the same place.
    """
    text = result if isinstance(result, str) else encode(result, codec).decode()
    kept = cut(text, limit_tokens)
    if len(kept) == len(text):
        return result
    if isinstance(result, str):
        return f"{kept}… ({len(text) - len(kept):,} more characters: the result of run {run_id})"
    raise UsageError(
        f"the result of subtask {run_id!r} has about {estimate(text):,} tokens, and {limit_tokens:,} are allowed: "
        "let it return a summary"
    )


def _gone(execution: Execution, path: str, run_id: str) -> RunStuck:
    """Halt a run that waits for a run which does not exist here, and return the error, which no code can catch.

    A fork shares children with its origin: they can be deleted, or left behind when the fork is moved.
    """
    stuck = RunStuck(
        f"run {execution.row.id!r} waits for run {run_id!r} (step {path}), which is not in this store: it was deleted, "
        "or belongs to the run that this one was forked from and did not move with it. Bring it back, or fork this run "
        f"before step {path} and let it do without"
    )
    execution.halt(stuck)
    return stuck


def described_end(outcome: bytes | None, codec: Codec) -> dict[str, Any]:
    """Return the recorded end of a run that did not succeed: its error, and what happened to its effects."""
    described = decode(decompress(outcome), codec) if outcome else {}
    return described if isinstance(described, dict) else {}


def has_undone(tenant: int, row: RunRow, codec: Codec) -> Flow[bool]:
    return "undone" in described_end((yield from read(partial(outcome_of, tenant, row))), codec)


def outcome_error(status: str, run_id: str, outcome: bytes | None, codec: Codec) -> Exception:
    """Return the error to raise for a run that ended without a result."""
    described = described_end(outcome, codec)
    reason = error_text(described) if described.get("type") else ""
    lasting = f"; {described['lasting']}" if described.get("lasting") else ""
    if status == "cancelled":
        undone = f", and what {'has an undo' if lasting else 'it did'} was undone" if described.get("undone") else ""
        return RunCancelled(f"run {run_id!r} was cancelled{undone}{lasting}")
    if status == "undone":
        why = reason.removeprefix("RunUndone").removeprefix(": ")  # perdure.undo() records no error of the user's
        return RunUndone(f"run {run_id!r} was undone{': ' + why if why else ''}{lasting}")
    if status == "exported":
        return RunCancelled(f"run {run_id!r} was exported: it continues in another store")
    advice = ""
    if "undone" not in described:
        advice = f"`perdure run retry {run_id}` continues it after a fix"
        if described.get("stands"):
            advice = f"What it did stands: {advice}, `perdure run undo {run_id}` undoes it"
        advice = f". {advice}"
    shown = reason.removesuffix(".") if lasting or advice else reason  # many messages end with a full stop of their own
    failed = RunFailed(f"run {run_id!r} failed: {shown}{lasting}{advice}", error=reason)
    if described.get("type"):
        failed.__cause__ = rebuilt(described, codec)
    return failed
