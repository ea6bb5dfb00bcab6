"""The commands that load an app: worker, start, check, drill, run replay, thread undo."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command, root, run_group, sqlite_file, thread_group, with_store
from perdure.cli.parameters import COUNT, POSITIVE, args_option, duration, pair, tag, trust_option, who_option
from perdure.cli.refs import existing
from perdure.cli.runs import existing_run
from perdure.cli.text import plural, printable, readable
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

_SPARE_CONNECTIONS = 3  # for claims, for leases, and one in reserve
function_argument = click.argument("target", metavar="APP:FUNCTION")


@command(
    root,
    "Code",
    "perdure worker app.py\n"
    "perdure worker myapp.agents --queue search --queue default --concurrency 32\n"
    "perdure worker app.py:graph --where agent=travel",
)
@click.argument("app")
@trust_option
@click.option(
    "--queue", "queues", metavar="NAME", multiple=True, help="Serve this queue (may be repeated; default: default)."
)
@click.option("--concurrency", metavar="N", type=POSITIVE, default=8, help="How many runs at once (default 8).")
@click.option(
    "--where", metavar="KEY=VALUE", type=pair, multiple=True, help="Of a graph: only threads with this metadata."
)
@click.option("--all-tenants", is_flag=True, help="Serve all tenants, not only --tenant's.")
@click.option("--once", is_flag=True, help="Exit when nothing is due.")
@click.option(
    "--drain", metavar="TIME", type=duration, default="30s", help="How long runs may continue after SIGTERM (30s)."
)
@click.option(
    "--metrics", metavar="PORT", type=COUNT, help="Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics."
)
@click.option("--log-json", is_flag=True, help="Log as JSON, an object per line.")
@click.pass_obj
def worker(
    cli: Invocation,
    app: str,
    trust: tuple[str, ...],
    queues: tuple[str, ...],
    concurrency: int,
    where: tuple[tuple[str, Any], ...],
    all_tenants: bool,
    once: bool,
    drain: timedelta,
    metrics: int | None,
    log_json: bool,
) -> None:
    """Run what is due, with the functions of an app, or with one of them (app.py:travel).

    With a LangGraph graph (app.py:graph), resume its threads whose questions were answered. The store is the one of its
    PerdureSaver. If several graphs share that store, select the threads of this one by their metadata (--where).

    SIGTERM or Ctrl-C ends the worker: it lets its runs finish or park, and after --drain releases them for other
    workers. A second signal releases them at once. Several workers may serve one store. A worker claims runs of a
    function with a version= only if its code has the same version.
    """
    import perdure
    from perdure.runs.workers.loading import load_named

    if all_tenants and cli.tenant is not None:
        raise UsageError("--all-tenants and --tenant exclude each other")
    named = load_named(app)
    serves: dict[str, Any] = {"concurrency": concurrency, "drain_s": drain.total_seconds()}
    if queues:
        serves["queues"] = queues
    opened, what = _graph_of(cli, named, serves, dict(where), all_tenants) or _functions_of(
        cli, app, named, trust, serves, all_tenants
    )
    _log_to_stderr(as_json=log_json)
    served = nullcontext() if metrics is None else perdure.ops.metrics.serve(metrics)
    with opened as store, served as endpoint:
        if endpoint is not None:
            cli.message(f"metrics at {endpoint.url}")
        serving = perdure.Worker(store, **serves)
        until = "until nothing is due" if once else "Ctrl-C ends it"
        cli.message(f"serving {what} of queue {', '.join(serving.queues)}, {concurrency} at once; {until}")
        serving.run(until_idle=once)
    counts = dict(sorted(serving.counts.items()))
    cli.result(", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing was due", counts)


_Opened = tuple[AbstractContextManager["Store"], str]  # a store, and what the worker serves


def _graph_of(
    cli: Invocation, named: Any, serves: dict[str, Any], where: dict[str, Any], all_tenants: bool
) -> _Opened | None:
    """Let a worker serve a graph, if an app's member is one. Return the store of its checkpointer, which stays open."""
    from perdure.runs.workers.resumers import resumer_of

    resumer = resumer_of(named)
    if resumer is None:
        if where:
            raise UsageError("--where selects the threads of a graph: name it, as app.py:graph")
        return None
    if all_tenants or cli.tenant is not None or cli.schema is not None or cli.store is not None:
        raise UsageError("a graph has a store and a tenant of its own: leave out --store, --schema and the tenants")
    serves |= {"graphs": [named], "where": where}
    return nullcontext(resumer.store), f"graph {resumer.name}"


def _functions_of(
    cli: Invocation, app: str, named: Any, trust: tuple[str, ...], serves: dict[str, Any], all_tenants: bool
) -> _Opened:
    """Let a worker serve a durable function, or all that an app has."""
    from perdure.runs.functions.specs import known_durables

    functions = [named] if hasattr(named, "perdure_durable") else None
    if functions is None and callable(named):
        raise UsageError(f"{app} is neither a durable function (@perdure.durable) nor a graph with a PerdureSaver")
    if functions is None and not known_durables():
        raise UsageError(
            f"{app} has no durable function: put @perdure.durable above the function that is to run; to resume a "
            "LangGraph graph, name a compiled one, as app.py:graph"
        )
    names = sorted(known_durables()) if functions is None else [named.perdure_durable.name]
    serves |= {"functions": functions, "all_tenants": all_tenants}
    connections = serves["concurrency"] + _SPARE_CONNECTIONS
    pool: dict[str, Any] = {} if sqlite_file(cli.url) is not None else {"pool_size": connections}
    return cli.open(trust=trust, **pool), f"{plural(len(names), 'function')} ({', '.join(names)})"


class _Lines(logging.Handler):
    """Writes each log record of a worker as one line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"perdure: {printable(record.getMessage())}\n")


def _log_to_stderr(*, as_json: bool) -> None:
    import perdure

    log = logging.getLogger("perdure")
    if as_json:
        perdure.ops.logs.json_lines()
    elif not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines())
        log.setLevel(min(log.level or logging.INFO, logging.INFO))


@command(
    root,
    "Code",
    "perdure start app.py:travel --args '[\"Lisbon\"]' --id trip-42\n"
    "perdure start myapp.agents:travel --args Lisbon --queue search --priority 5 --tag customer=c-42",
)
@function_argument
@args_option
@click.option("--id", "run", metavar="ID", help="The run's id (default: the function's name and a random number).")
@click.option("--queue", metavar="NAME", default="default", help="The queue of the run (default: default).")
@click.option("--priority", metavar="N", type=int, default=0, help="Runs with a higher one are claimed first (0).")
@click.option("--delay", metavar="TIME", type=duration, help="Not before this time has passed: 45s, 30m, 2h.")
@click.option("--tag", "tags", metavar="KEY=VALUE", type=tag, multiple=True, help="A tag of the run (may be repeated).")
@with_store
def start(
    cli: Invocation,
    store: Store,
    target: str,
    arguments: str,
    run: str | None,
    queue: str,
    priority: int,
    delay: timedelta | None,
    tags: tuple[tuple[str, str], ...],
) -> None:
    """Queue a run of a function for any worker.

    If a run with this --id exists, starts no second one.
    """
    args = parse_arguments(arguments)
    options: dict[str, Any] = {"id": run, "queue": queue, "priority": priority, "tags": dict(tags)}
    options["delay_s"] = delay.total_seconds() if delay else 0.0
    started = store.start(callable_with(target, args), *args, **options)
    status = started.status
    later = ": a worker will run it" if status == "queued" else ""
    cli.result(f"{started.id} is {status}{later}", run=started.id, status=status)


def parse_arguments(text: str) -> list[Any]:
    """Return the arguments: the items of a JSON list; else the one value, as text if it is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[:1] not in ("[", "{", '"'):
            return [text]
        raise UsageError(f"--args is not JSON: {error}; quote it for the shell: --args '[\"NYC\"]'") from error
    return value if isinstance(value, list) else [value]


def callable_with(target: str, args: list[Any]) -> Any:
    """Return the durable function of a target. Raises UsageError if it does not take these arguments."""
    from perdure.runs.calls.decorators import durable_call

    function = durable_function(target)
    spec, whole = durable_call(function, tuple(args))
    if len(whole) == len(args) and spec.binder.plan.receiver is not None:
        raise UsageError(f"{target} is a method: write it with an object of your module, such as app.py:agent.travel")
    try:
        spec.binder.bind(whole, {})
    except TypeError as error:
        raise UsageError(f"{error}: pass its arguments with --args '[\"NYC\"]'") from error
    return function


def durable_function(target: str) -> Any:
    """Return the durable function that a target such as `app.py:travel` names. Raises UsageError."""
    from perdure.runs.workers.loading import load_named, split_app

    if split_app(target)[1] is None:
        raise UsageError(f"which function? Write app.py:travel, not {target!r}")
    function = load_named(target)
    if not hasattr(function, "perdure_durable"):
        raise UsageError(f"{target} is not a durable function: put @perdure.durable above it")
    return function


@command(root, "Code", "perdure check app.py\nperdure check myapp.agents --json")
@click.argument("app")
@trust_option
@click.pass_obj
def check(cli: Invocation, app: str, trust: tuple[str, ...]) -> int:
    """Replay the open runs against new code before you deploy it.

    Exits with 1 if the code could not resume one of them. perdure.patched() keeps changed code compatible with old
    runs. --json prints a line per run.
    """
    from perdure.runs.history.code_check import check_code
    from perdure.runs.workers.loading import load_app

    module = load_app(app)
    with cli.open(trust=trust) as store:
        findings = check_code(store, vars(module).values())
    bad = [finding for finding in findings if not finding.is_ok]
    for finding in findings:
        if cli.json:
            cli.json_line(readable(finding) | {"ok": finding.is_ok})
        else:
            cli.line(finding.verdict, finding.run, finding.function, finding.problem or "")
    if not cli.json:
        replayed = f"{plural(len(findings), 'open run')} replayed against {app}: {len(bad)} could not be resumed"
        cli.message(replayed if findings else f"no open run of a function in {app}")
    return NO if bad else OK


@command(
    run_group,
    "Inspect",
    "perdure run replay app.py trip-42\nperdure run replay myapp.agents trip-42 --json | jq .stopped_at\n"
    "perdure run replay app.py trip-42 --snapshot friday",
)
@click.argument("app")
@click.argument("run")
@click.option("--snapshot", metavar="NAME", help="Replay the run of this snapshot, in a sandbox.")
@trust_option
@click.pass_obj
def replay(cli: Invocation, app: str, run: str, snapshot: str | None, trust: tuple[str, ...]) -> None:
    """Run the code of a run with every step answered from its journal.

    Runs no body and writes nothing. Stops at the first step that is not recorded. Exits with 1 if the code diverges
    from the journal: it was changed, or it depends on something that is not recorded. A sandbox refuses the connections
    and processes that the code itself tries to start.
    """
    from perdure.runs.workers.loading import load_app

    def error_text(error: BaseException) -> str:
        return f"{type(error).__name__}: {error}".removesuffix(": ")

    load_app(app)
    with cli.open(trust=trust) as store:
        if snapshot is None:
            replayed = store.replay(existing_run(store, run))
        else:
            from perdure.forensics import sandbox

            with sandbox(store.get_snapshot(snapshot)) as box:
                replayed = box.replay(run)
    answered = plural(replayed.answered, "step")
    if cli.json:
        stop = {"stopped_at": replayed.path, "next": replayed.name}
        end = {"result": replayed.result} if replayed.error is None else {"error": error_text(replayed.error)}
        cli.document(
            end if replayed.is_complete else stop, run=run, complete=replayed.is_complete, steps=replayed.answered
        )
    elif replayed.error is not None:
        cli.line(f"{run}: replayed to its end, {answered}, no body run; it fails with {error_text(replayed.error)}")
    elif replayed.is_complete:
        cli.line(f"{run}: replayed to its end, {answered}, no body run")
        cli.state(readable(replayed.result))
    else:
        where = f"stops before {replayed.name} at step {replayed.path}, which is not recorded"
        cli.line(f"{run}: {answered} answered from the journal, no body run; {where}")


@command(
    thread_group,
    "History",
    "perdure thread undo app.py alice-001\nperdure thread undo myapp.agents alice-001 --who maria",
)
@click.argument("app")
@click.argument("thread")
@who_option
@trust_option
@click.pass_obj
def undo(cli: Invocation, app: str, thread: str, who: str, trust: tuple[str, ...]) -> None:
    """Undo the effects of a LangGraph thread, newest first, with the functions of an app.

    Undoes each effect that has an `undo`, once, also if you repeat the command after a crash. The run of the graph has
    ended then: a new input starts again from the values that the thread has. Settle effects in doubt first (`perdure
    run resolve`).
    """
    from perdure.langgraph import PerdureSaver
    from perdure.runs.workers.loading import load_app

    load_app(app)
    with cli.open(trust=trust) as store:
        existing(store, thread)
        undone = PerdureSaver(store).undo({"configurable": {"thread_id": thread}}, who=who)
    cli.result(f"{thread}: {plural(undone, 'effect')} undone; its run has ended", thread=thread, undone=undone)


@command(
    root,
    "Code",
    "perdure drill app.py:travel --args '[\"NYC\"]'\n"
    'perdure drill app.py:travel --args NYC --answer "Which flight?=LH400" --effect book=B-1\n'
    "perdure drill app.py:travel --args NYC --workers 3 --kills 100",
)
@function_argument
@args_option
@click.option("--kills", metavar="N", type=COUNT, default=20, help="Random kills in addition to the named points (20).")
@click.option("--answer", "answers", metavar="QUESTION=VALUE", type=pair, multiple=True, help="What people answer.")
@click.option("--effect", "results", metavar="NAME=VALUE", type=pair, multiple=True, help="What an effect returns.")
@click.option("--real", is_flag=True, help="Run the real effects and steps instead of recorded ones.")
@click.option("--workers", metavar="N", type=COUNT, default=0, help="Run it on N workers; kill and stop them.")
@click.option("--region", is_flag=True, help="Kill a region: two PostgreSQL servers, one replicated to the other.")
@click.option("--seed", metavar="N", type=int, default=0, help="The seed of the random kills (0).")
@click.pass_obj
def drill(
    cli: Invocation,
    /,
    target: str,
    arguments: str,
    kills: int,
    answers: tuple[tuple[str, Any], ...],
    results: tuple[tuple[str, Any], ...],
    region: bool,
    **more: Any,
) -> int:
    """Kill an agent at every point, resume it, and compare with an undisturbed run.

    The drill runs the agent in child processes on a store of its own. It records effects instead of performing them
    (--real performs them), and takes the results of plain steps from an undisturbed run. Exits with 1 and shows the
    timeline if a finished step runs again, an effect happens twice, the result differs, or code that is no effect acts
    on the outside world. --region starts --kills runs on a server, kills it with all its processes, and resumes the
    runs on its replica.
    """
    from perdure.testing.drill import DrillReport
    from perdure.testing.drill import drill as run_drill

    if any((cli.store, cli.schema, cli.tenant)):
        raise UsageError("a drill makes a store of its own: leave out --store, --schema and --tenant")
    args = parse_arguments(arguments)
    callable_with(target, args)
    if region and (more["real"] or more["workers"]):
        raise UsageError("--region has processes and effects of its own: leave --real and --workers out")
    more |= {"answers": dict(answers), "results": dict(results)}
    with cli.progress("drilling") as progress:
        if region:
            from perdure.regions.drill import drill_region

            report: DrillReport = drill_region(target, args, runs=kills, **more)
        else:
            report = run_drill(target, args, random_kills=kills, progress=progress, **more)
    if cli.json:
        cli.document(report, ok=report.ok)
    else:
        for line in report.text().splitlines():
            cli.line(line)
    return OK if report.ok else NO
