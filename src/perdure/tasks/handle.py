"""`Tasks`: the tasks of a framework's graph, as an adapter sees them (`perdure.adapters`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perdure.errors import InDoubt, PerdureError, RunStuck
from perdure.log.pending import Write
from perdure.runs.execution.scope import Scope
from perdure.storage.program import Flow, drive
from perdure.tasks import executions, resuming, undoing
from perdure.tasks.policy import Task, scope_of
from perdure.threads.attachments import Ending

if TYPE_CHECKING:
    from perdure.ops.store import Store


class Tasks:
    """The tasks of a framework that run in a store's threads and call steps and effects."""

    def __init__(self, store: Store) -> None:
        self._store, self._ctx = store, store._context

    def scope(self, alive: Any, describe: Callable[[], dict[str, Any]]) -> Scope:
        """Return the scope of one execution of a task, which the object `alive` identifies.

        `describe` returns all fields of `Task` but the first. It is called once per execution.
        """
        return scope_of(alive, lambda: Task(self._ctx, **describe()))

    def ending(self, thread: str, task: str, *, is_over: bool) -> Ending | None:
        """Return the end of a task whose writes are about to be attached, or None if it called no step or effect."""
        return executions.ending(self._ctx, thread, task, is_over)

    def attaching(self, thread: str, namespace: str, id: str, writes: Sequence[Write]) -> Flow[None]:
        """Attach values to a checkpoint from inside a call of a task."""
        return self._store.thread(thread).line(namespace)._attach(id, writes)

    def unsettled(self, thread: str, namespace: str, id: str) -> InDoubt | RunStuck | None:
        """Return the error that a task of this checkpoint left for a person to settle, or None.

        Until it is settled, no checkpoint may follow this one.
        """
        return executions.unsettled_in(self._ctx, thread, (namespace, id))

    def running(self, thread: str, namespace: str, id: str) -> PerdureError | None:
        """Return the error for a new run that would follow this checkpoint while a task of it is in a call, or None."""
        is_busy = executions.is_busy_on(self._ctx, thread, (namespace, id))
        return executions.runs_elsewhere(self._ctx, thread) if is_busy else None

    def due(self) -> dict[str, dict[str, Any]]:
        """Return the threads whose tasks have got an answer, by name, each with its metadata."""
        return drive(self._ctx.driver, resuming.due(self._ctx))

    def resume(self, thread: str, run: Callable[[], None]) -> bool:
        """Call `run`, which runs the framework's code of a thread, while no other process resumes the thread.

        Return False if nothing is due, or if another process is at the thread. Raises what `run` raises.
        """
        claimed = drive(self._ctx.driver, resuming.claim(self._ctx, thread))
        if claimed is None:
            return False
        error: BaseException | None = None
        try:
            run()
        except BaseException as raised:
            error = raised
            raise
        finally:
            drive(self._ctx.driver, resuming.end(claimed, error))
        return True

    def undo(self, thread: str, who: str | None = None) -> int:
        """Undo the effects of a thread's tasks, newest first. Return how many have been undone, in all."""
        return undoing.undo(self._ctx, thread, who)

    async def aundo(self, thread: str, who: str | None = None) -> int:
        """`undo`, awaited."""
        return await undoing.aundo(self._ctx, thread, who)
