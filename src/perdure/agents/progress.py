"""`perdure.progress`: how far a run has come, in words, for its next session, another agent, a person.

The record is merged over the calls and kept twice: as the run's latest, written in the same transaction as the journal
entry that a replay answers from; and as a Markdown file, if one was named.

The file is written after the commit, so that it is never ahead of the journal. If the process dies in between, the
resume writes it, unless it has been changed meanwhile. A file that cannot be written is a warning: it must not fail
a run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from blake3 import blake3

from perdure.agents import progress_file
from perdure.agents.progress_file import Progress
from perdure.errors import UsageError
from perdure.runs.calls.calls import do
from perdure.runs.calls.timeouts import check_deadline
from perdure.runs.engine import flows
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Body, Operation
from perdure.runs.execution.scope import Scope, current, need_scope
from perdure.runs.handle import Run
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import VALUE, Entry, Recorded, decompress
from perdure.runs.journal.journal import read_journal
from perdure.runs.store import RunStore
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Rows, read
from perdure.threads.context import Context
from perdure.values.codec import decode
from perdure.values.registry import register

NAME: Final = "perdure.progress"
READ: Final = "perdure.progress.read"
SORT: Final = "progress"  # of the run's value that holds the latest
_FIELDS: Final = ("goal", "done", "blocked", "next", "context")
_UNCHANGED: Final = object()  # the default of what None clears
_log = logging.getLogger("perdure")
register(Progress, name="perdure.agents.Progress")


class Reporter:
    """The type of `perdure.progress`: called to report, `read` and `latest` to know what was reported."""

    def __repr__(self) -> str:
        return "<perdure.progress>"

    def __call__(
        self,
        *,
        goal: str | None = None,
        done: str | Iterable[str] = (),
        blocked: Any = _UNCHANGED,
        next: Any = _UNCHANGED,
        context: Mapping[str, Any] | None = None,
        file: str | os.PathLike[str] | None = None,
        git: bool = False,
    ) -> Any:
        """Report how far this run has come; gives the whole record (`Progress`). Await it in an async run.

        `done` is added to what is done, `context` to what is known; `blocked` and `next` replace what they were, None
        clears them. `file` names a Markdown file to keep it in, and `git` commits that each time; both are remembered
        for the run. A run that has no record yet continues the file's, unless it has another goal.
        """
        scope = need_scope("perdure.progress()")
        change = {"goal": goal, "blocked": blocked, "next": next}
        for name, value in change.items():
            if value is not None and value is not _UNCHANGED and not isinstance(value, str):
                raise UsageError(f"perdure.progress(): {name} is a text, not a {type(value).__qualname__}")
        added = [done] if isinstance(done, str) else list(done) if isinstance(done, Iterable) else [done]
        if not all(isinstance(text, str) for text in added):
            raise UsageError("perdure.progress(): done is a text or a list of texts")
        merge = partial(_merged, change={**change, "done": added, "context": dict(context or {})})
        target = None if file is None else os.path.abspath(os.fspath(file))
        return do(scope, _report(scope, merge, _subject(goal, added, blocked, next), target, git))

    def read(self, file: str | os.PathLike[str]) -> Any:
        """The record in a file; None if there is no such file. In a run it is recorded, and awaited if that is async.

        For the record of a run: `perdure.progress.latest(store, run)`.
        """
        scope = current.get()
        if scope is None or scope.body is not None:
            return progress_file.read(file)
        return do(scope, _read(scope, os.path.abspath(os.fspath(file))))

    def latest(self, store: RunStore, run: str | Run) -> Progress | None:
        """The last record of a run; None if it reported nothing. Raises NotFound."""
        return store._run(_latest(store._context, run if isinstance(run, str) else run.id))

    async def alatest(self, store: RunStore, run: str | Run) -> Progress | None:
        """`latest`, awaited."""
        return await store._arun(_latest(store._context, run if isinstance(run, str) else run.id))


progress: Final = Reporter()


def _latest(ctx: Context, run_id: str) -> Flow[Progress | None]:
    tenant, row = yield from flows.locate(ctx, run_id)
    text = yield from read(partial(rows.value_of, tenant, row.run, SORT))
    if text is None:  # a fork has its origin's journal, not its values
        entries = yield from read(partial(read_journal, tenant, row))
        reported = max((one for one in entries if one.entry.name == NAME), key=lambda one: one.seq, default=None)
        if reported is None:
            return None
        text = reported.entry.value
        if text is None:
            text = yield from read(partial(read_blob, tenant, (reported.entry.more or {})["blob"]))
    return _made(decode(decompress(text), ctx.codec))


def _merged(old: Progress, change: dict[str, Any]) -> Progress:
    upcoming = old.next if change["next"] is _UNCHANGED else change["next"]
    if change["next"] is _UNCHANGED and upcoming in change["done"]:
        upcoming = None
    return Progress(
        goal=old.goal if change["goal"] is None else change["goal"],
        done=list(dict.fromkeys([*old.done, *change["done"]])),
        blocked=old.blocked if change["blocked"] is _UNCHANGED else change["blocked"],
        next=upcoming,
        context={**old.context, **change["context"]},
    )


def _subject(goal: str | None, done: list[str], blocked: Any, upcoming: Any) -> str:
    """One line for git: what this call reports."""
    for what, text in (("Done", "; ".join(done)), ("Blocked", blocked), ("Goal", goal), ("Next", upcoming)):
        if isinstance(text, str) and text:
            line = " ".join(text.split())
            return f"{what}: {line}" if len(line) <= 100 else f"{what}: {line[:99]}…"
    return "Progress"


class _Kept:
    """The record of the run of one execution. Calls of parallel branches change it one after the other."""

    def __init__(self, execution: Execution) -> None:
        self.record: dict[str, Any] | None = None
        self.seq = 0
        self.last = max((row.seq for row in execution.index.rows() if row.entry.name == NAME), default=0)
        self._lock = threading.Lock()
        self._alock: Any = None

    def take(self, record: dict[str, Any], seq: int) -> None:
        if seq >= self.seq:
            self.record, self.seq = record, seq

    def enter(self, scope: Scope) -> Operation[None]:
        if not scope.is_async:
            self._lock.acquire()
            return
        if self._alock is None:
            import asyncio

            self._alock = asyncio.Lock()
        yield Body(self._alock.acquire, is_async=True)

    def leave(self, scope: Scope) -> None:
        (self._alock if scope.is_async else self._lock).release()


_sessions: WeakKeyDictionary[Execution, _Kept] = WeakKeyDictionary()
_guard = threading.Lock()


def _report(
    scope: Scope, merge: Callable[[Progress], Progress], subject: str, file: str | None, git: bool
) -> Operation[Progress]:
    scope.check()
    execution, path = scope.execution, scope.take()
    yield from check_deadline(scope, path)
    found = execution.recorded(path, NAME, None)
    with _guard:
        if (kept := _sessions.get(execution)) is None:
            kept = _sessions[execution] = _Kept(execution)
    yield from kept.enter(scope)
    try:
        if found:
            return (yield from _replayed(scope, kept, found[-1]))
        old = kept.record
        if old is None:  # of before `continue_as_new`
            text = yield from read(partial(rows.value_of, execution.tenant, execution.row.run, SORT))
            old = {} if text is None else execution.decoded(decompress(text))
        file, git = file or old.get("file"), git or bool(old.get("git"))
        if git and file is None:
            raise UsageError("perdure.progress(git=True) commits a file: name it with file=")
        over = None if file is None else _contents(file)
        base = _made(old) if old else _continued(over, merge)
        state = merge(base)
        value = execution.encoded({**{name: getattr(state, name) for name in _FIELDS}, "file": file, "git": git})
        more = None if file is None else {"over": _hash(over), "subject": subject}
        entry = Entry(path, NAME, execution.ctx.clock_us(), value=value, more=more)
        yield from execution.log.record((VALUE, entry), same_tx=partial(_keep, execution, value))
        kept.take(execution.decoded(decompress(value)), execution.index.at(path)[-1].seq)
        reported = _made(execution.decoded(decompress(value)))  # as a replay will find it; the caller may change it
        if file is not None:
            yield _work(scope, partial(_publish, file, reported, subject if git else None))
        return reported
    finally:
        kept.leave(scope)


def _replayed(scope: Scope, kept: _Kept, recorded: Recorded) -> Operation[Progress]:
    """What was reported before; its file is written now if the process died before it was."""
    execution, more = scope.execution, recorded.entry.more or {}
    kept.take((yield from execution.value(recorded.entry)), recorded.seq)
    found = yield from execution.value(recorded.entry)
    file = found.get("file")
    if file is not None and recorded.seq == kept.last and not execution.replay:
        contents, reported = _contents(file), _made(found)
        own = progress_file.to_markdown(reported).encode()
        if contents is None or contents == own or _hash(contents) == more.get("over"):
            yield _work(scope, partial(_publish, file, reported, more["subject"] if found.get("git") else None))
    return _made(found)


def _keep(execution: Execution, value: bytes) -> Generator[Batch, list[Rows], None]:
    yield Batch(rows.ADD_VALUE(tenant=execution.tenant, run=execution.row.run, sort=SORT, value=value))


def _read(scope: Scope, file: str) -> Operation[Progress | None]:
    scope.check()
    execution, path = scope.execution, scope.take()
    yield from check_deadline(scope, path)
    found = execution.recorded(path, READ, None)
    if found:
        return (yield from execution.value(found[-1].entry))  # type: ignore[no-any-return]
    state = progress_file.read(file)
    execution.log.buffer(VALUE, Entry(path, READ, execution.ctx.clock_us(), value=execution.encoded(state)))
    return state


def _made(found: Mapping[str, Any]) -> Progress:
    return Progress(**{name: found[name] for name in _FIELDS})


def _continued(contents: bytes | None, merge: Callable[[Progress], Progress]) -> Progress:
    """The record of a file that another run began, if it has the same goal."""
    found = progress_file.from_markdown((contents or b"").decode("utf-8-sig", "replace"))
    return found if merge(found).goal == found.goal else Progress()


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


def _hash(contents: bytes | None) -> str | None:
    return None if contents is None else blake3(contents).hexdigest()[:16]


def _publish(file: str, state: Progress, subject: str | None) -> None:
    """Write the file, and commit it if it has a subject."""
    try:
        progress_file.write(file, state)
    except OSError as error:
        found = event("progress.not_written", file=file, error=type(error).__name__)
        message = "perdure.progress: %s could not be written (%s); the record itself is in the store"
        _log.warning(message, file, error.strerror or type(error).__name__, extra=found)
        return
    if subject is not None and not progress_file.commit(file, subject):
        # Not what git printed: a hook may quote the file.
        found = event("progress.not_committed", file=file)
        _log.warning("perdure.progress: %s was not committed; `git commit` says why", file, extra=found)
