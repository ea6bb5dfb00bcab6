"""What the flows of lines work with: an engine for each store, and the forms of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from perdure.errors import PerdureError
from perdure.log.pending import Write
from perdure.log.turns import Turn
from perdure.threads.context import Context
from perdure.threads.thread_cache import ThreadCache


class Part(NamedTuple):
    """Where a part of a state is in its text, and of which version it is."""

    version: Any
    start: int
    end: int


class Encoded(NamedTuple):
    """The text of a state, and where its parts are: what did not change is taken from the parent's text."""

    text: bytes
    parts: Mapping[str, Part]


class Turns(Protocol):
    """Who may extend a thread, where effects are run for it: one process at a time."""

    def of(self, gone: str = "") -> Turn:
        """The turn of this process. `gone` is an owner that has certainly ended."""
        ...

    def is_dead(self, owner: str) -> bool: ...

    def refuse(self, name: str) -> PerdureError:
        """What a writer gets while another process is at work in the thread."""
        ...


@dataclass(slots=True)
class LineEngine:
    """The lines of a store: the store's context, and what is remembered of its threads."""

    ctx: Context
    turns: Turns
    threads: ThreadCache = field(default_factory=ThreadCache)

    def __post_init__(self) -> None:
        if (keys := self.ctx.driver.capabilities.keys) is not None:
            keys.listen(self.threads)


class Entry(NamedTuple):
    """A checkpoint as it is stored: where it is, its text, and what is attached to it."""

    thread: str
    namespace: str
    id: bytes
    text: bytes
    writes: Sequence[Write]
