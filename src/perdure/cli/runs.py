"""The commands that inspect runs: runs, steps, questions, run show, run tail. Nothing here changes a run."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, argument, command, with_store
from perdure.cli.parameters import COUNT, limit_option, run_argument
from perdure.cli.text import ago, fields, local, moment, plural, readable, shorten, size, to_json
from perdure.errors import NotFound, RunError, UsageError

if TYPE_CHECKING:
    from perdure import Ask, Run, RunInfo, Step, Store
    from perdure.cli.output import Cell, Output

IDS_COMPARED = 1000
_WIDTH = 100
STATUSES = (
    "queued", "running", "waiting", "paused", "stuck", "done", "failed", "cancelled", "rolled_back", "exported"
)  # fmt: skip
_COLOURS = {
    "done": "green",
    "running": "cyan",
    "queued": "cyan",
    "waiting": "yellow",
    "paused": "yellow",
    "retrying": "yellow",
    "stuck": "red",
    "failed": "red",
    "in doubt": "bold red",
}


def existing_run(store: Store, name: str) -> Run:
    """The handle of a run that is there. Raises NotFound, with the nearest id if there is one."""
    import difflib

    try:
        return store.get_run(name)
    except NotFound:
        pass
    try:
        store.thread(name).info()
    except NotFound:
        near = difflib.get_close_matches(name, [info.id for info in store.runs(limit=IDS_COMPARED)], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`perdure runs` lists what is there"
        raise NotFound(f"there is no run {name!r}; {hint}") from None
    raise NotFound(f"there is no run {name!r}, but a thread of that name: `perdure show {quote(name)}`")


def has_run(store: Store, name: str) -> bool:
    """Whether a name is a run's."""
    try:
        store.get_run(name)
    except NotFound:
        return False
    return True


@command("perdure runs\nperdure runs --status stuck\nperdure runs --json --limit 0 | jq .id")
@click.option("--status", type=click.Choice(STATUSES), metavar="STATUS", help=f"Only these: {', '.join(STATUSES)}.")
@click.option("--function", metavar="NAME", help="Only runs of this function.")
@click.option("--queue", metavar="NAME", help="Only runs of this queue.")
@click.option("--all", "with_tasks", is_flag=True, help="Also the tasks of LangGraph graphs.")
@limit_option
@with_store
def runs(
    cli: Invocation,
    store: Store,
    status: str | None,
    function: str | None,
    queue: str | None,
    with_tasks: bool,
    limit: int,
) -> None:
    """List the runs, the newest first.

    Each with its status and what it waits for. Statuses: queued (a worker may take it), running, waiting (for a
    person, a time, a message, a child), paused, stuck (it needs an operator), done, failed, cancelled, rolled_back,
    exported. --json prints a line per run.
    """
    out = cli.out
    list_runs = partial(store.runs, status=status, function=function, queue=queue, limit=limit or None)
    found = list_runs(tasks=with_tasks)
    if out.json:
        for info in found:
            out.json_line(fields(info))
        return
    now = datetime.now(UTC)
    rows: list[list[Cell]] = [
        [
            (info.id, "bold"),
            (info.status, _COLOURS.get(info.status, "")),
            (info.function, ""),
            (ago(info.changed_at, now), "dim"),
            (shorten(_waits_for(info), 2 * _WIDTH), ""),
        ]
        for info in found
    ]
    if rows:
        out.table(("run", "status", "function", "changed", "waits for"), rows)
    else:
        out.message("no runs" + (" match" if status or function or queue else " in this store yet"))
    if limit and len(found) == limit:
        out.message(f"the newest {limit}; there may be more: --limit 0 lists all")
    hidden = 0 if with_tasks else len({info.id for info in list_runs(tasks=True)} - {info.id for info in found})
    if hidden:
        out.message(f"not listed: {plural(hidden, 'task')} of LangGraph graphs; --all lists them too")


@command("perdure run show trip-42\nperdure run show trip-42 --json | jq .result", name="show")
@run_argument
@with_store
def show_run(cli: Invocation, store: Store, run: str) -> None:
    """Show a run: its status, what it waits for, its result.

    Lists effects in doubt and open questions, each with the command that settles it.
    """
    out = cli.out
    handle = existing_run(store, run)
    info, steps = handle.info(), handle.steps(large=False)
    doubts = [step for step in steps if step.status == "in doubt"]
    outcome = _outcome(handle, info)
    asks = store.asks(run)
    if out.json:
        counts = {"steps": len(steps), "in_doubt": [step.path for step in doubts]}
        out.document(fields(info) | outcome | counts | {"questions": [_ask_json(ask) for ask in asks]})
        return
    out.line((info.id, "bold"), (info.status, _COLOURS.get(info.status, "")))
    rows = [
        ("function", info.function + (f" (version {info.version})" if info.version else "")),
        ("queue", f"{info.queue}, priority {info.priority}"),
        ("started", local(info.created_at)),
        ("changed", local(info.changed_at)),
        ("claimed", plural(info.attempts, "time")),
        ("steps", str(len(steps))),
        ("waits for", _waits_for(info)),
        ("result", shorten(to_json(outcome["result"]), _WIDTH) if "result" in outcome else ""),
        ("error", outcome.get("error", "")),
    ]
    for name, value in rows:
        if value:
            out.line((f"{name:<10}", "dim"), (str(value), ""))
    _print_open(store, info, doubts, asks, out)


def _print_open(store: Store, info: RunInfo, doubts: list[Step], asks: list[Ask], out: Output) -> None:
    """What a person can settle, with the commands."""
    from perdure.runs.engine.waiting import how_to_answer

    asked = {ask.step for ask in asks if ask.kind == "doubt"}
    for step in doubts:
        out.line(("in doubt  ", "bold red"), (f"step {step.path}: {step.name}, {_shown(step)}", ""))
        out.line(("settle it ", "dim"), (_how_to_settle(store, info, step, asked), ""))
    for ask in asks:
        if ask.kind != "doubt":
            out.line((f"{ask.kind:<10}", "yellow"), (ask.question, ""))
            answer = how_to_answer(store._context.driver, info.id, ask.path)
            out.line(("answer it ", "dim"), (f"{answer}  ({_what_is_allowed(ask)})", ""))


def _how_to_settle(store: Store, info: RunInfo, step: Step, asked: set[str | None]) -> str:
    """What a person can do about an effect without an outcome: most of the time nothing yet."""
    from perdure.runs.engine.waiting import how_to_resolve

    if step.path in asked:
        return how_to_resolve(store._context.driver, info.id, step.path)
    if info.status == "running":
        return "it is under way, or its process has died: the worker that resumes the run finds out, or asks"
    if info.status == "cancelled":
        return f"the run is cancelled and will not; perdure run rollback {quote(info.id)} finds out and undoes the run"
    return "the run finds out when it is resumed, or asks"


def _outcome(handle: Run, info: RunInfo) -> dict[str, Any]:
    if info.status not in ("done", "failed", "cancelled", "rolled_back"):
        return {}
    try:
        return {"result": readable(handle._raw_result())}
    except RunError as error:
        return {"error": str(error)}


@command("perdure steps trip-42\nperdure steps trip-42 --in-doubt --json")
@run_argument
@click.option("--in-doubt", is_flag=True, help="Only effects whose outcome is unknown.")
@with_store
def steps(cli: Invocation, store: Store, run: str, in_doubt: bool) -> int:
    """List the steps of a run, in the order they began.

    With results, errors, attempts and what is in doubt. Other commands name a step by its number here: 4, or 4.1 in a
    branch. --json prints a line per step.
    """
    from perdure.errors import JournalDamaged

    out, code = cli.out, OK
    handle = existing_run(store, run)
    found = handle.steps(large=False)  # the table shows how large they are
    if out.json and any(step.large is not None for step in found):
        try:
            found = handle.steps()
        except JournalDamaged as error:
            out.message(f"large results are left out: {error}")
            code = NO
    if in_doubt:
        found = [step for step in found if step.status == "in doubt"]
    if out.json:
        for step in found:
            out.json_line(fields(step) | {"note": _with_times(step.note)})
        return code
    if found:
        headers = ("step", "kind", "name", "status", "seconds", "result")
        out.table(headers, [_step_row(step) for step in found], right=(4,))
    else:
        out.message(f"run {run} has no steps" + (" in doubt" if in_doubt else " yet"))
    return OK


def _step_row(step: Step) -> list[Cell]:
    took = "" if step.ended_at is None else f"{(step.ended_at - step.started_at).total_seconds():.3f}"
    attempts = f" ({step.attempts} attempts)" if step.attempts > 1 else ""
    return [
        (step.path, "bold"),
        (step.kind, "dim"),
        (step.name, ""),
        (step.status + attempts, _COLOURS.get(step.status, "")),
        (took, "dim"),
        (shorten(step.error or _shown(step), _WIDTH), "red" if step.error else ""),
    ]


def _shown(step: Step) -> str:
    if step.status == "in doubt":
        reason = (step.note or {}).get("reason")
        return f"key {step.key}" + (f": {reason}" if reason else "")
    if step.large is not None:
        return f"({size(step.large)}: --json shows it)"
    if step.result is None and step.note:
        note = {key: step.note[key] for key in ("of", "at", "keys")} if step.kind == "fork" else step.note
        return to_json(readable(note))
    return to_json(readable(step.result)) if step.ended_at is not None else ""


@command("perdure questions\nperdure questions trip-42 --all")
@argument("run", "[RUN]", "Only of this run.", required=False)
@click.option("--all", "with_closed", is_flag=True, help="Also those that were answered or closed.")
@with_store
def questions(cli: Invocation, store: Store, run: str | None, with_closed: bool) -> None:
    """List the questions that runs wait for.

    Oldest first, with the answers they allow. Effects in doubt are among them: `perdure run resolve` settles these,
    `perdure answer` all others. --json prints a line per question.
    """
    out = cli.out
    if run is not None:
        existing_run(store, run)
    found = store.asks(run, all=with_closed)
    if out.json:
        for ask in found:
            out.json_line(_ask_json(ask))
    elif found:
        now = datetime.now(UTC)
        headers = ("run", "step", "kind", "asked", "answers", "question")
        out.table(headers, [_ask_row(ask, now) for ask in found])
    else:
        out.message("no questions" if with_closed else "no open questions")


def _ask_row(ask: Ask, now: datetime) -> list[Cell]:
    given = ", ".join(f"{who}: {to_json(readable(value))}" for who, value, _ in ask.answers)
    asked = f"{ask.question} ({ask.reason})" if ask.reason else ask.question
    return [
        (ask.run, "bold"),
        (_step_of(ask), "bold"),
        (ask.kind if ask.status == "open" else ask.status, "yellow" if ask.status == "open" else "dim"),
        (ago(ask.asked_at, now), "dim"),
        (_what_is_allowed(ask), ""),
        (shorten(asked + (f"  [{given}]" if given else ""), 3 * _WIDTH), ""),
    ]


def _ask_json(ask: Ask) -> dict[str, Any]:
    answers = [{"who": who, "value": readable(value), "at": moment(at)} for who, value, at in ask.answers]
    return fields(ask, "path") | {"step": _step_of(ask), "answers": answers}


def _step_of(ask: Ask) -> str:
    """What `perdure run resolve` or `perdure answer` calls it."""
    return ask.step if ask.kind == "doubt" and ask.step is not None else ask.path


def _what_is_allowed(ask: Ask) -> str:
    if ask.kind == "doubt":
        return "done, not done"
    if ask.options is not None:
        return shorten(" | ".join(to_json(readable(option)) for option in ask.options), 60)
    return shorten(to_json(ask.schema), 60) if ask.schema is not None else "anything"


@command("perdure run tail trip-42\nperdure run tail trip-42 --json | jq .value")
@run_argument
@click.option("--after", metavar="SEQ", type=COUNT, default=0, help="Begin after this entry of the journal.")
@with_store
def tail(cli: Invocation, store: Store, run: str, after: int) -> None:
    """Follow a run until it ends.

    Prints what is recorded and what the run emits, in whichever process it runs. A run that waits is followed too:
    Ctrl-C ends it.
    """
    out = cli.out
    for event in existing_run(store, run).stream(after):
        if out.json:
            out.json_line(fields(event) | {"value": _with_times(event.value)})
        else:
            colour = "green" if event.kind == "done" else "yellow" if event.kind in ("wait", "failed") else ""
            at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
            value = "" if event.value is None else shorten(to_json(readable(event.value)), _WIDTH)
            out.line((at, "dim"), (f"{event.kind:<6}", colour), (event.path, "bold"), (event.name, ""), (value, ""))
        out.flush()  # the reader of a pipe wants to see it now


def _with_times(note: Any) -> Any:
    """A note of the journal as JSON; its times, unlike those of user values, are in UTC."""
    if not isinstance(note, dict):
        return readable(note)
    return readable({name: moment(value) if isinstance(value, datetime) else value for name, value in note.items()})


def _waits_for(info: RunInfo) -> str:
    from perdure.runs.engine.waiting import waits_for

    until = f" until {local(info.wake_at)}" if info.wake_at is not None else ""
    return f"{waits_for(info)}{until}".strip()


def only_question(store: Store, run: str) -> str:
    """The step of the only question that is open. Raises UsageError."""
    from perdure.runs.engine.waiting import how_to_answer

    found = [ask for ask in store.asks(run) if ask.kind != "doubt"]
    if len(found) == 1:
        return found[0].path
    if found:
        steps = ", ".join(ask.path for ask in found)
        raise UsageError(
            f"run {run!r} has {len(found)} open questions, at steps {steps}: name one, "
            f"`{how_to_answer(store._context.driver, run, found[0].path)}`; `perdure questions {quote(run)}` shows them"
        )
    if store.asks(run):
        raise UsageError(
            f"run {run!r} asks only about the outcome of an effect: `perdure run show {quote(run)}` shows it"
        )
    raise UsageError(f"run {run!r} has no open question; `perdure questions {quote(run)} --all` shows what it asked")
