"""The commands that control runs: answer, resolve, send; pause to undo; fork, delete, erase."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click

from perdure.cli.base import Invocation, command, root, run_group, with_store
from perdure.cli.parameters import full_option, pair, parse_value, who_option, yes_option
from perdure.cli.retention import print_erased
from perdure.cli.runs import existing_run
from perdure.cli.text import plural
from perdure.errors import AnswerRefused, UsageError

if TYPE_CHECKING:
    from perdure import Run, Store


@command(root, "Runs", "perdure answer trip-42 LH400\nperdure answer trip-42 4 true --who maria")
@click.argument("run")
@click.argument("step_and_value", metavar="[STEP] VALUE", nargs=-1)
@who_option
@with_store
def answer(cli: Invocation, store: Store, run: str, step_and_value: tuple[str, ...], who: str | None) -> None:
    """Answer a question of a run; STEP is needed if it has several.

    An answer that the question does not allow is refused with the reason (exit code 2). The journal records who
    answered. A worker resumes the run, or the process that waits for its result; a LangGraph graph is to be invoked
    again.
    """
    from perdure.runs.journal.rows import TASK

    if not 1 <= len(step_and_value) <= 2:
        raise UsageError(f"give one VALUE, with its STEP if need be: `perdure answer {quote(run)} VALUE`")
    info = existing_run(store, run).refresh()
    *named, given = step_and_value
    _refuse_placeholder(given)
    step, who = named[0] if named else _only_question(store, run), who or _user()
    value = parse_value(given)
    try:
        answered = store.answer(run, value, step=step, who=who)
    except AnswerRefused as refused:
        if value == given:
            raise
        try:  # 2 can be meant as the text "2"; a refused answer is not written
            answered = store.answer(run, given, step=step, who=who)
        except AnswerRefused:
            raise refused from None
    noted = f"Noted. {plural(answered.missing, 'more answer')} of the same kind needed."
    resumed = "Invoke its graph again" if info.function.startswith(TASK) else f"A worker will resume {run}"
    cli.result(
        f"Answered. {resumed}." if answered.settled else noted,
        run=run,
        settled=answered.settled,
        missing=answered.missing,
    )


def _only_question(store: Store, run: str) -> str:
    """The step of the only question that is open. Raises UsageError."""
    found = [question.path for question in store.questions(run) if question.kind != "doubt"]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} open questions, at steps {', '.join(found)}: name one" if found else "no open question"
    raise UsageError(f"run {run!r} has {what}; `perdure run show {quote(run)}` shows what it waits for")


def _refuse_placeholder(given: str | None) -> None:
    from perdure.runs.engine.waiting import ANSWER, RESULT

    if given in (ANSWER, RESULT):
        raise UsageError(f"{given} stands for a value: put yours in its place, such as '\"B-1001\"'")


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"


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
def resolve(
    cli: Invocation, store: Store, run: str, step: str, done: str | None, not_done: bool, who: str | None
) -> None:
    """Settle an effect in doubt.

    Its process died, or lost the connection, after the request may have been sent. Ask the receiver first: it knows
    the key that `perdure run show` prints. --done: the run continues with VALUE as the effect's result. --not-done:
    the effect is run.
    """
    from perdure.runs.journal.rows import TASK

    handle = existing_run(store, run)
    if (done is None) != not_done:
        raise UsageError("give either --done VALUE or --not-done")
    _refuse_placeholder(done)
    if done is None:
        handle.resolve(step, not_done=True, who=who or _user())
    else:
        handle.resolve(step, done=parse_value(done), who=who or _user())
    verdict = "not done" if not_done else "done"
    then = "run its graph again" if handle.refresh().function.startswith(TASK) else "a worker will resume the run"
    cli.result(f"step {step} of {run} counts as {verdict}; {then}", run=run, step=step, resolved=verdict)


@command(
    run_group,
    "Control",
    'perdure run send trip-42 \'{"gate": "B12"}\' --topic news\nperdure run send trip-42 stop --key order-7',
)
@click.argument("run")
@click.argument("value")
@click.option("--topic", metavar="NAME", default="", help="Which perdure.receive() takes it.")
@click.option("--key", metavar="KEY", help="The same message with the same key is sent once.")
@with_store
def send(cli: Invocation, store: Store, run: str, value: str, topic: str, key: str | None) -> None:
    """Send a message to a run.

    The run takes it with perdure.receive(), in the order sent; until then the message is kept.
    """
    from perdure.runs.journal.rows import FINISHED

    status = existing_run(store, run).status
    if status in FINISHED:
        raise UsageError(f"run {run!r} is {status}: it receives nothing any more")
    store.send(run, parse_value(value), topic=topic, key=key)
    cli.result(f"sent to {run}", run=run, topic=topic, sent=True)


def _request(cli: Invocation, run: Run, name: str, **options: bool) -> None:
    before, status = run.status, getattr(run, name)(**options)
    if status == "running":
        text = f"{run.id} is running: its process will {name} it, or the worker that takes it over"
    elif status == "queued" and name in ("cancel", "undo"):
        first = " before it is cancelled" if name == "cancel" else ""
        text = (
            f"{run.id} will be undone{first}, newest effect first, by a worker (`perdure worker`) or by the line that "
            "started it, run again"
        )
    elif status == before:
        text = f"{run.id} is {status}: there is nothing to {name}"
    else:
        text = f"{run.id} is {status} now"
    cli.result(text, run=run.id, before=before, status=status)


def _add_request(name: str, text: str) -> None:
    """Add the command that calls this method of a run."""

    @click.argument("run")
    @with_store
    def request(cli: Invocation, store: Store, run: str) -> None:
        _request(cli, existing_run(store, run), name)

    request.__doc__ = text
    command(run_group, "Control", f"perdure run {name} trip-42", name=name)(request)


for _name, _text in {
    "pause": "Stop a run at its next step, until it is resumed.",
    "resume": """Resume a paused or stuck run.

    A waiting run checks again whether what it waits for has come. A worker claims it.""",
    "retry": """Continue a failed run where it failed, with the code of now.

    What it did stands and is not done again; the call that it failed with runs again. A worker claims it. A run that
    undid its effects when it failed cannot be retried.""",
    "undo": """Undo the effects of a run, the newest first.

    A worker does it. `perdure run fork` continues from an earlier step instead.""",
}.items():
    _add_request(_name, _text)


@command(run_group, "Control", "perdure run cancel trip-42\nperdure run cancel trip-42 --no-undo")
@click.argument("run")
@click.option(
    "--no-undo", is_flag=True, help="End it at once and let its effects stand, for example if its code is gone."
)
@with_store
def cancel(cli: Invocation, store: Store, run: str, no_undo: bool) -> None:
    """Stop a run and its children for good, and undo what they did.

    With nothing to undo and nothing in doubt it ends at once. Otherwise a worker undoes its effects, newest first, or
    the line that started it does, run again; then it is cancelled. A running run stops at its next step.
    """
    _request(cli, existing_run(store, run), "cancel", undo=not no_undo)


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
    help="Idempotency keys of effects that it performs again: new ones, or the same, which receivers answer as before.",
)
@click.option(
    "--set", "changes", metavar="STEP=VALUE", type=pair, multiple=True, help="Another result for a shared step."
)
@with_store
def fork(
    cli: Invocation,
    store: Store,
    run: str,
    step: str | None,
    name: str,
    keys: Literal["new", "same"] | None,
    changes: tuple[tuple[str, Any], ...],
) -> None:
    """Continue after a step in a new run; STEP is the run's last by default.

    Copies nothing, and leaves the old run as it is. A worker resumes the new one.
    """
    made = store.fork(existing_run(store, run), at=step, id=name, changes=dict(changes) or None, keys=keys)
    at = f"at step {step}" if step is not None else "at its end"
    text = f"forked run {run} {at} as {made.id}; a worker will resume it"
    cli.result(text, {"from": run}, run=made.id, at=step, status=made.status)


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
