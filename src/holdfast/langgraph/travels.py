"""Which checkpoints a run has asked for by their ids: time travel, as a saver sees it that refuses a second writer.

A run that goes on from an old checkpoint and one that was overtaken look the same when they put: their parent is not
the newest. But the first has asked for that parent by its id, and the second was given it as the newest. What was asked
is known in the run's own context only, so that a look at an old checkpoint elsewhere is no licence for it.
"""

from __future__ import annotations

from contextvars import ContextVar

_MOST = 64  # remembered in one context
_Asked = dict[tuple[str, str, bytes], None]


class Travels:
    """What each context has asked for: thread, namespace and id."""

    def __init__(self) -> None:
        self._asked: ContextVar[_Asked | None] = ContextVar("holdfast_asked", default=None)

    def read(self, thread: str, space: str, asked: bytes | None, given: bytes | None) -> None:
        """Somebody was given a checkpoint: because of its id, or (`asked` None) because it is the newest."""
        if given is None:
            return
        key = (thread, space, given)
        kept = {known: None for known in self._asked.get() or {} if known != key}
        if asked is not None:
            kept = dict.fromkeys([*list(kept)[1 - _MOST :], key])
        self._asked.set(kept)  # a new dict: contexts are copied, not their values

    def allowed(self, thread: str, space: str) -> tuple[bytes, ...]:
        """The checkpoints of a namespace that this context may go on from, whatever the newest is."""
        return tuple(id_ for *where, id_ in self._asked.get() or () if where == [thread, space])
