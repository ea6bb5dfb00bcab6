"""Chandy and Lamport's markers, for FIFO channels that keep nothing: queues in the memory of a process.

A member records its state, then puts a marker on each output before anything else. What arrives on an input after that
and before the input's marker is the state of the channel. Several snapshots may run at once. Sans I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
M = TypeVar("M")


class Marker(NamedTuple):
    """What is sent on each output when a snapshot reaches a member."""

    snapshot: int


@dataclass
class Recording(Generic[S, M]):
    """A member's part of a snapshot: its state, and what was in flight on each input."""

    state: S
    channels: dict[str, list[M]]
    missing: set[str]  # inputs whose marker has not arrived

    @property
    def is_complete(self) -> bool:
        return not self.missing


@dataclass
class Recorder(Generic[S, M]):
    """The markers of one member. The caller passes it all that arrives, in order, before it delivers it."""

    inputs: set[str]
    outputs: set[str]
    recordings: dict[int, Recording[S, M]] = field(default_factory=dict)

    def begin(self, snapshot: int, save: Callable[[], S]) -> list[tuple[str, Marker]]:
        """Record the state. Return the markers; the caller sends them before any other message."""
        if snapshot in self.recordings:
            return []
        self.recordings[snapshot] = Recording(save(), {source: [] for source in self.inputs}, set(self.inputs))
        return [(target, Marker(snapshot)) for target in sorted(self.outputs)]

    def receive(self, source: str, message: M | Marker, save: Callable[[], S]) -> list[tuple[str, Marker]]:
        """Note a message or marker of an input. Return the markers to send."""
        if isinstance(message, Marker):
            markers = self.begin(message.snapshot, save)
            self.recordings[message.snapshot].missing.discard(source)
            return markers
        for recording in self.recordings.values():
            if source in recording.missing:
                recording.channels[source].append(message)
        return []

    def close(self, source: str) -> None:
        """End an input whose sender is gone: nothing more will arrive on it, as if all its markers had."""
        self.inputs.discard(source)
        for recording in self.recordings.values():
            recording.missing.discard(source)

    def take(self, snapshot: int) -> Recording[S, M]:
        """Return a complete recording and forget it: none of its markers will arrive any more."""
        assert self.recordings[snapshot].is_complete
        return self.recordings.pop(snapshot)
