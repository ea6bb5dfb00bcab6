"""What a run of a graph was given, and what became of it: known in the run's own context only.

A run that goes on from an old checkpoint and one that was overtaken look the same when they put: their parent is not
the newest. But the first has asked for that parent by its id, and the second was given it as the newest. A look at an
old checkpoint elsewhere is no licence for it.

LangGraph stores checkpoints behind the back of the nodes that run on them, and none after one that was refused: a node
that waits for its checkpoint hears of that here.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from perdure.errors import PerdureError

_MOST = 64  # remembered in one context
_Asked = dict[tuple[str, str, bytes], None]


@dataclass(slots=True)
class Journey:
    """One run of a graph: what its context has asked for (thread, namespace and id), and why it cannot go on."""

    space: str = ""
    asked: _Asked = field(default_factory=dict)
    outer: Journey | None = None  # of the graph around it
    refused: PerdureError | None = None  # of a checkpoint

    def refusal(self) -> PerdureError | None:
        """Why a checkpoint of this run, or of one around it, was not stored."""
        return self.refused or (self.outer.refusal() if self.outer is not None else None)


class Travels:
    """The journey of each context. Contexts are copied, not their values: who runs for a run shares its journey."""

    def __init__(self) -> None:
        self._journey: ContextVar[Journey | None] = ContextVar("perdure_journey", default=None)

    def current(self) -> Journey:
        return self._journey.get() or Journey()

    def read(self, thread: str, space: str, asked: bytes | None, given: bytes | None) -> None:
        """A run begins with a checkpoint: given because of its id, or (`asked` None) because it is the newest."""
        before = self.current()
        key = (thread, space, given or b"")
        kept = {known: None for known in before.asked if known != key}
        if asked is not None and given is not None:
            kept = dict.fromkeys([*list(kept)[1 - _MOST :], key])
        outer: Journey | None = before
        while outer is not None and not (space and (not outer.space or space.startswith(f"{outer.space}|"))):
            outer = outer.outer
        self._journey.set(Journey(space, kept, outer))

    def allowed(self, thread: str, space: str) -> tuple[bytes, ...]:
        """The checkpoints of a namespace that this context may go on from, whatever the newest is."""
        return tuple(id_ for *where, id_ in self.current().asked if where == [thread, space])
