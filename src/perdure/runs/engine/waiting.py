"""What a run waits for, in one line, and the command that a person can end the wait with.

`perdure runs`, the log and a TimeoutError of `result()` say it in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from perdure.errors import UsageError
from perdure.runs.engine.models import RunInfo
from perdure.runs.journal.rows import TASK
from perdure.storage.program import Driver
from perdure.storage.urls import is_postgres, sqlite_path

RESULT, ANSWER = "<result as JSON>", "<answer>"  # in a command: to be replaced; the commands refuse them
_PEOPLE = ("question", "approval", "doubt")


class PersonTask(NamedTuple):
    """Something that a person has to do before a run can continue."""

    run: str
    kind: str  # question, approval, doubt, paused, stuck
    step: str
    text: str
    command: str
    reason: str = ""  # may quote an error of user code: not for the log


def waits_for(info: RunInfo) -> str:
    """What a run waits for; empty if that is nothing."""
    what = info.waiting_for or {}
    kind = what.get("for")
    if info.status == "waiting" and info.is_due:
        who = "its graph to be run again" if info.function.startswith(TASK) else "a worker"
        return f"answered, waiting for {who}" if _of_people(what) else who
    if kind in ("question", "approval"):
        return f"{what.get('question')} (step {what.get('step')})"
    if kind == "doubt":
        reason = f": {what['reason']}" if what.get("reason") else ""
        return f"a verdict on {what.get('name')} (step {what.get('step')}, key {what.get('key')}){reason}"
    if kind == "help":
        return f"{what.get('type')}: {what.get('error')}"
    if kind == "signal":
        return f"a message{' on ' + repr(what['topic']) if what.get('topic') else ''}"
    if kind == "run":
        return f"run {what.get('run')}"
    if kind == "all":
        return f"{len(what.get('of', []))} things"
    if kind == "resume" or info.status == "paused":
        return "perdure run resume"
    return "its graph to be run again" if kind == "graph" else str(kind or "")


def _of_people(what: dict[str, Any]) -> list[dict[str, Any]]:
    parts = what.get("of", []) if what.get("for") == "all" else [what]
    return [part for part in parts if part.get("for") in _PEOPLE]


def waits_for_run(info: RunInfo) -> bool:
    """Whether it waits for another run."""
    what = info.waiting_for or {}
    return any(part.get("for") == "run" for part in [what, *what.get("of", [])])


def how_to_resolve(driver: Driver, run: str, step: str) -> str:
    """The two commands that end a doubt. Pasted as one line they are refused."""
    done = _command(driver, "run", "resolve", run, step, "--done", RESULT)
    return f"{done} or {_command(driver, 'run', 'resolve', run, step, '--not-done')}"


def how_to_answer(driver: Driver, run: str, step: str) -> str:
    """The command that answers a question."""
    return _command(driver, "answer", run, step, ANSWER)


def _command(driver: Driver, *words: str) -> str:
    import shlex  # imported late: only a wait for a person needs it

    return shlex.join(["perdure", *words, *_store_option(driver)])


def _store_option(driver: Driver) -> list[str]:
    """What names the store, unless the command would find it by itself. A URL may hold a password: it is not shown."""
    default = os.environ.get("PERDURE_STORE") or "agent.db"
    if driver.dialect != "sqlite":
        return [] if is_postgres(default) else ["--store", "URL"]
    path = driver.capabilities.path
    try:
        is_default = not is_postgres(default) and os.path.realpath(sqlite_path(default)) == os.path.realpath(path)
    except UsageError:  # what PERDURE_STORE holds is no store
        is_default = False
    return [] if is_default or path == ":memory:" else ["--store", os.path.abspath(path)]


def tasks_in(driver: Driver, info: RunInfo) -> Iterator[PersonTask]:
    """What a person has to do before this run can continue."""
    resume = _command(driver, "run", "resume", info.id)
    if info.status == "paused":
        yield PersonTask(info.id, "paused", "", "is paused", resume)
    elif info.status == "stuck":
        yield PersonTask(
            info.id, "stuck", "", f"is stuck (`{_command(driver, 'run', 'show', info.id)}` says why)", resume
        )
    elif info.status == "waiting" and not info.is_due:
        for what in _of_people(info.waiting_for or {}):
            step = str(what.get("step"))
            if what["for"] == "doubt":
                asked = f"did {what.get('name')} happen?"
                if what.get("happened"):
                    asked = f"what did {what.get('name')} return? It happened, and its result could not be stored"
                text = f"waits for a verdict: {asked} (step {step}, key {what.get('key')})"
                command = how_to_resolve(driver, info.id, step)
            else:
                text = f"waits for an answer: {what.get('question')} (step {step})"
                command = how_to_answer(driver, info.id, step)
            yield PersonTask(info.id, what["for"], step, text, command, what.get("reason", ""))
