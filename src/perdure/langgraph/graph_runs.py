"""What a run of a graph was given, and what became of it: known in the run's own context only.

A run that continues from an old checkpoint and one that was overtaken look the same when they save: their parent is not
the newest. But the first has asked for that parent by its id, and the second was given it as the newest. Reading an old
checkpoint elsewhere allows nothing.

LangGraph stores checkpoints in the background of the nodes that run on them, and none after one that was refused: a
node that waits for its checkpoint learns of that here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field

from perdure.errors import PerdureError

_ASKED_MAX = 64  # remembered in one context
_NAMESPACES_MAX = 65_536
_Asked = dict[tuple[str, str, str], bool]  # whether there was such a checkpoint


@dataclass(slots=True)
class GraphRun:
    """One run of a graph: what its context has asked for (thread, namespace and id), and why it cannot continue."""

    namespace: str = ""
    asked: _Asked = field(default_factory=dict)
    outer: GraphRun | None = None  # of the graph around it
    refused: PerdureError | None = None  # of a checkpoint
    refused_inside: PerdureError | None = None  # of a checkpoint of a graph inside
    is_answer_used: bool = False  # what it was resumed with was given to a question

    def refuse(self, error: PerdureError) -> None:
        """A checkpoint of this run was not stored. The graphs around it hear of it: LangGraph drops the error of a
        graph that stops for an answer."""
        self.refused = error
        around = self.outer
        while around is not None:
            around.refused_inside, around = error, around.outer

    def outermost(self) -> GraphRun:
        return self if self.outer is None else self.outer.outermost()

    def refusal(self) -> PerdureError | None:
        """Why a checkpoint of this run, or of one around it, was not stored."""
        return self.refused or (self.outer.refusal() if self.outer is not None else None)


class Requested:
    """The run of each context. Contexts are copied, not their values: all that runs for a run shares it."""

    def __init__(self) -> None:
        self._run: ContextVar[GraphRun | None] = ContextVar("perdure_graph_run", default=None)

    def current(self) -> GraphRun:
        return self._run.get() or GraphRun()

    def read(self, thread: str, namespace: str, asked: str | None, given: str | None) -> None:
        """A run begins with a checkpoint: given because of its id, or (`asked` None) because it is the newest."""
        before = self.current()
        key = (thread, namespace, given or asked or "")
        kept = {known: was_there for known, was_there in before.asked.items() if known != key}
        if asked is not None:
            kept = dict([*list(kept.items())[1 - _ASKED_MAX :], (key, given is not None)])
        outer: GraphRun | None = before
        while outer is not None and not (
            namespace and (not outer.namespace or namespace.startswith(f"{outer.namespace}|"))
        ):
            outer = outer.outer
        self._run.set(GraphRun(namespace, kept, outer))

    def allowed(self, thread: str, namespace: str) -> tuple[str, ...]:
        """The checkpoints of a namespace that this context may continue from, whatever the newest is."""
        return tuple(id_ for *where, id_ in self.current().asked if where == [thread, namespace])

    def was_missing(self, thread: str, namespace: str, id_: str | None) -> bool:
        """Whether this context has asked for a checkpoint and there was none, so that what follows it is the first."""
        return self.current().asked.get((thread, namespace, id_ or "")) is False


class Checkpointed:
    """Namespaces that graphs store checkpoints in: each asks for its newest before it runs anything. Bounded."""

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
        """Whether a graph stores checkpoints there. The outermost does."""
        return not namespace or (thread, namespace) in self._seen
