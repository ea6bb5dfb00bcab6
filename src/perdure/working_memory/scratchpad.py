"""`Scratchpad`: the working memory of one run, bounded by tokens, in a form that a model reads.

In a durable function the entries are kept in the run's state (`perdure.state()["scratchpad"]`). They commit with the
steps, are in every checkpoint of the state, and end with the run. Elsewhere the scratchpad is a plain object.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

from perdure.agents.tokens import token_counter
from perdure.errors import NoProgress, NotFound, UsageError
from perdure.memory.hooks import as_step, call
from perdure.memory.policies import check_number
from perdure.runs.calls.recorded_values import record_once
from perdure.runs.calls.state import state
from perdure.runs.execution.scope import Scope, current
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive
from perdure.storage.twins import awaited, blocking

OBSERVATION, DECISION, SUMMARY = "observation", "decision", "summary"
COMPACT_AT = 0.7
PROGRESS = 0.1  # the part of the budget that a summary must save
KEPT = 10  # how many of the newest observations, and of the newest entries, stay in full
ORIGINALS_CHARACTERS_MAX = 1_000_000  # of masked and summarized texts together
_KEY = "scratchpad"
_NO_DRIVER: Any = None
_GLIMPSE = 60
_log = logging.getLogger("perdure")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PadEntry:
    n: int
    kind: str
    text: str | None
    """None: it is masked or summarized, and of such texts the newest million characters are kept."""
    source: str | None
    at: datetime
    trace_id: str
    """Of OpenTelemetry's current span, or else the id of the run."""
    tokens: int = 0
    """Of what is rendered."""
    instead: str | None = None
    """What is rendered instead of the text: a placeholder, or "" if a summary stands for it."""

    def render(self) -> str:
        if self.instead is not None:
            return self.instead
        return f"[{self.n}] {self.kind}{f' of {self.source}' if self.source else ''}: {self.text}\n"


@runtime_checkable
class PadBackend(Protocol):
    """Where the entries of a scratchpad outside of runs are kept, if not in the process."""

    def load(self) -> tuple[list[dict[str, Any]], bytes]:
        """Return the entries, and a mark of their version for `replace`."""
        ...

    def replace(self, entries: list[dict[str, Any]], before: bytes) -> bool:
        """Write the entries. Return False, and write nothing, if their version is not `before` any more."""
        ...


class Scratchpad:
    """What a run saw, thought and decided, rendered in at most `budget_tokens`.

    At 70 % of the budget, observations before the newest ten are masked. If that is not enough, `summarize`, a function
    from a text to a shorter one, is called for the entries before the newest ten. In a run it is a step. Without
    `summarize`, old entries are left out when the budget is used up. Decisions stay in full. `tokens` counts the tokens
    of a text, by default as `Context` does. `backend` (`perdure.memory.RedisPad`) keeps the entries outside of
    this process, for work that is not durable.
    """

    def __init__(
        self,
        budget_tokens: int,
        summarize: Callable[[str], Any] | None = None,
        *,
        tokens: Callable[[str], int] | None = None,
        backend: PadBackend | None = None,
    ) -> None:
        if backend is not None and not isinstance(backend, PadBackend):
            raise UsageError(f"Scratchpad(backend=…) wants a RedisPad(client, key), not {type(backend).__name__}")
        self._backend, self._loaded = backend, b""
        self.budget_tokens = check_number("Scratchpad(budget_tokens=…)", budget_tokens)
        self._count = token_counter(tokens)
        self._summarize = as_step("scratchpad.summarize", summarize)
        self._own: list[dict[str, Any]] = []
        self._trace_id = uuid4().hex
        self._stored()  # declares the state of a run, before the function branches

    def __repr__(self) -> str:
        return f"<Scratchpad of {self.budget_tokens} tokens>"

    @blocking
    def add(self, kind: str, text: str, *, source: str | None = None) -> Flow[int]:
        """Add an entry and return its number.

        `kind` is "observation" (what a tool returned; `source` names the tool), "decision", "thought", or a kind of
        your own. Raises NoProgress, and adds nothing, if compaction makes too little room.
        """
        for name, value in (("kind", kind), ("text", text), ("source", source or "")):
            if not isinstance(value, str):
                raise UsageError(f"scratchpad.add({name}=…) wants a str, not {type(value).__name__}")
        while True:
            added = yield from self._add(kind, text, source)
            if added is not None:
                _log.debug(
                    "scratchpad: %s",
                    kind,
                    extra=event("scratchpad.entry", n=added.n, kind=kind, trace_id=added.trace_id),
                )
                return added.n

    aadd = awaited(add)

    def _add(self, kind: str, text: str, source: str | None) -> Flow[PadEntry | None]:
        """Add an entry; None if another process has added one meanwhile."""
        entries = self.entries
        at, trace_id = self._stamp()
        added = self._counted(PadEntry(len(entries) + 1, kind, text, source, at, trace_id))
        entries.append(added)
        observed = [at for at, entry in enumerate(entries) if entry.kind == OBSERVATION and entry.instead is None]
        if _total(entries) > COMPACT_AT * self.budget_tokens:
            for place in observed[:-KEPT]:
                entries[place] = self._masked(entries[place])
        # Mask recent observations too, the longest first: one that exceeds the budget must not end the run.
        for place in sorted(observed[-KEPT:], key=lambda place: -entries[place].tokens):
            if _total(entries) > self.budget_tokens:
                entries[place] = self._masked(entries[place])
        limit = self.budget_tokens if self._summarize is None else COMPACT_AT * self.budget_tokens
        if _total(entries) > limit:
            yield from self._shorten(entries, at, trace_id)
        if (total := _total(entries)) > self.budget_tokens:
            raise NoProgress(
                f"the scratchpad has {total} tokens after compaction, and its budget is {self.budget_tokens}: the "
                f"{kind} was not added; raise the budget, give it a summarize=, or make fewer decisions"
            )
        return added if self._store(entries) else None

    @property
    def tokens(self) -> int:
        """The tokens of what `render` returns: at most the budget."""
        return _total(self.entries)

    @property
    def entries(self) -> list[PadEntry]:
        """All entries, the oldest first, including those that are masked or summarized."""
        return [PadEntry(**fields) for fields in self._stored()]

    def render(self) -> str:
        """Return the scratchpad as a model reads it."""
        return "".join(entry.render() for entry in self.entries)

    def full(self, n: int) -> str:
        """Return the text of an entry, even if it is masked or summarized.

        Raises NotFound if there is no such entry, or if its text was dropped.
        """
        entry_n = next((entry for entry in self.entries if entry.n == n), None)
        if entry_n is None or entry_n.text is None:
            why = "was dropped: of masked texts the newest million characters are kept" if entry_n else "does not exist"
            raise NotFound(f"entry {n} of the scratchpad {why}")
        return entry_n.text

    # It has no database: its flows only call `summarize`.
    def _run(self, flow: Flow[T]) -> T:
        return drive(_NO_DRIVER, flow)

    def _arun(self, flow: Flow[T]) -> Coroutine[Any, Any, T]:
        return adrive(_NO_DRIVER, flow)

    # --- compaction

    def _counted(self, entry: PadEntry) -> PadEntry:
        return replace(entry, tokens=self._count(entry.render()))

    def _masked(self, entry: PadEntry) -> PadEntry:
        """Return an observation with a placeholder instead of its text, if that is shorter."""
        text, of = " ".join((entry.text or "").split()), f" of {entry.source}" if entry.source else ""
        glimpse = text if len(text) <= _GLIMPSE else f"{text[:_GLIMPSE]}…"
        said = f"[{entry.n}] {OBSERVATION}{of}, masked: {glimpse!r}, {entry.tokens} tokens; pad.full({entry.n})\n"
        return min(entry, self._counted(replace(entry, instead=said)), key=lambda one: one.tokens)

    def _shorten(self, entries: list[PadEntry], at: datetime, trace_id: str) -> Flow[None]:
        """Replace old entries with their summary, if they are long enough for that."""
        before, least = _total(entries), PROGRESS * self.budget_tokens
        old = [entry for entry in entries[:-KEPT] if entry.kind != DECISION and entry.tokens]
        if not old or (_total(old) < 2 * least and before <= self.budget_tokens):
            return
        text = "left out"
        if self._summarize is not None:
            text = yield from call(self._summarize, str, "".join(entry.render() for entry in old))
        source = "older entries, pad.full(n) has each"
        summary = self._counted(PadEntry(len(entries) + 1, SUMMARY, text, source, at, trace_id))
        place = max(place for place, entry in enumerate(entries) if entry in old)
        entries[:] = [replace(entry, instead="", tokens=0) if entry in old else entry for entry in entries]
        entries.insert(place + 1, summary)
        total = _total(entries)
        if self._summarize is not None and total > max(before - least, COMPACT_AT * self.budget_tokens):
            raise NoProgress(
                f"a summary of {summary.tokens} tokens, for {_total(old)}, saves less than a tenth of the scratchpad's "
                f"budget of {self.budget_tokens}: the last entry was not added; summarize= must return less"
            )

    # --- storage of the entries

    def _stored(self) -> list[dict[str, Any]]:
        if self._backend is not None:
            if _run() is not None:
                raise UsageError(
                    "a scratchpad with backend=… in a durable function: its scratchpad is in the run's state, which "
                    "survives a kill and is the same in a replay; make one there without backend="
                )
            stored, self._loaded = self._backend.load()
            return stored
        return self._own if _run() is None else state().get(_KEY, [])

    def _store(self, entries: list[PadEntry]) -> bool:
        """Keep the entries. Return False if the backend's have changed since they were read."""
        size = 0
        for at in reversed(range(len(entries))):
            if (text := entries[at].text) is not None and entries[at].instead is not None:
                size += len(text)
                entries[at] = entries[at] if size <= ORIGINALS_CHARACTERS_MAX else replace(entries[at], text=None)
        stored = [asdict(entry) for entry in entries]
        if self._backend is not None:
            return self._backend.replace(stored, self._loaded)
        if _run() is None:
            self._own = stored
        else:
            state()[_KEY] = stored
        return True

    def _stamp(self) -> tuple[datetime, str]:
        """Return the time and the trace of a new entry. A run records them: a replay makes the same entry."""
        scope = _run()
        if scope is None or scope.body is not None:
            return self._drawn()
        at, trace_id = record_once("scratchpad.entry", lambda: [*self._drawn()])
        return at, trace_id

    def _drawn(self) -> tuple[datetime, str]:
        scope = _run()
        return datetime.now(UTC), _trace_id() or (scope.execution.row.id if scope is not None else self._trace_id)


def _total(entries: list[PadEntry]) -> int:
    return sum(entry.tokens for entry in entries)


def _run() -> Scope | None:
    """Return the scope of the current durable run, also in the body of a step, or None outside of a run."""
    scope = current.get()
    return scope if scope is not None and scope.execution.policy.is_run else None


def _trace_id() -> str:
    """Return the trace id of OpenTelemetry's current span, or "" if there is none."""
    if (trace := sys.modules.get("opentelemetry.trace")) is None:
        return ""
    span = trace.get_current_span().get_span_context()
    return format(span.trace_id, "032x") if span.is_valid else ""
