"""Decisions as items of memory: what was chosen, why, and instead of what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.errors import UsageError
from perdure.memory.models import Item
from perdure.runs.execution.scope import current
from perdure.storage.program import Flow
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Handle

DECISION = "decision"


def decision_text(subject: str, value: Mapping[str, Any]) -> str:
    """Return a decision as a sentence, by which it is found and which a prompt shows."""
    others = value["instead_of"]
    rejected = f" instead of {' or '.join(others)}" if others else ""
    return f"{subject}: chose {value['choice']}{rejected}, because {value['because']}"


def _decision(
    subject: str, choice: str, because: str, instead_of: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the value of a decision's item, and the options to put it with. Raises UsageError."""
    several = isinstance(instead_of, Iterable) and not isinstance(instead_of, str)
    others: list[Any] = list(instead_of) if several else [instead_of]
    for name, text in (("choice", choice), ("because", because), *(("instead_of", one) for one in others)):
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"decide({name}=…) wants a text, not {text!r:.60}")
    value = {"choice": choice, "because": because, "instead_of": others}
    scope = current.get()
    source = None if scope is None else f"run {scope.execution.row.id}"
    return value, {"kind": DECISION, "text": decision_text(subject, value), "source": source}


class MemoryDecisions(Handle):
    """The part of a namespace's handle for decisions."""

    def _put(
        self, name: str, items: Mapping[str, Any], options: Mapping[str, Any], supersedes: str | None = None
    ) -> Flow[list[Item]]:
        raise NotImplementedError

    @blocking
    def decide(
        self, subject: str, choice: str, *, because: str, instead_of: Iterable[str] = (), pinned: bool = False
    ) -> Flow[Item]:
        """Keep a decision with its reason and the alternatives, and return its item. Its key is the subject.

        A search finds it by any of these. A later decision on the subject replaces it, and `history(subject)` has both.
        In a run, `source` of the item names the run.
        """
        value, options = _decision(subject, choice, because, instead_of)
        [item] = yield from self._put("memory.decide", {subject: value}, {**options, "pinned": pinned})
        return item

    adecide = awaited(decide)
