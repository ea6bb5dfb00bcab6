"""The commands that inspect runs: runs, steps, questions, run show, run tail. Nothing here changes a run."""

from __future__ import annotations

from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command, root, run_group, with_store
from perdure.cli.parameters import as_of_option, limit_option, run_conditions
from perdure.cli.text import ago, local, nearest, plural, readable, shorten, size, to_json
from perdure.errors import JournalDamaged, NotFound, RunError

if TYPE_CHECKING:
    from perdure import Question, Run, RunInfo, Step, Store

IDS_COMPARED = 1000
_WIDTH = 100


def existing_run(store: Store, name: str) -> Run:
    """Return the handle of an existing run. Raises NotFound, which suggests a thread of that name or a similar id."""
    try:
        return store.get_run(name)
    except NotFound:
        if _is_thread(store, name):
            raise NotFound(f"there is no run {name!r}, but a thread: `perdure log {quote(name)}`") from None
        ids = [info.id for info in store.runs(limit=IDS_COMPARED)]
        raise NotFound(nearest("run", name, ids, "perdure runs")) from None


def existing_asker(store: Store, name: str) -> Run | None:
    """Return the handle of a run, or None for a thread of that name. Raises NotFound if there is neither."""
    try:
        return store.get_run(name)
    except NotFound:
        return None if _is_thread(store, name) else existing_run(store, name)


def _is_thread(store: Store, name: str) -> bool:
    try:
        store.thread(name).info()
    except NotFound:
        return False
    return True


@command(
    root,
    "Runs",
    "perdure runs --status failed --tag customer=c-42 --since 2h\nperdure runs --count function --status failed\n"
    "perdure runs --json --limit 0 | jq .id",
)
@run_conditions
@click.option("--all", "tasks", is_flag=True, help="Also the tasks of LangGraph graphs.")
@click.option(
    "--count",
    "by",
    type=click.Choice(("status", "function", "version", "queue")),
    help="Print how many there are by this, instead of a list.",
)
@click.option("--before", metavar="CURSOR", help="Continue a list after the run with this cursor (see --json).")
@limit_option
@with_store
def runs(
    cli: Invocation, store: Store, /, where: dict[str, Any], tasks: bool, by: Any, before: str | None, limit: int
) -> None:
    """List the runs, the newest first.

    Shows the status of each run and what it waits for. Statuses: queued (a worker may claim it), running, waiting (for
    a person, a time, a message or a child), paused, stuck (needs an operator), done, failed, cancelled, undone,
    exported (moved to another store). --json prints a line per run, with its tags and its cursor.
    """
    if by is not None:
        counts = store.count_runs(by, **where, tasks=tasks, limit=None)
        return cli.listing(list(counts.items()), (by, "runs"), lambda item: [item[0] or "-", f"{item[1]:,}"],
            empty="no runs match", right=(1,), document=lambda item: {by: item[0], "runs": item[1]})  # fmt: skip
    infos = store.runs(**where, limit=limit or None, tasks=tasks, before=before)
    now = datetime.now(UTC)

    def row(info: RunInfo) -> list[str]:
        waits = shorten(_waits_for(store, info), 2 * _WIDTH)
        return [info.id, info.status, info.function, ago(info.changed_at, now), waits, shown_tags(info.tags)]

    empty = "no runs match" if where else "no runs in this store yet"
    headers = ("run", "status", "function", "changed", "waits for", "tags")
    tagless = not any(info.tags for info in infos)
    cli.listing(infos, headers[: 5 if tagless else 6], lambda info: row(info)[: 5 if tagless else 6], empty=empty)
    if limit and len(infos) == limit and not cli.json:
        cli.message(f"the newest {limit}; there may be more: --before {infos[-1].cursor}, or --limit 0 for all")
    if not (infos or tasks or cli.json) and store.runs(**where, limit=1, tasks=True):
        cli.message("not listed: tasks of LangGraph graphs; --all lists them too")
    return None


def shown_tags(tags: dict[str, str]) -> str:
    return shorten(" ".join(f"{key}={value}" for key, value in sorted(tags.items())), _WIDTH)


@command(run_group, "Inspect", "perdure run show trip-42\nperdure run show trip-42 --json | jq .result", name="show")
@click.argument("run")
@with_store
def show_run(cli: Invocation, store: Store, run: str) -> None:
    """Show a run: its status, what it waits for, its result.

    Lists effects in doubt and open questions, each with the command that settles it.
    """
    handle = existing_run(store, run)
    info, steps, questions = handle.refresh(), handle.steps(values="small"), store.questions(run)
    doubts = [step for step in steps if step.status == "in doubt"]
    outcome = _outcome(handle, info)
    if cli.json:
        counts = {"steps": len(steps), "in_doubt": [step.path for step in doubts]}
        return cli.document(info, outcome, counts, questions=[_question_json(question) for question in questions])
    cli.line(info.id, info.status)
    rows = {
        "function": info.function + (f" (version {info.version})" if info.version else ""),
        "queue": f"{info.queue}, priority {info.priority}",
        "tags": shown_tags(info.tags),
        "started": local(info.created_at),
        "changed": local(info.changed_at),
        "claimed": plural(info.attempts, "time"),
        "steps": str(len(steps)),
        "waits for": _waits_for(store, info),
        "result": shorten(to_json(outcome["result"]), _WIDTH) if "result" in outcome else "",
        "error": outcome.get("error", ""),
    }
    for name, value in rows.items():
        if value:
            cli.line(f"{name:<10}", value)
    _print_open(cli, store, info, doubts, questions)
    return None


def _print_open(cli: Invocation, store: Store, info: RunInfo, doubts: list[Step], questions: list[Question]) -> None:
    """Print what a person can settle, each with the command that settles it."""
    from perdure.runs.engine.waiting import how_to_answer, how_to_resolve

    asked = {question.step for question in questions if question.kind == "doubt"}
    for step in doubts:
        cli.line("in doubt  ", f"step {step.path}: {step.name}, {_shown(step)}")
        if step.path in asked:
            cli.line("settle it ", how_to_resolve(store._context.driver, info.id, step.path))
        else:
            cli.line("settle it ", "the run reconciles it when it is resumed, or asks")
    for question in questions:
        if question.kind != "doubt":
            cli.line(f"{question.kind:<10}", question.text)
            if question.effect is not None:
                cli.line("call      ", call_of(question))
            answer = how_to_answer(store._context.driver, info.id, question.path)
            cli.line("answer it ", f"{answer}  ({_what_is_allowed(question)})")


def _outcome(handle: Run, info: RunInfo) -> dict[str, Any]:
    if info.status not in ("done", "failed", "cancelled", "undone"):
        return {}
    try:
        return {"result": readable(handle._raw_result())}
    except RunError as error:
        return {"error": str(error)}


@command(root, "Runs", "perdure steps trip-42\nperdure steps trip-42 --json | jq .result")
@click.argument("run")
@as_of_option
@with_store
def steps(cli: Invocation, store: Store, run: str, as_of: datetime | None) -> int:
    """List the steps of a run, in the order they began.

    Shows results, errors, attempts and effects in doubt. Other commands name a step by the number shown here: 4, or 4.1
    in a branch. --json prints a line per step.
    """
    handle, code = existing_run(store, run) if as_of is None else store.at(as_of).get_run(run), OK
    listed = handle.steps(values="small")  # the table shows only the size of large results
    if cli.json and any(step.result_bytes is not None for step in listed):
        try:
            listed = handle.steps()
        except JournalDamaged as error:
            cli.message(f"large results are left out: {error}")
            code = NO
    headers = ("step", "kind", "name", "status", "seconds", "result")
    cli.listing(listed, headers, _step_row, empty=f"run {run} has no steps yet", right=(4,))
    return code


def _step_row(step: Step) -> list[str]:
    took = "" if step.ended_at is None else f"{(step.ended_at - step.started_at).total_seconds():.3f}"
    status = f"{step.status} ({step.attempts} attempts)" if step.attempts > 1 else step.status
    return [step.path, step.kind, step.name, status, took, shorten(step.error or _shown(step), _WIDTH)]


def _shown(step: Step) -> str:
    if step.status == "in doubt":
        reason = (step.note or {}).get("reason")
        return f"key {step.key}" + (f": {reason}" if reason else "")
    if step.result_bytes is not None:
        return f"({size(step.result_bytes)}: --json shows it)"
    if step.result is None and step.note:
        return to_json(readable(step.note))
    return to_json(readable(step.result)) if step.ended_at is not None else ""


@command(root, "Runs", "perdure questions\nperdure questions trip-42 --all")
@click.argument("run", required=False)
@click.option("--all", "with_closed", is_flag=True, help="Also list answered and closed questions.")
@with_store
def questions(cli: Invocation, store: Store, run: str | None, with_closed: bool) -> None:
    """List the open questions of all runs and LangGraph threads, or of RUN, which may be a thread.

    Lists the oldest first, with the answers they allow. An effect in doubt is a question too: settle it with `perdure
    run resolve`, and all others with `perdure answer`. --json prints a line per question.
    """
    listed = store.questions(run, all=with_closed)
    if run is not None and not listed:
        existing_asker(store, run)
    now = datetime.now(UTC)

    def row(question: Question) -> list[str]:
        answers = ", ".join(f"{who}: {to_json(readable(value))}" for who, value, _ in question.answers)
        asked = f"{question.text} ({question.reason})" if question.reason else question.text
        if (call := call_of(question)) and f"{question.effect}(" not in question.text:
            asked = f"{asked}  {call}"
        if question.thread is not None and question.arguments is not None:
            asked = to_json(readable(question.arguments))
        kind = question.kind if question.status == "open" else question.status
        text = shorten(asked + (f"  [{answers}]" if answers else ""), 3 * _WIDTH)
        return [question.run, _step_of(question), kind, ago(question.asked_at, now), _what_is_allowed(question), text]

    headers = ("run", "step", "kind", "asked", "answers", "question")
    empty = "no questions" if with_closed else "no open questions"
    cli.listing(listed, headers, row, empty=empty, document=_question_json)
    if not cli.json and any(question.thread or question.run.startswith("langgraph/") for question in listed):
        cli.message("an answered LangGraph graph is resumed by `perdure worker app.py:graph`, or when invoked again")


def call_of(question: Question) -> str:
    """Return the call that a question is about, as `refund(cents=900)`; "" if it is about none."""
    if question.effect is None:
        return ""
    arguments = (question.arguments or {}).items()
    inside = ", ".join(f"{name}={shorten(to_json(readable(value)), _WIDTH)}" for name, value in arguments)
    return f"{question.effect}({inside})"


def _question_json(question: Question) -> dict[str, Any]:
    answers = [{"who": who, "value": readable(value), "at": readable(at)} for who, value, at in question.answers]
    document: dict[str, Any] = readable(question) | {"step": _step_of(question), "answers": answers}
    del document["path"]
    return document


def _step_of(question: Question) -> str:
    """Return the step that names the question for `perdure run resolve` or `perdure answer`."""
    return question.step if question.kind == "doubt" and question.step is not None else question.path


def _what_is_allowed(question: Question) -> str:
    if question.kind == "doubt":
        return "done, not done"
    if question.options is not None:
        return shorten(" | ".join(to_json(readable(option)) for option in question.options), 60)
    return shorten(to_json(question.schema), 60) if question.schema is not None else "anything"


@command(run_group, "Inspect", "perdure run progress trip-42\nperdure run progress trip-42 --json")
@click.argument("run")
@with_store
def progress(cli: Invocation, store: Store, run: str) -> None:
    """Show how far a run has come, as it reported with `perdure.progress`.

    Prints the last record as Markdown: the goal, completed steps, blockers, the next action, context.
    """
    import perdure
    from perdure.agents.progress_file import to_markdown

    existing_run(store, run)
    record = perdure.progress.latest(store, run)
    if record is None:
        raise NotFound(f"run {run!r} has reported no progress: its code calls perdure.progress(…)")
    if cli.json:
        return cli.document(record)
    for line in to_markdown(record).splitlines():
        cli.line(line)
    return None


@command(run_group, "Inspect", "perdure run tail trip-42\nperdure run tail trip-42 --json | jq .value")
@click.argument("run")
@with_store
def tail(cli: Invocation, store: Store, run: str) -> None:
    """Follow a run until it ends.

    Prints recorded entries and what the run emits, in whichever process it runs. Also follows a waiting run; press
    Ctrl-C to stop.
    """
    for event in existing_run(store, run).stream():
        if cli.json:
            cli.json_line(readable(event))
            continue
        at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        value = "" if event.value is None else shorten(to_json(readable(event.value)), _WIDTH)
        cli.line(at, f"{event.kind:<6}", event.path, event.name, value)


def _waits_for(store: Store, info: RunInfo) -> str:
    from perdure.runs.engine.runtime import runtime_of
    from perdure.runs.engine.waiting import resumer, waits_for

    if info.status == "running" and info.owner is not None and runtime_of(store._context).owner.is_dead(info.owner):
        return f"{resumer(info)}: its process has ended"

    until = f" until {local(info.wake_at)}" if info.wake_at is not None else ""
    return f"{waits_for(info)}{until}".strip()
