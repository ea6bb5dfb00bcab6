"""`perdure worker`: runs what is due, with the functions of an app, until it is told to stop. `perdure start` queues
a run for it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import perdure
from perdure import Store
from perdure.cli import drilling
from perdure.cli.command import Command, count
from perdure.cli.looking import sqlite_file
from perdure.cli.opening import open_existing
from perdure.cli.readable import plural, printable
from perdure.cli.render import Output
from perdure.errors import UsageError
from perdure.runs.workers.loading import load_named

OK = 0
_SPARE_CONNECTIONS = 3  # for claiming, for leases, and for one more
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


def _duration(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    if unit not in _SECONDS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 45s, 30m, 2h, 3d or 1w")
    return float(int(number) * _SECONDS[unit])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app", metavar="APP", help="where the functions are: app.py, myapp.agents, or app.py:travel for only one"
    )
    parser.add_argument(
        "--trust",
        metavar="PREFIX",
        action="append",
        default=[],
        help="modules whose data classes may be loaded, such as myapp. (may be given again)",
    )
    parser.add_argument(
        "--queue", metavar="NAME", action="append", help="serve this queue; may be given again (default: default)"
    )
    parser.add_argument("--concurrency", metavar="N", type=_count, default=8, help="runs at once (default 8)")
    parser.add_argument("--all-tenants", action="store_true", help="serve all tenants, not only --tenant's")
    parser.add_argument("--once", action="store_true", help="end when nothing is due")
    parser.add_argument(
        "--drain", metavar="TIME", type=_duration, default=30.0, help="how long runs may go on after SIGTERM (30s)"
    )
    parser.add_argument(
        "--metrics", metavar="PORT", type=count, help="show metrics for Prometheus at http://127.0.0.1:PORT/metrics"
    )
    parser.add_argument("--log-json", action="store_true", help="log as JSON, an object per line")
    parser.add_argument(
        "--keep-runs", metavar="TIME", type=_duration, help="how long finished runs keep their journals (30d; for ever)"
    )


def worker(args: argparse.Namespace, _store: None, out: Output) -> int:
    from perdure.runs.functions.specs import known_durables

    if args.all_tenants and args.tenant is not None:
        raise UsageError("--all-tenants and --tenant: one of them")
    named = load_named(args.app)
    functions: list[Callable[..., Any]] | None = None
    if hasattr(named, "perdure_durable"):
        functions = [named]
    elif callable(named):
        raise UsageError(f"{args.app} is not a durable function: put @perdure.durable above it")
    elif not known_durables():
        raise UsageError(f"{args.app} has no durable function: put @perdure.durable above what runs are made of")
    _log_to_stderr(as_json=args.log_json)
    with _open(args) as store, _metrics(args.metrics, out):
        made = perdure.Worker(
            store,
            functions,
            queues=args.queue or ("default",),
            concurrency=args.concurrency,
            all_tenants=args.all_tenants,
            drain_s=args.drain,
        )
        names = sorted(known_durables()) if functions is None else [named.perdure_durable.name]
        out.message(
            f"serving {plural(len(names), 'function')} ({', '.join(names)}) of queue {', '.join(made.queues)}, "
            f"{args.concurrency} at once; " + ("until nothing is due" if args.once else "Ctrl-C ends it")
        )
        made.run(until_idle=args.once)
    if out.json:
        out.document(dict(sorted(made.counts.items())))
    else:
        said = ", ".join(f"{count} {status}" for status, count in sorted(made.counts.items()))
        out.line((said or "nothing was due", "green" if made.counts else ""))
    return OK


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="APP:FUNCTION", help="app.py:travel or myapp.agents:travel")
    parser.add_argument(
        "--args", metavar="JSON", default="[]", help="its arguments: a JSON list, or the only one as JSON or text"
    )
    parser.add_argument("--id", metavar="ID", help="the run's id (default: the function's name and a random number)")
    parser.add_argument("--queue", metavar="NAME", default="default", help="the queue it waits in (default: default)")


def start(args: argparse.Namespace, store: Store, out: Output) -> int:
    given = drilling.arguments_of(args.args)
    drilling.check_call(args.function, given, {}, "--args '[\"NYC\"]'")
    run = store.start(load_named(args.function), *given, id=args.id, queue=args.queue)
    status = run.status
    if out.json:
        out.document({"run": run.id, "status": status})
    else:
        out.line((f"{run.id} is {status}" + (": a worker will run it" if status == "queued" else ""), "green"))
    return OK


@contextmanager
def _metrics(port: int | None, out: Output) -> Iterator[None]:
    if port is None:
        yield
        return
    with perdure.metrics.serve(port) as endpoint:
        out.message(f"metrics at {endpoint.url}")
        yield


def _open(args: argparse.Namespace) -> Store:
    is_file = sqlite_file(args.store) is not None
    options: dict[str, Any] = {} if is_file else {"pool_size": args.concurrency + _SPARE_CONNECTIONS}
    return open_existing(args, keep_runs_s=args.keep_runs, trust=args.trust, **options)


class _Lines(logging.Handler):
    """What a worker logs, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"perdure: {printable(record.getMessage())}\n")


def _log_to_stderr(*, as_json: bool) -> None:
    log = logging.getLogger("perdure")
    if as_json:
        perdure.logs.json_lines()
    elif not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines())
        log.setLevel(min(log.level or logging.INFO, logging.INFO))


WORKER = Command(
    "run what is due, with the functions of an app",
    "Until SIGTERM or Ctrl-C: then its runs\nfinish, park, or are given back, and a second signal gives them back at "
    "once. Several workers may\nserve one store. Runs of a function "
    "with a version= are taken only by code that gives the same.",
    "  perdure worker app.py\n  perdure worker myapp.agents --queue search --queue default --concurrency 32\n"
    "  perdure worker app.py --once",
    arguments,
    worker,
    opens=False,
)
START = Command(
    "queue a run of a function for any worker",
    "The same --id again gives the same run.",
    "  perdure start app.py:travel --args '[\"Lisbon\"]' --id trip-42\n"
    "  perdure start myapp.agents:travel --args Lisbon --queue search",
    _start_arguments,
    start,
)
