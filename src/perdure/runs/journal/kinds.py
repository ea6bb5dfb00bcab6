"""`CallKind`: one for each kind of call that code in runs makes.

The module of a call declares its kind: its name in the journal, how it is shown, how it waits, what ends the wait, and
whether a fork may give it another result. A call without a declaration is shown by its name and can be changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perdure.runs.run_table import SettledBy, Waiting


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
