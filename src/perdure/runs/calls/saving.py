"""`thread.save()` and `thread.update()` in a durable function: one commit with the journal entry, so exactly once.

A replay answers from the entry and writes nothing. This holds for all threads in the run's database; one of another
database is refused. A save inside a step's body is a plain save: if the step runs again, so does the save. `rollback`,
`fork`, `prune` and `annotate` are not journaled: call them in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import replace

from perdure.errors import NotFound, UsageError
from perdure.log.append import Appended
from perdure.log.ids import show_id
from perdure.log.records import UNKNOWN, Record
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import Scope, current
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import DONE, Entry
from perdure.runs.journal.kinds import CallKind, declare
from perdure.storage.program import Flow
from perdure.threads import save_engine, saves
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.save_engine import PreparedSave
from perdure.threads.saves import Save, Unchanged

NAME = declare(CallKind("thread.save", "save", is_changeable=False)).name
Saved = list[Any]  # a checkpoint in an entry: id, parent, step, time, kind, size, whether it became the head


class RunJournal:
    """Journals the saves that the code of a run makes."""

    def joins(self, ctx: StoreContext) -> bool:
        """Return whether a write to this store commits with the journal of the current run.

        False outside of a run and in the body of a step. Raises UsageError in a run of another database.
        """
        scope = current.get()
        if scope is None or scope.body is not None:
            return False
        if not scope.execution.ctx.shares_transactions(ctx):
            raise UsageError(
                f"run {scope.execution.row.id!r} is in another database than this thread or memory, so a replay would "
                "do this again: call it in a function with @perdure.step, or use the store that the run is in"
            )
        return True

    def save(self, save: Save) -> tuple[Record, bool]:
        scope = _scope()
        return run_operation(scope, _operation(scope, scope.take(), save))

    async def asave(self, save: Save) -> tuple[Record, bool]:
        scope = _scope()
        return await arun_operation(scope, _operation(scope, scope.take(), save))


def _scope() -> Scope:
    scope = current.get()
    assert scope is not None
    return scope


def _operation(scope: Scope, path: str, save: Save) -> Operation[tuple[Record, bool]]:
    execution, cursor = scope.execution, save.cursor
    args_hash = digest(cursor.name.encode() + b"\0" + save.arguments)
    _, ended = yield from recorded_call(scope, path, NAME, args_hash)
    if ended is not None:
        saved: Saved | None = (ended.extra or {})["saved"]
        if saved is None:
            raise Unchanged
        cursor.record, cursor.found_nothing = saved[0], False
        cursor.own.append(saved[0])
        execution.replayed_cursors.add(id(cursor))
        return _record(saved, save), bool(saved[6])

    def write(saving: PreparedSave) -> Operation[None]:
        entry = Entry(path, NAME, execution.ctx.clock_us(), args_hash, value=execution.encoded(show_id(saving.record)))
        about = {"thread": cursor.name}

        def entry_of(done: Appended) -> Entry:
            return replace(entry, extra={**about, "saved": _saved(done)})

        saving.done = yield from execution.journal.commit(saving.program, (DONE, entry), entry_of)

    def attempt() -> Operation[tuple[Record, bool]]:
        done = yield from save_engine.save(save, cast("Callable[[PreparedSave], Flow[None]]", write))
        assert done.record is not None
        return done.record, done.on_head

    try:
        return (yield from attempt())
    except Unchanged:
        nothing = Entry(path, NAME, execution.ctx.clock_us(), args_hash, extra={"thread": cursor.name, "saved": None})
        yield from execution.journal.record((DONE, nothing))
        raise
    except NotFound:
        if id(cursor) not in execution.replayed_cursors or save.parent is not None or save.expect is not None:
            raise
    execution.replayed_cursors.discard(id(cursor))
    _forget(cursor)  # the run was moved to a store without the thread: create it again
    return (yield from attempt())


def _saved(done: Appended) -> Saved:
    record = done.record
    assert record is not None
    return [record.id, record.parent, record.step, record.at, record.kind, record.size, done.on_head]


def _record(saved: Saved, save: Save) -> Record:
    """Return the checkpoint with the fields that a handle shows."""
    import orjson

    record, parent, step, at, kind, size, _ = saved
    metadata = orjson.dumps(save.metadata).decode() if save.metadata else None
    shown = {"id": record, "parent": parent, "kind": kind, "at": at, "step": step, "size": size}
    return UNKNOWN._replace(**shown, note=save.note, metadata=metadata)


def _forget(cursor: Cursor) -> None:
    cursor.thread, cursor.tree, cursor.record = None, 0, None
    cursor.own.clear()


def install() -> None:
    """Register the journal for the saves of runs. The threads layer must not import runs."""
    if saves.journal is None:
        saves.journal = RunJournal()
