"""`perdure.progress`: how far a run has come, in words, for its next session, another agent, a person.

The record is merged over the calls and kept twice: as the run's latest (`store.progress(run)`), written in the same
transaction as the journal entry that a replay answers from; and as a Markdown file, if one was named.

The file is written after the commit, so that it is never ahead of the journal. If the process dies in between, the
file is still what it was when the entry was made, and the resume writes it; if a person has changed it meanwhile, it
is left alone until the next call. A file that cannot be written is a warning: it must not fail a run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from blake3 import blake3

from perdure.errors import NotInRun, UsageError
from perdure.runs.agents import progress_file
from perdure.runs.agents.progress_file import UNCHANGED, Progress, merge
from perdure.runs.calls.calls import do
from perdure.runs.calls.timeouts import check_deadline
from perdure.runs.engine import flows
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import VALUE, Entry, Recorded, unsqueeze
from perdure.runs.journal.journal import read_journal
from perdure.runs.session.acting import Act, Body
from perdure.runs.session.scope import Scope, current, need_scope
from perdure.runs.session.session import Session
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Rows, read
from perdure.threads.context import Context
from perdure.values.codec import decode
from perdure.values.registry import register

NAME: Final = "perdure.progress"
READ: Final = "perdure.progress.read"
SORT: Final = "progress"  # of the run's value that holds the latest
_log = logging.getLogger("perdure")
register(Progress, name="perdure.Progress")
File = str | os.PathLike[str]


class Reporter:
    """The type of `perdure.progress`: called to say something, `read` to know what was said."""

    def __repr__(self) -> str:
        return "<perdure.progress>"

    def __call__(
        self,
        *,
        goal: str | None = None,
        done: str | Iterable[str] | None = None,
        blocked: Any = UNCHANGED,
        next: Any = UNCHANGED,
        context: Mapping[str, Any] | Iterable[str] | str | None = None,
        file: File | None = None,
        git: bool = False,
    ) -> Any:
        """Say how far this run has come; gives the whole record (`Progress`). Await it in an async run.

        `done` is added to what is done, `context` to what is known; `blocked` and `next` replace what they were, None
        clears them. `file` names a Markdown file to keep it in, and `git` says to commit that each time; both are
        remembered for the run. A run that has no record yet goes on from the file's, unless it has another goal.
        """
        scope = need_scope("perdure.progress()")
        change = {"goal": goal, "done": _listed(done), "blocked": blocked, "next": next, "context": _listed(context)}
        merge(None, **change)  # what cannot be said is refused before anything is done
        target = None if file is None else os.path.abspath(os.fspath(file))
        return do(scope, _say(scope, change, target, git))

    def read(self, file: File | None = None, *, run: str | None = None) -> Any:
        """The record: of this run, of a file, or of another `run` of the store; None if there is none.

        Inside a run it is recorded, and awaited if the run is async. Outside, only a file can be read: for a run's
        record there is `store.progress(run)`.
        """
        if file is not None and run is not None:
            raise UsageError("perdure.progress.read(): a file or a run, not both")
        scope = current.get()
        if file is not None and (scope is None or scope.body is not None):
            return progress_file.read(file)
        if scope is None:
            raise NotInRun(
                "perdure.progress.read() outside of a run takes a file; for a run's record: store.progress(run)"
            )
        inside = need_scope("perdure.progress.read()")
        return do(inside, _read(inside, None if file is None else os.path.abspath(os.fspath(file)), run))


progress: Final = Reporter()


def progress_of(ctx: Context, run_id: str) -> Flow[Progress | None]:
    """A run's record. Raises NotFound if there is no such run."""
    tenant, row = yield from flows.locate(ctx, run_id)
    text = yield from read(partial(rows.value_of, tenant, row.run, SORT))
    if text is None:  # a fork has its origin's journal, not its values
        said = _said((yield from read(partial(read_journal, tenant, row))))
        if not said:
            return None
        text = said[-1].entry.value
        if text is None:
            text = yield from read(partial(read_blob, tenant, (said[-1].entry.more or {})["blob"]))
    return _made(decode(unsqueeze(text), ctx.codec))


def _said(entries: Iterable[Recorded]) -> list[Recorded]:
    return sorted((one for one in entries if one.entry.name == NAME), key=lambda one: one.seq)


def _listed(value: Any) -> Any:
    """A generator can be gone through once, and it is checked before it is used."""
    return value if value is None or isinstance(value, str | Mapping) or not isinstance(value, Iterable) else [*value]


# --- what a session knows of it


class _Kept:
    """The record of one session's run. Calls of parallel branches change it one after the other."""

    def __init__(self, session: Session) -> None:
        self.state: Progress | None = None
        self.file: str | None = None
        self.git = False
        self.seq = 0
        self.is_known = False
        said = _said(session.index.rows())
        self.last = said[-1].seq if said else 0
        self._lock = threading.Lock()
        self._alock: Any = None

    def take(self, found: dict[str, Any], seq: int) -> None:
        if seq >= self.seq:
            self.state, self.seq, self.is_known = _made(deepcopy(found)), seq, True  # the caller's own is his to change
            self.file, self.git = found.get("file"), bool(found.get("git"))

    def enter(self, scope: Scope) -> Act[None]:
        if not scope.is_async:
            self._lock.acquire()
            return
        if self._alock is None:
            import asyncio

            self._alock = asyncio.Lock()
        yield Body(self._alock.acquire, is_async=True)

    def leave(self, scope: Scope) -> None:
        (self._alock if scope.is_async else self._lock).release()


_sessions: WeakKeyDictionary[Session, _Kept] = WeakKeyDictionary()
_guard = threading.Lock()


def _kept(session: Session) -> _Kept:
    with _guard:
        found = _sessions.get(session)
        if found is None:
            found = _sessions[session] = _Kept(session)
        return found


# --- saying and reading


def _say(scope: Scope, change: dict[str, Any], file: str | None, git: bool) -> Act[Progress]:
    scope.check()
    session, path = scope.session, scope.take()
    yield from check_deadline(scope, path)
    found = session.recorded(path, NAME, None)
    kept = _kept(session)
    yield from kept.enter(scope)
    try:
        if found:
            return (yield from _again(scope, kept, found[-1]))
        yield from _known(session, kept)
        target, commits = file or kept.file, git or kept.git
        if commits and target is None:
            raise UsageError("perdure.progress(git=True) commits a file: name it with file=")
        over = None if target is None else (yield _work(scope, partial(_contents, target)))
        base = kept.state if kept.state is not None else _adopted(over, change["goal"])
        record = {**_fields(merge(base, **change)), "file": target, "git": commits}
        value = session.encoded(record)
        subject = _subject(change)
        more = {"over": _mark(over), "subject": subject} if target is not None else None
        entry = Entry(path, NAME, session.ctx.clock_us(), value=value, more=more)
        yield from session.record((VALUE, entry), beside=partial(_latest, session, value))
        known = session.decoded(unsqueeze(value))  # as a replay will find it
        kept.take(known, session.index.at(path)[-1].seq)
        if target is not None:
            yield _work(scope, partial(_publish, target, _made(known), subject if commits else None))
        return _made(known)
    finally:
        kept.leave(scope)


def _again(scope: Scope, kept: _Kept, recorded: Recorded) -> Act[Progress]:
    """What was said before; its file is written now if the process died before it was."""
    session, more = scope.session, recorded.entry.more or {}
    found = yield from session.value(recorded.entry)
    kept.take(found, recorded.seq)
    target = found.get("file")
    if target is not None and recorded.seq == kept.last and not session.replay:
        kept.last = 0
        subject = more.get("subject") if found.get("git") else None
        yield _work(scope, partial(_mend, target, _made(found), subject, more.get("over")))
    return _made(found)


def _known(session: Session, kept: _Kept) -> Act[None]:
    """The record of before `continue_as_new`, if this session has not seen any."""
    if kept.is_known:
        return
    text = yield from read(partial(rows.value_of, session.tenant, session.row.run, SORT))
    if text is not None:
        kept.take(session.decoded(unsqueeze(text)), 0)
    kept.is_known = True


def _latest(session: Session, value: bytes) -> Generator[Batch, list[Rows], None]:
    yield Batch(rows.ADD_VALUE(tenant=session.tenant, run=session.row.run, sort=SORT, value=value))


def _read(scope: Scope, file: str | None, run: str | None) -> Act[Progress | None]:
    scope.check()
    session, path = scope.session, scope.take()
    yield from check_deadline(scope, path)
    found = session.recorded(path, READ, None)
    if found:
        recorded = yield from session.value(found[-1].entry)
        return None if recorded is None else _made(recorded)
    state: Progress | None
    if file is not None:
        state = yield _work(scope, partial(progress_file.read, file))
    elif run is not None and run != session.row.id:
        row = yield from read(partial(rows.find, session.tenant, run))
        state = None if row is None else (yield from progress_of(session.ctx, run))
    else:
        kept = _kept(session)
        yield from kept.enter(scope)
        try:
            yield from _known(session, kept)
            state = kept.state
        finally:
            kept.leave(scope)
    value = session.encoded(None if state is None else _fields(state))
    session.later(VALUE, Entry(path, READ, session.ctx.clock_us(), value=value))
    return None if state is None else _made(session.decoded(unsqueeze(value)))


def _fields(state: Progress) -> dict[str, Any]:
    return {
        "goal": state.goal,
        "done": state.done,
        "blocked": state.blocked,
        "next": state.next,
        "context": state.context,
    }


def _made(found: Mapping[str, Any]) -> Progress:
    return Progress(found["goal"], found["done"], found["blocked"], found["next"], found["context"])


# --- the file


def _work(scope: Scope, call: Callable[[], Any]) -> Body:
    """Work with files: on a thread, if a loop would be blocked."""
    if not scope.is_async:
        return Body(call)
    import asyncio

    return Body(partial(asyncio.to_thread, call), is_async=True)


def _contents(file: str) -> bytes | None:
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


def _mark(contents: bytes | None) -> str | None:
    return None if contents is None else blake3(contents).hexdigest()[:16]


def _adopted(contents: bytes | None, goal: str | None) -> Progress | None:
    """The record of a file that somebody else began, if it is about the same."""
    if not contents:
        return None
    found = progress_file.from_markdown(contents.decode("utf-8-sig", "replace"))
    return found if goal is None or goal == found.goal else None


def _subject(change: Mapping[str, Any]) -> str:
    """One line for git: what this call says."""
    done = change["done"] if isinstance(change["done"], str) else "; ".join(change["done"] or ())
    said = {"Done": done, "Blocked": change["blocked"], "Goal": change["goal"], "Next": change["next"]}
    for what, text in said.items():
        if isinstance(text, str) and text:
            line = " ".join(text.split())
            return f"{what}: {line}" if len(line) <= 100 else f"{what}: {line[:99]}…"
    return "Progress"


def _publish(file: str, state: Progress, subject: str | None) -> None:
    try:
        progress_file.write(file, state)
    except OSError as error:
        why = error.strerror or type(error).__name__
        found = event("progress.not_written", file=str(file), error=type(error).__name__)
        _log.warning(
            "perdure.progress: %s could not be written (%s); the record itself is in the store", file, why, extra=found
        )
        return
    if subject is not None:
        _commit(file, subject)


def _commit(file: str, subject: str) -> None:
    committed = progress_file.commit(file, subject)
    if not committed.ok:
        found = event("progress.not_committed", file=str(file))
        # Not what git says: a hook may quote the file.
        _log.warning("perdure.progress: %s was not committed; `git commit` says why", file, extra=found)


def _mend(file: str, state: Progress, subject: str | None, over: str | None) -> None:
    """Write the file if it is still what it was when this was said, or is gone."""
    contents = _contents(file)
    if contents is None or _mark(contents) == over:
        _publish(file, state, subject)
    elif subject is not None and contents == progress_file.to_markdown(state).encode():
        _commit(file, subject)  # nothing happens if it is committed
