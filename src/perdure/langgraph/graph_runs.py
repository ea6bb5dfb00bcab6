"""The checkpoints that a run of a graph has read, and why it was refused, kept in the run's own context.

A run that continues from an old checkpoint and a run that was overtaken look the same when they save: their parent is
not the newest. But the first has read that parent by its id, and the second as the newest. A read of an old checkpoint
in another context permits nothing. LangGraph stores checkpoints in the background, and stores none after a refused one:
a node that waits for its checkpoint finds the refusal here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from perdure.errors import PerdureError

_ASKED_MAX = 64  # remembered in one context
_NAMESPACES_MAX = 65_536
_Asked = dict[tuple[str, str, str], bool]  # whether the checkpoint existed


@dataclass(slots=True)
class GraphRun:
    """One run of a graph: the checkpoints read by id (thread, namespace, id), and the error that stops the run."""

    namespace: str = ""
    asked: _Asked = field(default_factory=dict)
    outer: GraphRun | None = None  # the run of the graph around it
    refused: PerdureError | None = None  # why one of its checkpoints was not stored
    refused_inside: PerdureError | None = None  # why a checkpoint of a subgraph was not stored
    is_answer_used: bool = False  # a question has received the value that the graph was resumed with
    kept: Mapping[str, int] = field(default_factory=dict)  # tasks with an answer given to the store, in all this many

    def refuse(self, error: PerdureError) -> None:
        """Record that a checkpoint of this run was not stored, here and in the runs of the graphs around it.

        The outer runs need it because LangGraph drops the error of a subgraph that interrupts.
        """
        self.refused = error
        around = self.outer
        while around is not None:
            around.refused_inside, around = error, around.outer

    def outermost(self) -> GraphRun:
        return self if self.outer is None else self.outer.outermost()

    def refusal(self) -> PerdureError | None:
        """Return why a checkpoint of this run, or of one around it, was not stored, or None."""
        return self.refused or (self.outer.refusal() if self.outer is not None else None)


class Requested:
    """The run of each context. A copied context holds the same object, so everything that works for a run shares it."""

    def __init__(self) -> None:
        self._run: ContextVar[GraphRun | None] = ContextVar("perdure_graph_run", default=None)

    def current(self) -> GraphRun:
        return self._run.get() or GraphRun()

    def read(
        self, thread: str, namespace: str, asked: str | None, stored: str | None, kept: Mapping[str, int] | None = None
    ) -> None:
        """Record that a run begins with the checkpoint `stored`, read by the id `asked` or, if None, as the newest.

        `kept`: its tasks that have been given an answer by the store, with the number of all answers they have.
        """
        before = self.current()
        key = (thread, namespace, stored or asked or "")
        asked_for = {known: was_there for known, was_there in before.asked.items() if known != key}
        if asked is not None:
            asked_for = dict([*list(asked_for.items())[1 - _ASKED_MAX :], (key, stored is not None)])
        outer: GraphRun | None = before
        while outer is not None and not (
            namespace and (not outer.namespace or namespace.startswith(f"{outer.namespace}|"))
        ):
            outer = outer.outer
        self._run.set(GraphRun(namespace, asked_for, outer, kept=kept or {}))

    def allowed(self, thread: str, namespace: str) -> tuple[str, ...]:
        """Return the checkpoints of a namespace that this context may continue from even if they are not the newest."""
        return tuple(id_ for *where, id_ in self.current().asked if where == [thread, namespace])

    def was_missing(self, thread: str, namespace: str, id_: str | None) -> bool:
        """Return whether this context has read a checkpoint that did not exist. The next one is then the first."""
        return self.current().asked.get((thread, namespace, id_ or "")) is False


class Checkpointed:
    """The namespaces that graphs store checkpoints in, up to a limit.

    A graph with a checkpointer reads the newest checkpoint of its namespace before it runs anything.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, thread: str, namespace: str) -> None:
        if not namespace:
            return
        with self._lock:
            self._seen[(thread, namespace)] = None
            self._seen.move_to_end((thread, namespace))
            while len(self._seen) > _NAMESPACES_MAX:
                self._seen.popitem(last=False)

    def has(self, thread: str, namespace: str) -> bool:
        """Return whether a graph stores checkpoints in a namespace. The outermost graph always does."""
        return not namespace or (thread, namespace) in self._seen
