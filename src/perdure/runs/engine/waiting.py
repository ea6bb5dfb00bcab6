"""One-line descriptions of what a run waits for, and the command with which a person ends the wait.

`perdure runs`, the log and the TimeoutError of `result()` use the same words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from perdure.errors import UsageError
from perdure.runs.journal.rows import TASK
from perdure.runs.run_table import RunInfo, RunRow, Waiting
from perdure.storage.program import Driver
from perdure.storage.urls import is_postgres, sqlite_path

RESULT, ANSWER = "<result as JSON>", "<answer>"  # placeholders, which the commands refuse as values


class PersonTask(NamedTuple):
    """Something that a person has to do before a run can continue."""

    run: str
    kind: str  # question, approval, doubt, paused, stuck
    step: str
    text: str
    command: str
    reason: str = ""  # may quote an error of user code, so it is not logged


def waits_for(info: RunInfo) -> str:
    """Return what a run waits for, in one line; "" if it waits for nothing."""
    what = info.waiting_for
    if info.status == "waiting" and info.is_due:
        return f"answered, waiting for {resumer(info)}" if _of_people(what) else resumer(info)
    if info.status == "paused" and not _of_people(what):  # paused by an operator while it waited, or before it ran
        return "perdure run resume"
    return "" if what is None else what.shown


def resumer(info: RunInfo) -> str:
    """Return what continues a run that is free."""
    return "its graph to be run again" if info.function.startswith(TASK) else "a worker"


def _of_people(what: Waiting | None) -> list[Waiting]:
    return [] if what is None else [part for part in what.each if part.settled_by]


def waits_for_run(info: RunInfo) -> bool:
    """Return whether a run waits for another run."""
    return info.waiting_for is not None and any(part.kind == "run" for part in info.waiting_for.each)


def is_in_doubt(row: RunRow) -> bool:
    """Return whether a run waits for a verdict on an effect."""
    return any(part.settled_by == "resolve" for part in _of_people(Waiting.of(row.waiting)))


def how_to_resolve(driver: Driver, run: str, step: str) -> str:
    """Return the two commands that end a doubt. Pasted as one line they are refused."""
    done = _command(driver, "run", "resolve", run, step, "--done", RESULT)
    return f"{done} or {_command(driver, 'run', 'resolve', run, step, '--not-done')}"


def how_to_answer(driver: Driver, run: str, step: str) -> str:
    """Return the command that answers a question."""
    return _command(driver, "answer", run, step, ANSWER)


def _command(driver: Driver, *words: str) -> str:
    import shlex  # imported here because only a wait for a person needs it

    return shlex.join(["perdure", *words, *_store_option(driver)])


def _store_option(driver: Driver) -> list[str]:
    """Return the option that names the store; empty if the store is the command's default.

    The URL of a server is not shown, because it may contain a password.
    """
    default = os.environ.get("PERDURE_STORE") or "agent.db"
    if driver.dialect != "sqlite":
        return [] if is_postgres(default) else ["--store", "URL"]
    path = driver.capabilities.path
    try:
        is_default = not is_postgres(default) and os.path.realpath(sqlite_path(default)) == os.path.realpath(path)
    except UsageError:  # PERDURE_STORE does not name a store
        is_default = False
    return [] if is_default or path == ":memory:" else ["--store", os.path.abspath(path)]


def tasks_in(driver: Driver, info: RunInfo) -> Iterator[PersonTask]:
    """Yield what a person has to do before this run can continue."""
    resume = _command(driver, "run", "resume", info.id)
    if info.status == "paused":
        yield PersonTask(info.id, "paused", "", "is paused", resume)
    elif info.status == "stuck":
        yield PersonTask(
            info.id, "stuck", "", f"is stuck (`{_command(driver, 'run', 'show', info.id)}` says why)", resume
        )
    elif info.status == "waiting" and not info.is_due:
        for what in _of_people(info.waiting_for):
            if what.settled_by == "resolve":
                asked = f"did {what.name} happen?"
                if what.has_happened:
                    asked = f"what did {what.name} return? It happened, and its result could not be stored"
                text = f"waits for a verdict: {asked} (step {what.step}, key {what.key})"
                command = how_to_resolve(driver, info.id, what.step)
            else:
                text = f"waits for an answer: {what.text} (step {what.step})"
                command = how_to_answer(driver, info.id, what.step)
            yield PersonTask(info.id, what.kind, what.step, text, command, what.reason)
