"""The instruments of the library (counts, times, sizes and trace spans) and the sinks that receive them.

Nothing is measured by default: code that records something tests `metrics.sink`, once, because another thread may
remove it. A record is a number and a few short words from a fixed list. Must never happen here: a label with a value of
a state, an argument, a name or an id. Ids go into spans only, and only if the sink asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Token = Any
NO_LINKS: Mapping[str, str] = {}

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_BYTES = tuple(float(4**power) for power in range(3, 14))  # 64 B to 64 MB
_FEW = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_DB, _ERROR = "db.system.name", "error.type"  # as in OpenTelemetry's conventions for databases


class Instrument(NamedTuple):
    """A counter or a histogram. Names, units and labels follow OpenTelemetry; a counter has no `bounds`."""

    name: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


INSTRUMENTS: list[Instrument] = []


def _new(name: str, unit: str, description: str, *labels: str, bounds: tuple[float, ...] = ()) -> Instrument:
    instrument = Instrument(f"perdure.{name}", unit, description, labels, bounds)
    INSTRUMENTS.append(instrument)
    return instrument


# fmt: off
OPERATION = _new("operation.duration", "s", "Saves and loads; the error's class if it failed, else empty.",
                 "operation", _DB, _ERROR, bounds=_SECONDS)
STATE_BYTES = _new("save.state_size", "By", "Size of the saved states, as text.", _DB, bounds=_BYTES)
STORED_BYTES = _new("save.stored_size", "By", "What the saves wrote: differences and full texts.", _DB, bounds=_BYTES)
COMMIT = _new("commit.duration", "s", "Write transactions, from the first statement to the end of COMMIT.", _DB,
              bounds=_SECONDS)
COMMIT_JOBS = _new("commit.jobs", "{job}", "Writes that shared one commit and its fsync.", _DB, bounds=_FEW)
LOCK_WAIT = _new("lock.wait.duration", "s", "Waits of writers: for this process's queue, for the file lock of other "
                 "processes, for a connection of the pool. A write that did not have to wait is not counted.",
                 _DB, "lock", bounds=_SECONDS)
LOCK_TIMEOUTS = _new("lock.timeouts", "{timeout}", "Waits that were given up with Busy.", _DB)
RETRIES = _new("retries", "{retry}", "Transactions that were run again: a deadlock, a lost connection, a stale plan.",
               _DB, "reason")
RECOVERIES = _new("recoveries", "{recovery}",
                  "Damage that was worked around: a keyframe that was rebuilt, an older checkpoint that stood in.",
                  "kind")
CORRUPTIONS = _new("corruptions", "{corruption}", "Stored data that was not what was saved, where it was met.", "kind")
RUN_EVENTS = _new("run.events", "{event}", "What became of runs: started, resumed, taken_over, in_doubt, and how they "
                  "left this process: done, failed, waiting, stuck …", "event")
RUN_TIME = _new("run.duration", "s", "How long runs were in this process, by how they left it.", "status",
                bounds=_LONG_SECONDS)
STEP_TIME = _new("step.duration", "s", "Calls of the bodies of steps and effects.", "kind", _ERROR,
                 bounds=_LONG_SECONDS)
STEP_RETRIES = _new("step.retries", "{retry}", "Attempts of steps and effects that are made again.")
COMPACTIONS = _new("compactions", "{compaction}", "Compactions of a tenant's data that were finished.")
# fmt: on


class Sink(Protocol):
    """A receiver of measurements. Its methods are called on any thread, must be quick, and must never raise."""

    @property
    def traces(self) -> bool:
        """Whether it has spans."""
        ...

    def record(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Add `value` to a counter, or a measurement to a histogram. `labels`: one word per label of the instrument."""
        ...

    def begin(
        self, name: str, attributes: dict[str, str], ids: dict[str, str], links: Mapping[str, str] = NO_LINKS
    ) -> Token:
        """Begin a span on this thread or task, linked to other spans by what they are to it. Return the token."""
        ...

    def end(self, token: Token, attributes: Mapping[str, str | int], error: BaseException | None) -> None:
        """End the span that `begin` returned."""
        ...

    def span_of(self, token: Token) -> str:
        """Return a span as W3C's traceparent; for None the active one of this thread or task. "" if there is none."""
        ...


sink: Sink | None = None
_sinks: tuple[Sink, ...] = ()
_lock = Lock()


class _Several:
    """A sink that passes each call to all installed sinks."""

    @property
    def traces(self) -> bool:
        return any(each.traces for each in _sinks)

    def record(self, instrument: Instrument, value: float, *labels: str) -> None:
        for each in _sinks:
            each.record(instrument, value, *labels)

    def begin(
        self, name: str, attributes: dict[str, str], ids: dict[str, str], links: Mapping[str, str] = NO_LINKS
    ) -> Token:
        return [(each, each.begin(name, attributes, ids, links)) for each in _sinks]

    def end(self, token: Token, attributes: Mapping[str, str | int], error: BaseException | None) -> None:
        for each, begun in reversed(token):
            each.end(begun, attributes, error)

    def span_of(self, token: Token) -> str:
        if token is None:
            return next(filter(None, (each.span_of(None) for each in _sinks)), "")
        return next(filter(None, (each.span_of(begun) for each, begun in token if begun is not None)), "")


def install(new: Sink) -> None:
    """Add a sink. It receives all later measurements."""
    _set(lambda: (*_sinks, new))


def remove(old: Sink) -> None:
    """Remove a sink. Do nothing if it is not installed."""
    _set(lambda: tuple(known for known in _sinks if known is not old))


def _set(change: Callable[[], tuple[Sink, ...]]) -> None:
    global sink, _sinks
    with _lock:
        _sinks = change()
        sink = None if not _sinks else _sinks[0] if len(_sinks) == 1 else _Several()


def operation(
    name: str,
) -> Callable[[Callable[P, Generator[Any, Any, T]]], Callable[P, Generator[Any, Any, T]]]:
    """Decorate a flow: time it and put a span around it if there is a sink.

    The flow's first parameter is a context or has one as `ctx`. Its second is a thread's name or has one as `name`."""

    def decorate(flow: Callable[P, Generator[Any, Any, T]]) -> Callable[P, Generator[Any, Any, T]]:
        @wraps(flow)
        def measured(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
            running, receiver = flow(*args, **kwargs), sink
            return running if receiver is None else _measured(receiver, name, args, running)

        return measured

    return decorate


def _measured(sink: Sink, name: str, args: tuple[Any, ...], flow: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    with measuring(sink, name, getattr(args[0], "ctx", args[0]).driver, str(getattr(args[1], "name", args[1]))):
        return (yield from flow)


class Outcome:
    """Set `counts` to False to leave an operation out of OPERATION. Failed operations are always recorded."""

    counts = True


@contextmanager
def measuring(sink: Sink, name: str, driver: Any, thread: str) -> Iterator[Outcome]:
    """Time an operation on a thread, and put a span around it."""
    system, outcome = system_of(driver), Outcome()
    token = sink.begin(f"perdure.{name}", {_DB: system}, {"perdure.thread": thread})
    begun = perf_counter()
    failure: BaseException | None = None
    try:
        yield outcome
    except BaseException as error:
        failure, outcome.counts = error, True
        raise
    finally:
        if outcome.counts:
            sink.record(OPERATION, perf_counter() - begun, name, system, error_type(failure))
        sink.end(token, {}, failure)


def system_of(driver: Any) -> str:
    """Return OpenTelemetry's name for a driver's database system."""
    return "postgresql" if driver.dialect == "postgres" else str(driver.dialect)


def error_type(error: BaseException | None) -> str:
    """Return the name of an error's class, or "" for None. Its text is left out, because it may hold data."""
    return "" if error is None else type(error).__name__
