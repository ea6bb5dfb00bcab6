"""`thread.autosave(policy)`: a state that is changed like a dict and saved when its policy says so, and at the end.

How changes are noticed. What lies in the state are your own values, not copies and not proxies: a list in it is a list,
and a list that you put in is that list. Putting in and taking out of the state itself (`state["n"] = 1`) is a change,
and the policy is asked at once. Getting something mutable out (`state["messages"]`) counts as a change of it too,
because that is what such a line is mostly for; since the change itself comes after the getting, the policy is asked at
the next use of the state. Where nothing has changed after all, a save finds the same text and writes nothing. Changes
through a name of your own (`messages.append(…)`) are in every save, but only `state.changed()` announces them.
"""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from perdure.errors import PerdureError, UsageError
from perdure.storage.events import event
from perdure.storage.program import adrive, drive
from perdure.threads.autosave_session import Session, Unsaved
from perdure.threads.autosave_writers import DirectWriter, TaskWriter, ThreadWriter
from perdure.threads.beside import journal_of
from perdure.threads.checks import check_note
from perdure.threads.context import Context, Line
from perdure.threads.policies import Policy

_ANY = object()  # something mutable of the state is in the hands of its user, whatever its key
_log = logging.getLogger("perdure")


class AutoState(MutableMapping[str, Any]):
    """The state of an autosave: a mapping that is changed freely. What lies in it are your own values."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, key: str) -> Any:
        with self._session.lock:
            self._session.use()
            return self._session.hand_out(key, self._session.data[key])

    def __setitem__(self, key: str, value: Any) -> None:
        with self._session.lock:
            self._session.before_change(key)
            self._session.data[key] = value
            self._session.changed(value=value)

    def __delitem__(self, key: str) -> None:
        with self._session.lock:
            self._session.before_change(key)
            del self._session.data[key]
            self._session.changed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._session.data)

    def __len__(self) -> int:
        return len(self._session.data)

    def __contains__(self, key: object) -> bool:
        return key in self._session.data

    def __repr__(self) -> str:
        return f"AutoState({self._session.data!r})"

    def items(self) -> ItemsView[str, Any]:
        with self._session.lock:
            self._session.use()
            self._session.hand_out(_ANY, self._session.data)
            return self._session.data.items()

    def values(self) -> ValuesView[Any]:
        with self._session.lock:
            self._session.use()
            self._session.hand_out(_ANY, self._session.data)
            return self._session.data.values()

    def setdefault(self, key: str, default: Any = None) -> Any:
        with self._session.lock:
            if key not in self._session.data:
                self[key] = default
            return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        with self._session.lock:
            if default and key not in self._session.data:
                return default[0]
            value = self._session.data[key]
            del self[key]
            return value

    def update(self, other: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any) -> None:  # type: ignore[override]
        """Several keys as one change: no save falls between them."""
        with self._session.lock:
            self._session.before_change()
            new = {**dict(other), **more}
            self._session.data.update(new)
            self._session.changed(value=new)

    def __ior__(self, other: Mapping[str, Any]) -> AutoState:
        self.update(other)
        return self

    def clear(self) -> None:
        with self._session.lock:
            self._session.before_change()
            self._session.data.clear()
            self._session.changed()

    def changed(self, count: int = 1) -> None:
        """Say that something in the state was changed, where that was done through a name of your own."""
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"state.changed({count!r}): a count of changes, 1 or more")
        with self._session.lock:
            self._session.before_change(self._session.loose)
            self._session.changed(count, value=self)

    @contextmanager
    def together(self) -> Iterator[None]:
        """`with state.together():` what is changed inside is saved as a whole or not at all; other threads wait."""
        session = self._session
        with session.lock:
            session.before_change()
            session.together += 1
            try:
                yield
            finally:
                session.together -= 1
                session.writer.look()
            if not session.together:
                session.before_change()
                session.changed(0)

    def save(self) -> None:
        """Save now, whatever the policy says: before you do what cannot be undone. Durable when this returns."""
        self._save()
        writer = self._session.writer
        flush = getattr(writer, "flush", None)
        if flush is None:
            raise UsageError("in `async with thread.autosave(…)` it is `await state.asave()`")
        flush()

    async def asave(self) -> None:
        """`save`, awaited."""
        self._save()
        aflush = getattr(self._session.writer, "aflush", None)
        if aflush is None:
            raise UsageError("in a plain `with thread.autosave(…)` it is `state.save()`")
        await aflush()

    def _save(self) -> None:
        with self._session.lock:
            if self._session.together:  # and who waits for the writer must not keep it from saying what went wrong
                raise UsageError("inside of state.together() nothing is saved: call it afterwards")
            self._session.before_change(self._session.loose)
            self._session.raise_error()
            self._session.take(self._session.ctx.ticks())

    @property
    def unsaved(self) -> Unsaved:
        """What a crash now would cost: `changes` that are not durable, and for how many `seconds`."""
        return self._session.unsaved()


class Autosave:
    """`with thread.autosave(policy) as state:` and `async with`. For one use."""

    def __init__(
        self,
        ctx: Context,
        line: Line,
        policy: Policy,
        *,
        background: bool,
        initial: Mapping[str, Any] | None,
        note: str | None,
    ) -> None:
        if not hasattr(policy, "start"):
            raise UsageError(f"autosave({policy!r}): a policy is wanted, such as perdure.autosave.every(5)")
        if initial is not None and not isinstance(initial, Mapping):
            raise UsageError(f"autosave(initial=…) takes a mapping, not {type(initial).__name__}")
        self._background = background
        self._session = Session(ctx, line, policy, initial, check_note(note))
        self._is_used = False

    def __enter__(self) -> AutoState:
        session = self._check()
        drive(session.ctx.driver, session.begin())
        session.writer = ThreadWriter(session) if self._background else DirectWriter(session)
        return AutoState(session)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        writer: Any = session.writer
        try:
            with session.lock:
                session.finish()
            writer.flush()
        except Exception as problem:
            _not_saved(session, problem, error)
            if error is None:
                raise
        finally:
            session.end()
            writer.close()

    async def __aenter__(self) -> AutoState:
        session = self._check()
        await adrive(session.ctx.driver, session.begin())
        session.writer = TaskWriter(session)
        return AutoState(session)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        writer: Any = session.writer
        try:
            with session.lock:
                session.finish()
            await writer.aflush()
        except Exception as problem:
            _not_saved(session, problem, error)
            if error is None:
                raise
        finally:
            session.end()
            await writer.aclose()

    def _check(self) -> Session:
        if self._is_used:
            raise UsageError("an autosave is for one use: call thread.autosave(…) again")
        if journal_of(self._session.ctx) is not None:
            raise UsageError(
                "autosave in a durable function would save at other points each time it is replayed: keep its state in "
                "perdure.state(), or use autosave inside a step"
            )
        self._is_used = True
        return self._session


def _not_saved(session: Session, problem: Exception, error: BaseException | None) -> None:
    """The last save failed. If the body raised, its error is the one that is raised: this one is told with it."""
    name = session.line.name
    told = str(problem) if isinstance(problem, PerdureError) else type(problem).__name__
    kind = type(problem).__name__
    extra = event("autosave.failed", thread=name, error=kind)
    _log.error("thread %r: the last autosave failed: %s", name, kind, extra=extra)
    if error is not None:
        error.add_note(f"and the last autosave of thread {name!r} failed: {told}")
