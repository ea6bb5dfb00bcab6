"""`perdure.progress`: a record of how far a run has come, for people, other agents and its own next session.

A report is a step. It merges the report into the record and writes the Markdown file, if one was named. After a crash
before its result is recorded, the resumed run does both again, with the same outcome.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from perdure.agents import progress_file
from perdure.agents.progress_file import FileContent, Progress
from perdure.errors import UsageError
from perdure.runs.calls.calls import do
from perdure.runs.calls.steps import step_operation
from perdure.runs.engine import flows
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation
from perdure.runs.execution.scope import Scope, current, need_scope
from perdure.runs.functions.specs import StepSpec
from perdure.runs.handle import Run, run_id_of
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import Entry, decompress
from perdure.runs.journal.journal import read_journal
from perdure.runs.journal.kinds import PROGRESS
from perdure.storage.events import event
from perdure.storage.program import Flow, read
from perdure.threads.context import StoreContext
from perdure.values.codec import decode
from perdure.values.registry import register

if TYPE_CHECKING:
    from perdure.ops.store import Store

NAME: Final = PROGRESS.name
_UNCHANGED: Final = object()  # the default of parameters that None clears
_log = logging.getLogger("perdure")
_records: WeakKeyDictionary[Execution, dict[str, Any]] = WeakKeyDictionary()  # the last record of each run
register(Progress, name="perdure.agents.Progress")


class Reporter:
    """The type of `perdure.progress`: call it to report; `read` and `latest` return what was reported."""

    def __repr__(self) -> str:
        return "<perdure.progress>"

    def __call__(
        self,
        *,
        goal: str | None = None,
        done: str | Iterable[str] = (),
        blocked: Any = _UNCHANGED,
        next: Any = _UNCHANGED,
        context: Mapping[str, Any] | str | Iterable[str] | None = None,
        file: str | os.PathLike[str] | None = None,
        git: bool = False,
    ) -> Any:
        """Report how far this run has come, and return the whole record (`Progress`). Await it in an async run.

        `done` and `context` add to the record: `done` a text or several, `context` values by name, or texts that stand
        as bullets. `blocked`, a text or several, and `next` replace their former values, and None clears them.
        `file` names a Markdown file for the record, and `git=True` commits it at each report. The run remembers both.
        The first report of a run continues the record in the file, unless the goal differs. Text that a person adds to
        the file is kept: bullets under Completed Steps become steps, other lines and sections become `notes`. Call it
        in the durable function itself, not in a parallel branch.
        """
        scope = need_scope("perdure.progress()")
        if scope.parent is not None:
            raise UsageError("perdure.progress() was called in a parallel branch: report when all branches have ended")
        change: dict[str, Any] = {"goal": _UNCHANGED if goal is None else goal, "next": next}
        change = {name: value for name, value in change.items() if value is not _UNCHANGED}
        for name, value in change.items():
            if value is not None and not isinstance(value, str):
                raise UsageError(f"perdure.progress(): {name} is a text, not a {type(value).__qualname__}")
        change |= {"done": _texts("done", done), "context": {}}
        if blocked is not _UNCHANGED:
            change["blocked"] = _texts("blocked", blocked)
        if isinstance(context, Mapping):
            change["context"] = dict(context)
        else:
            change["bullets"] = _texts("context", context)
        if file is not None:
            change["file"] = os.path.abspath(os.fspath(file))
        return do(scope, _report(scope, {**change, "git": True} if git else change))

    def read(self, file: str | os.PathLike[str]) -> Any:
        """Return the record in a file, or None if the file does not exist.

        In a run the read is a recorded step; await it in an async run. `latest` returns the record of a run.
        """
        scope = current.get()
        if scope is None or scope.body is not None:
            return progress_file.read(file)
        return do(scope, step_operation(scope, _READ, (os.path.abspath(os.fspath(file)),), {}))

    def latest(self, store: Store, run: str | Run) -> Progress | None:
        """Return the last record of a run, or None if it reported nothing. Raises NotFound."""
        return store._run(_latest(store._context, run))

    async def alatest(self, store: Store, run: str | Run) -> Progress | None:
        """Async twin of `latest`."""
        return await store._arun(_latest(store._context, run))


progress: Final = Reporter()


def _report(scope: Scope, change: dict[str, Any]) -> Operation[Progress]:
    old = _records.get(scope.execution, {})
    if change.get("git") and not (change.get("file") or old.get("file")):
        raise UsageError("perdure.progress(git=True) commits a file: name it with file=")
    record = yield from step_operation(scope, _AWRITE if scope.is_async else _WRITE, (old, change), {})
    _records[scope.execution] = record
    return _progress_from(record)


def _write(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Merge a report into the record, write the file and return the new record. This is the body of the step."""
    file, git = change.get("file", old.get("file")), change.get("git", old.get("git", False))
    failed: OSError | None = None
    if file is not None:
        try:
            old = _with_file(old, progress_file.read_content(file), change.get("goal"))
        except OSError as error:
            failed = error
    upcoming = change.get("next", old.get("next"))
    record = {
        "goal": change.get("goal", old.get("goal", "")),
        "done": list(dict.fromkeys([*old.get("done", ()), *change["done"]])),
        "blocked": change.get("blocked", old.get("blocked", [])),
        "next": None if "next" not in change and upcoming in change["done"] else upcoming,
        "context": {**old.get("context", {}), **change["context"]},
        "notes": _with_bullets(old.get("notes", {}), change.get("bullets", ())),
        "file": file,
        "git": git,
    }
    if (
        file is not None and failed is not None
    ):  # a file that cannot be read is not replaced: it may hold a person's notes
        _warn_not_written(file, failed)
    elif file is not None:
        _publish(file, _progress_from(record), _subject(change) if git else None)
    return record


def _texts(name: str, value: Any) -> list[str]:
    """Return a text, several or None as a list. Raises UsageError."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    texts: list[Any] = [] if value is None else list(value) if several else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"perdure.progress(): {name} is a text or a list of texts")
    return texts


def _with_bullets(notes: dict[str, str], texts: Iterable[str]) -> dict[str, str]:
    """Add texts to the notes of the context, each once."""
    known = notes.get(progress_file.CONTEXT, "").splitlines()
    added = [line for line in progress_file.bullets(texts).splitlines() if line not in known]
    return {**notes, progress_file.CONTEXT: "\n".join([*known, *added])} if added else notes


def _with_file(old: dict[str, Any], content: FileContent | None, goal: str | None) -> dict[str, Any]:
    """Merge the content of the file into a record.

    The first report of a run takes over the whole file, or only its notes if the goals differ. Later reports take over
    what a person added. Notes always come from the file."""
    if content is None:
        return old
    progress, by_hand = content
    if not old:
        return vars(progress) if goal in (None, progress.goal) else {"notes": progress.notes}
    known = {progress_file.one_line(text) for text in old["done"]}
    done = [*old["done"], *(text for text in by_hand if text not in known)]
    said = {name: old[name] or getattr(progress, name) for name in ("blocked", "next")}
    return {**old, **said, "done": done, "notes": progress.notes}


async def _awrite(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    import asyncio

    return await asyncio.to_thread(_write, old, change)


# Newer code may word a report differently, so a replay does not compare these arguments.
_WRITE: Final = StepSpec(_write, NAME, "step", ignore=("old", "change"))
_AWRITE: Final = StepSpec(_awrite, NAME, "step", ignore=("old", "change"))
_READ: Final = StepSpec(progress_file.read, f"{NAME}.read", "step")


def _latest(ctx: StoreContext, run: str | Run) -> Flow[Progress | None]:
    tenant, row = yield from flows.locate(ctx, run_id_of(ctx, run))
    entries = yield from read(partial(read_journal, tenant, row))
    reported = max((one for one in entries if one.entry.name == NAME), key=lambda one: one.seq, default=None)
    if reported is None:
        return None
    return (yield from progress_in(ctx, tenant, reported.entry)).progress


class ReportedProgress(NamedTuple):
    """A record, and the file that it was written to, or None."""

    progress: Progress
    file: str | None


def progress_in(ctx: StoreContext, tenant: int, entry: Entry) -> Flow[ReportedProgress]:
    """Return the record in a journal entry of a report."""
    text = entry.value
    if text is None:
        text = yield from read(partial(read_blob, tenant, (entry.extra or {})["blob"]))
    record = decode(decompress(text), ctx.codec)
    return ReportedProgress(_progress_from(record), record["file"])


def _progress_from(record: dict[str, Any]) -> Progress:
    return Progress(**deepcopy({name: record[name] for name in Progress.__dataclass_fields__}))


def _subject(change: dict[str, Any]) -> str:
    """Return the subject of the git commit: one line about this report."""
    texts = {**change, **{name: "; ".join(change.get(name, ())) for name in ("done", "blocked")}}
    for name in ("done", "blocked", "goal", "next"):
        if line := " ".join((texts.get(name) or "").split()):
            return f"{name.capitalize()}: {line if len(line) <= 100 else line[:99] + '…'}"
    return "Progress"


def _publish(file: str, record: Progress, subject: str | None) -> None:
    """Write the file, and commit it if there is a subject. Log a failure as a warning: it must not fail the run."""
    try:
        progress_file.write(file, record)
    except OSError as error:
        _warn_not_written(file, error)
        return
    if subject is not None and not progress_file.commit(file, subject):
        # The output of git is not logged: a hook may quote the file.
        fields = event("progress.not_committed", file=file)
        _log.warning("perdure.progress: %s was not committed; `git commit` says why", file, extra=fields)


def _warn_not_written(file: str, error: OSError) -> None:
    fields = event("progress.not_written", file=file, error=type(error).__name__)
    message = "perdure.progress: %s could not be written (%s); the record itself is in the store"
    _log.warning(message, file, error.strerror or type(error).__name__, extra=fields)
