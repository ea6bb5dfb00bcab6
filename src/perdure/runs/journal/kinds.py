"""`CallKind`, one for each kind of call in runs, and `Waiting`, which describes what a run waits for.

The module of a call declares its kind: its name in the journal, how it is shown, how it waits, what ends the wait, and
whether a fork may give it another result. A call without a declaration is shown by its name and can be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import msgspec

SettledBy = Literal["", "answer", "resolve"]


@dataclass(frozen=True)
class Waiting:
    """A description of what a run waits for. Fields that do not apply to its kind are empty."""

    kind: str
    """question, approval, doubt, deadline, retry, sleep, message, run, all; help if the run is stuck, resume if it is
    paused, worker if it is queued, graph if a graph has to run its task again"""
    shown: str = ""
    """in one line, as `perdure runs` shows it"""
    step: str = ""
    text: str = ""
    """the question, or the error of a stuck run"""
    name: str = ""
    """the function of the effect or step, or the type of the error"""
    key: str = ""
    topic: str = ""
    run: str = ""
    reason: str = ""
    """of a doubt: why `reconcile` could not tell"""
    has_happened: bool = False
    """of a doubt: the effect happened, and its result is lost"""
    settled_by: SettledBy = ""
    """the command with which a person ends the wait"""
    parts: tuple[Waiting, ...] = ()
    """of all: what the branches wait for"""

    @property
    def each(self) -> tuple[Waiting, ...]:
        """Its parts; if it has none, itself."""
        return self.parts or (self,)

    def as_text(self) -> str:
        """Return the JSON that a run's row stores."""
        return msgspec.json.encode(_short(asdict(self))).decode()

    @classmethod
    def of(cls, text: str | None) -> Waiting | None:
        """Decode the JSON in a run's row; None if there is none."""
        return None if text is None else msgspec.json.decode(text, type=cls)


_EMPTY = {field.name: field.default for field in fields(Waiting)}


def _short(said: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in said.items() if value != _EMPTY[name]}
    return {**found, "parts": [_short(part) for part in said["parts"]]} if said["parts"] else found


def all_of(waits: Sequence[Waiting]) -> Waiting:
    """Combine the waits of a run's branches into one."""
    return waits[0] if len(waits) == 1 else Waiting("all", f"{len(waits)} things", parts=tuple(waits))


@dataclass(frozen=True)
class CallKind:
    """A kind of call that code in runs makes."""

    name: str  # in the journal
    shown_as: str = ""  # `Step.kind`; by default the name without "perdure."
    waits_for: str = ""  # the kind of its `Waiting`
    settled_by: SettledBy = ""  # how a person ends its wait
    ends_at_deadline: bool = True  # `perdure.timeout` ends its wait
    is_changeable: bool = True  # a fork may give it another result
    reaches_out: bool = False  # other runs see it at once, so it counts as an effect

    def waiting(self, step: str, shown: str = "", **about: Any) -> Waiting:
        """Return the Waiting of a run that waits in a call of this kind."""
        return Waiting(self.waits_for, shown or self.waits_for, step, settled_by=self.settled_by, **about)


_KINDS: dict[str, CallKind] = {}
# Waits of steps and effects, which the journal names after their functions.
RETRY = CallKind("", waits_for="retry")
DOUBT = CallKind("", waits_for="doubt", settled_by="resolve", ends_at_deadline=False)
DEADLINE = CallKind("", waits_for="deadline", ends_at_deadline=False)
CHILD_UNDO = CallKind("", waits_for="run")


def declare(kind: CallKind) -> CallKind:
    """Declare a kind of call, so that steps, forks and replays know it."""
    _KINDS[kind.name] = kind
    return kind


# Declared here for the layer above, because a fork may be made without importing that layer.
PROGRESS = declare(CallKind("perdure.progress", is_changeable=False))


def kind_of(name: str) -> CallKind | None:
    """Return the kind of a call by its name in the journal; None if it was not declared, such as a step or effect."""
    return _KINDS.get(name.partition(":")[0])
