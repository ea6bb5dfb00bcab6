"""The exceptions that end the code of a run: an operator's request, an undo, continue_as_new."""

from __future__ import annotations

import threading
from typing import Any

from perdure.runs.execution.scope import Unwind

# How long the thread that called a run waits for another thread at a time. CPython handles a signal such as Ctrl-C that
# arrives just before a wait for a lock only when the wait ends.
ROUND_S = 1.0


class Cancelled(Unwind):
    """The run was cancelled."""


class Paused(Unwind):
    """The run was paused. It continues when it is resumed."""


class Expired(Unwind):
    """The time of the whole run is over."""


class Interrupted(Unwind):
    """The process ends, or the caller stopped waiting. The run is released and can be resumed."""


class Abandoned(Unwind):
    """The result of this branch or body is no longer needed: another branch was first, or its time is over."""


class Undo(Unwind):
    """The run's effects are to be undone."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class ContinueAsNew(Unwind):
    """The run begins again with new arguments and an empty journal."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("continue as new")
        self.args_given, self.kwargs_given = args, kwargs


def wait_in_rounds(event: threading.Event) -> None:
    """Wait for an event, and let signals interrupt the wait."""
    while not event.wait(ROUND_S):
        pass


def stop_for(request: str) -> Unwind | None:
    """Return the exception with which an operator's request ends the code; None if it does not end it."""
    if request == "cancel":
        return Cancelled("cancelled by request")
    if request == "pause":
        return Paused("paused by request")
    if request == "undo":
        return Undo("undone by request")
    return None
