"""What ends the code of a run from inside: an operator's request, an undo, a new beginning."""

from __future__ import annotations

from typing import Any

from perdure.runs.execution.scope import Unwind


class Cancelled(Unwind):
    """The run was cancelled."""


class Paused(Unwind):
    """The run was paused: it continues when it is resumed."""


class Interrupted(Unwind):
    """The process ends, or the caller stopped waiting: the run is released and can be resumed."""


class Abandoned(Unwind):
    """The result of this branch or body is not wanted any more: another one was first, or its time is over."""


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


def stop_for(request: str) -> Unwind | None:
    """What ends the code when an operator asks for this."""
    if request == "cancel":
        return Cancelled("cancelled by request")
    if request == "pause":
        return Paused("paused by request")
    if request == "undo":
        return Undo("undone by request")
    return None
