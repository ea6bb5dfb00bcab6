"""The commands that change a run: answer, resolve, send, pause, resume, retry, undo, cancel, fork, delete, erase."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click

from perdure.cli.base import NO, OK, Invocation, command, root, run_group, with_store
from perdure.cli.parameters import full_option, pair, parse_value, run_conditions, who_option, yes_option
from perdure.cli.retention import print_erased
from perdure.cli.runs import call_of, existing_asker, existing_run
from perdure.cli.text import plural, readable, to_json
from perdure.errors import AnswerRefused, UsageError

if TYPE_CHECKING:
    from perdure import Question, Run, Store

RESUMED = "a worker continues it, or the line that started it"


@command(root, "Runs", "perdure answer trip-42 LH400\nperdure answer trip-42 4 true --who maria")
@click.argument("run")
@click.argument("step_and_value", metavar="[STEP] VALUE", nargs=-1)
@who_option
@with_store
def answer(cli: Invocation, store: Store, run: str, step_and_value: tuple[str, ...], who: str) -> None:
    """Answer a question of a run or a LangGraph thread. Give STEP if it has several questions.

    Refuses an answer that the question does not allow, with the reason (exit code 2). The answer keeps who gave it. A
    worker, or the process that waits for the result, resumes the run. A LangGraph graph is resumed by a worker that was
    given it (`perdure worker app.py:graph`), or when it is invoked again.
    """
    from perdure.runs.journal.rows import TASK

    if not 1 <= len(step_and_value) <= 2:
        raise UsageError(f"give one VALUE, and STEP if there are several: `perdure answer {quote(run)} VALUE`")
    asker = existing_asker(store, run)
    is_graph = asker is None or asker.refresh().function.startswith(TASK)
    *named, text = step_and_value
    _refuse_placeholder(text)
    question = _question(store, run, named[0] if named else None, is_thread=asker is None)
    step = named[0] if question is None else question.path
    value = parse_value(text)
    try:
        answered = store.answer(run, value, step=step, who=who)
    except AnswerRefused as refused:
        if value == text:
            raise
        try:  # a person who types 2 may mean the text "2"; the refused answer was not recorded
            answered = store.answer(run, text, step=step, who=who)
        except AnswerRefused:
            raise refused from None
    call = call_of(question) if question is not None else ""
    noted = f"Noted. {plural(answered.missing, 'more answer')} of the same kind needed."
    resumed = f"A worker resumes {run}, or the line that started it"
    if is_graph or (question is not None and question.thread is not None):
        resumed = "A worker that was given the graph resumes it, or invoke it again"
    outcome = f"Answered. {resumed}." if answered.settled else noted
    cli.result(
        f"{call}: {to_json(readable(value))}. {outcome}" if call else outcome,
        run=run,
        settled=answered.settled,
        missing=answered.missing,
        effect=None if question is None else question.effect,
        arguments=None if question is None else readable(question.arguments),
    )


def _question(store: Store, run: str, step: str | None, *, is_thread: bool) -> Question | None:
    """Return the open question at a step, or None. Without a step, return the only one, or raise UsageError."""
    questions = [question for question in store.questions(run) if question.kind != "doubt"]
    if step is not None:
        return next((question for question in questions if question.path == step), None)
    if len(questions) == 1:
        return questions[0]
    steps = ", ".join(question.path for question in questions)
    problem = f"{len(questions)} open questions, at steps {steps}: name one" if questions else "no open question"
    if is_thread:
        raise UsageError(f"thread {run!r} has {problem}; `perdure questions {quote(run)} --all` lists all that it has")
    raise UsageError(f"run {run!r} has {problem}; `perdure run show {quote(run)}` shows what it waits for")


def _refuse_placeholder(text: str | None) -> None:
    from perdure.runs.engine.waiting import ANSWER, RESULT

    if text in (ANSWER, RESULT):
        raise UsageError(f"{text} is a placeholder: replace it by a value, such as '\"B-1001\"'")


@command(
    run_group,
    "Control",
    "perdure run resolve trip-42 5 --done '\"B-1001\"'\nperdure run resolve trip-42 5 --not-done --who maria",
)
@click.argument("run")
@click.argument("step")
@click.option("--done", metavar="VALUE", help="It happened, with this result.")
@click.option("--not-done", is_flag=True, help="It did not happen, and no longer can.")
@who_option
@with_store
def resolve(cli: Invocation, store: Store, run: str, step: str, done: str | None, not_done: bool, who: str) -> None:
    """Settle an effect in doubt.

    The process died or lost the connection when it may already have sent the request. Ask the receiver first: it knows
    the key that `perdure run show` prints. With --done, the run continues with VALUE as the effect's result. With
    --not-done, the run performs the effect.
    """
    from perdure.runs.journal.rows import TASK

    handle = existing_run(store, run)
    if (done is None) != not_done:
        raise UsageError("give either --done VALUE or --not-done")
    _refuse_placeholder(done)
    if done is None:
        handle.resolve(step, not_done=True, who=who)
    else:
        handle.resolve(step, done=parse_value(done), who=who)
    verdict = "not done" if not_done else "done"
    then = "run its graph again" if handle.refresh().function.startswith(TASK) else RESUMED
    cli.result(f"step {step} of {run} counts as {verdict}; {then}", run=run, step=step, resolved=verdict)


@command(
    run_group,
    "Control",
    'perdure run send trip-42 \'{"gate": "B12"}\' --topic news\nperdure run send trip-42 stop --key order-7',
)
@click.argument("run")
@click.argument("value")
@click.option("--topic", metavar="NAME", default="", help="The topic of the perdure.receive() that takes it.")
@click.option("--key", metavar="KEY", help="Send a message with this key only once.")
@who_option
@with_store
def send(cli: Invocation, store: Store, run: str, value: str, topic: str, key: str | None, who: str) -> None:
    """Send a message to a run.

    The run takes messages with perdure.receive(), in the order sent. The store keeps them until then.
    """
    from perdure.runs.journal.rows import FINISHED

    status = existing_run(store, run).status
    if status in FINISHED:
        raise UsageError(f"run {run!r} is {status}: it receives nothing any more")
    store.send(run, parse_value(value), topic=topic, key=key, who=who)
    cli.result(f"sent to {run}", run=run, topic=topic, sent=True)


def _request(cli: Invocation, run: Run, name: str, **options: Any) -> int:
    """Change one run. Return NO if there was nothing to change."""
    from perdure.runs.journal.rows import FINISHED

    before, status = run.status, getattr(run, name)(**options)
    is_changed = True
    if status == "running":
        text = f"{run.id} is running: its process will {name} it, or the worker that takes it over"
    elif name == "undo" and status == "queued" and not run.can_undo():
        text = f"{run.id} will end as undone, but none of its effects has an undo: what they did stands"
    elif status == "queued" and name in ("cancel", "undo"):
        first = " before it is cancelled" if name == "cancel" else ""
        text = (
            f"{run.id} will be undone{first}, newest effect first, by a worker (`perdure worker`) or by the line that "
            "started it, run again"
        )
    elif status == before:
        is_changed = False
        state = f"had ended before ({status})" if status in FINISHED else f"is {status}"
        text = f"{run.id} {state}: there is nothing to {name}"
    else:
        text = f"{run.id} is {status} now" + (f": {RESUMED}" if status == "queued" else "")
    cli.result(text, run=run.id, before=before, status=status)
    return OK if is_changed else NO


def _bulk(
    cli: Invocation, store: Store, action: Any, runs: tuple[str, ...], where: dict[str, Any], **options: Any
) -> int:
    """Change the runs that are named or selected, after asking. Name those that could not be changed."""
    from perdure.runs.engine.bulk import APPLIES

    yes = options.pop("yes")
    if len(runs) == 1 and not where:
        return _request(cli, existing_run(store, runs[0]), action, **options)
    if not runs:
        if not where:
            raise UsageError(f"name runs to {action}, or select them: --status, --function, --tag …")
        statuses = where.pop("statuses", None) or APPLIES[action]
        counts = store.count_runs(**where, statuses=statuses, limit=None)
        where["statuses"] = statuses
        if not counts:
            cli.message("no runs match")
            if cli.json:
                cli.document(action=action, statuses={}, refused={})
            return OK
        shown = ", ".join(f"{count:,} {status}" for status, count in counts.items())
        cli.confirm(f"{action.capitalize()} {plural(counts.total, 'run')} ({shown})?", yes=yes, after="")
    with cli.progress(action) as progress:
        result = store.bulk(action, *runs, progress=progress, **where, **options)
    for run, reason in result.refused.items():
        cli.message(f"{run}: {reason}")
    shown = ", ".join(f"{count:,} {status} now" for status, count in result.statuses.items()) or "none was changed"
    left = f"; {plural(len(result.refused), 'run')} not changed" if result.refused else ""
    cli.result(f"{shown}{left}", action=action, statuses=result.statuses, refused=result.refused)
    return NO if result.refused else OK


def _add_request(name: str, text: str, *examples: str) -> None:
    """Add the command that calls the method `name` of runs."""

    @click.argument("runs", metavar="[RUN]...", nargs=-1)
    @run_conditions
    @who_option
    @yes_option
    @with_store
    def request(
        cli: Invocation, store: Store, runs: tuple[str, ...], where: dict[str, Any], who: str, yes: bool
    ) -> int:
        return _bulk(cli, store, name, runs, where, yes=yes, who=who)

    request.__doc__ = text
    shown = "\n".join((f"perdure run {name} trip-42", *examples))
    command(run_group, "Control", shown, name=name)(request)


_MANY = """To change many runs, name several, or select them by conditions. Without --status, the conditions select all
    runs that the command applies to. The command prints how many it selected, and asks first. It prints which runs
    could not be changed and why; then the exit code is 1."""
_add_request("pause", f"""Stop runs at their next step, until they are resumed.

    {_MANY}""")  # fmt: skip
_add_request("resume", f"""Resume paused or stuck runs.

    A waiting run checks again for what it waits for. A worker claims it.

    {_MANY}""")  # fmt: skip
_add_request(
    "retry",
    f"""Continue failed runs where they failed, with the current code.

    Finished steps and effects are not repeated; the call that failed runs again. A worker claims the run. A run that
    undid its effects when it failed cannot be retried.

    {_MANY}""",
    "perdure run retry --function travel --since 2h --yes",
)
_add_request("undo", f"""Undo the effects of runs, the newest first.

    A worker undoes them. To continue from an earlier step instead, use `perdure run fork`.

    {_MANY}""")  # fmt: skip


@command(
    run_group,
    "Control",
    "perdure run cancel trip-42\nperdure run cancel trip-42 --no-undo\nperdure run cancel --tag customer=c-42 --yes",
)
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@run_conditions
@click.option("--no-undo", is_flag=True, help="End it at once and keep its effects, for example if its code is gone.")
@who_option
@yes_option
@with_store
def cancel(
    cli: Invocation, store: Store, runs: tuple[str, ...], where: dict[str, Any], no_undo: bool, who: str, yes: bool
) -> int:
    """Stop runs and their children for good, and undo their effects.

    A run ends at once if it has no effect to undo and none in doubt. Otherwise a worker undoes its effects, newest
    first, and then cancels it. The line that started the run does the same if you run it again. A running run stops at
    its next step.

    To cancel many runs, name several, or select them by conditions. The command prints how many it selected, and asks
    first. It prints which runs could not be changed and why; then the exit code is 1.
    """
    return _bulk(cli, store, "cancel", runs, where, yes=yes, undo=not no_undo, who=who)


@command(
    run_group,
    "Control",
    "perdure run fork trip-42 --name trip-43 --keys new\n"
    "perdure run fork trip-42 4 --name trip-43 --keys new --set '4=\"UA88\"'",
)
@click.argument("run")
@click.argument("step", required=False)
@click.option("--name", metavar="ID", required=True, help="The id of the new run.")
@click.option(
    "--keys",
    type=click.Choice(("new", "same")),
    help="Keys of effects that it performs again: new ones, or the same, which receivers answer as before.",
)
@click.option(
    "--set", "changes", metavar="STEP=VALUE", type=pair, multiple=True, help="Replace the result of a shared step."
)
@who_option
@with_store
def fork(
    cli: Invocation,
    store: Store,
    run: str,
    step: str | None,
    name: str,
    keys: Literal["new", "same"] | None,
    changes: tuple[tuple[str, Any], ...],
    who: str,
) -> None:
    """Continue after a step in a new run; by default after the last step.

    Copies nothing and leaves the old run as it is. A worker resumes the new run.
    """
    at_step = 0 if step == "0" else step
    changed = dict(changes) or None
    copy = store.fork(existing_run(store, run), at=at_step, id=name, changes=changed, keys=keys, who=who)
    at = f"at step {step}" if step is not None else "at its end"
    text = f"forked run {run} {at} as {copy.id}; a worker will resume it"
    cli.result(text, {"from": run}, run=copy.id, at=step, status=copy.status)


@command(run_group, "Remove and move", "perdure run delete trip-42 --yes")
@click.argument("run")
@yes_option
@with_store
def delete(cli: Invocation, store: Store, run: str, yes: bool) -> None:
    """Delete a finished run with its journal and its results."""
    existing_run(store, run)
    cli.confirm(f"Delete run {run!r} with its journal and its results?", yes=yes)
    store.delete_run(run)
    cli.result(f"deleted {run}", run=run, deleted=True)


@command(run_group, "Remove and move", "perdure run erase trip-42 --yes")
@click.argument("run")
@full_option
@yes_option
@with_store
def erase(cli: Invocation, store: Store, run: str, full: bool, yes: bool) -> None:
    """Erase every byte of a finished run.

    Prints which copies may still hold it, such as backups.
    """
    existing_run(store, run)
    cli.confirm(f"Erase run {run!r} with its journal and its results, and every byte of it?", yes=yes)
    print_erased(store.ops.erase_run(run, full=full), cli)
