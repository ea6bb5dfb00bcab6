"""`perdure worker` runs what is due, with the functions of an app. `perdure start` queues a run for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, argument, command, sqlite_file, with_store
from perdure.cli.code import check_call, parse_arguments
from perdure.cli.parameters import COUNT, POSITIVE, Duration, args_option, function_argument, trust_option
from perdure.cli.text import plural, printable
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

_SPARE_CONNECTIONS = 3  # for claiming, for leases, and for one more


@command(
    "perdure worker app.py\n"
    "perdure worker myapp.agents --queue search --queue default --concurrency 32\n"
    "perdure worker app.py --once"
)
@argument("app", "APP", "Where the functions are: app.py, myapp.agents, or app.py:travel for only one.")
@trust_option
@click.option(
    "--queue", "queues", metavar="NAME", multiple=True, help="Serve this queue (may be repeated; default: default)."
)
@click.option("--concurrency", metavar="N", type=POSITIVE, default=8, help="Runs at once (default 8).")
@click.option("--all-tenants", is_flag=True, help="Serve all tenants, not only --tenant's.")
@click.option("--once", is_flag=True, help="End when nothing is due.")
@click.option(
    "--drain",
    metavar="TIME",
    type=Duration(),
    default=timedelta(seconds=30),
    help="How long runs may continue after SIGTERM (30s).",
)
@click.option(
    "--metrics", metavar="PORT", type=COUNT, help="Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics."
)
@click.option("--log-json", is_flag=True, help="Log as JSON, an object per line.")
@click.option(
    "--keep-runs",
    metavar="TIME",
    type=Duration(),
    help="How long finished runs keep their journals (default: for good).",
)
@click.pass_obj
def worker(
    cli: Invocation,
    app: str,
    trust: tuple[str, ...],
    queues: tuple[str, ...],
    concurrency: int,
    all_tenants: bool,
    once: bool,
    drain: timedelta,
    metrics: int | None,
    log_json: bool,
    keep_runs: timedelta | None,
) -> None:
    """Run what is due, with the functions of an app.

    Until SIGTERM or Ctrl-C: then its runs finish, park, or are released for other workers; a second signal releases
    them at once. Several workers may serve one store. Runs of a function with a version= are taken only by code that
    has the same version.
    """
    import perdure
    from perdure.runs.functions.specs import known_durables
    from perdure.runs.workers.loading import load_named

    if all_tenants and cli.settings.tenant is not None:
        raise UsageError("--all-tenants and --tenant exclude each other")
    named = load_named(app)
    functions: list[Callable[..., Any]] | None = None
    if hasattr(named, "perdure_durable"):
        functions = [named]
    elif callable(named):
        raise UsageError(f"{app} is not a durable function: put @perdure.durable above it")
    elif not known_durables():
        raise UsageError(f"{app} has no durable function: put @perdure.durable above what runs are made of")
    _log_to_stderr(as_json=log_json)
    pool = {} if sqlite_file(cli.url) is not None else {"pool_size": concurrency + _SPARE_CONNECTIONS}
    keep_runs_s = None if keep_runs is None else keep_runs.total_seconds()
    with cli.open(keep_runs_s=keep_runs_s, trust=trust, **pool) as store, _metrics(metrics, cli):
        made = perdure.Worker(
            store,
            functions,
            queues=queues or ("default",),
            concurrency=concurrency,
            all_tenants=all_tenants,
            drain_s=drain.total_seconds(),
        )
        names = sorted(known_durables()) if functions is None else [named.perdure_durable.name]
        cli.out.message(
            f"serving {plural(len(names), 'function')} ({', '.join(names)}) of queue {', '.join(made.queues)}, "
            f"{concurrency} at once; " + ("until nothing is due" if once else "Ctrl-C ends it")
        )
        made.run(until_idle=once)
    counts = dict(sorted(made.counts.items()))
    if cli.out.json:
        cli.out.document(counts)
    else:
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        cli.out.line((summary or "nothing was due", "green" if counts else ""))


@contextmanager
def _metrics(port: int | None, cli: Invocation) -> Iterator[None]:
    if port is None:
        yield
        return
    import perdure

    with perdure.metrics.serve(port) as endpoint:
        cli.out.message(f"metrics at {endpoint.url}")
        yield


class _Lines(logging.Handler):
    """What a worker logs, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"perdure: {printable(record.getMessage())}\n")


def _log_to_stderr(*, as_json: bool) -> None:
    import perdure

    log = logging.getLogger("perdure")
    if as_json:
        perdure.logs.json_lines()
    elif not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines())
        log.setLevel(min(log.level or logging.INFO, logging.INFO))


@command(
    "perdure start app.py:travel --args '[\"Lisbon\"]' --id trip-42\n"
    "perdure start myapp.agents:travel --args Lisbon --queue search"
)
@function_argument
@args_option
@click.option("--id", "run", metavar="ID", help="The run's id (default: the function's name and a random number).")
@click.option("--queue", metavar="NAME", default="default", help="The queue it waits in (default: default).")
@with_store
def start(cli: Invocation, store: Store, target: str, arguments: str, run: str | None, queue: str) -> None:
    """Queue a run of a function for any worker.

    The same --id again gives the same run.
    """
    from perdure.runs.workers.loading import load_named

    given = parse_arguments(arguments)
    check_call(target, given, {}, "--args '[\"NYC\"]'")
    made = store.start(load_named(target), *given, id=run, queue=queue)
    status = made.status
    if cli.out.json:
        cli.out.document({"run": made.id, "status": status})
    else:
        cli.out.line((f"{made.id} is {status}" + (": a worker will run it" if status == "queued" else ""), "green"))
