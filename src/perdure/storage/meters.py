"""Where the library says what it does, for whoever wants to measure it: counts, times, sizes, and the spans of traces.

Nobody measures by default. A place that has something to say tests one attribute and goes on:

    if (sink := meters.sink) is not None:  # taken once: another thread may remove it in between
        sink.record(meters.COMPACTIONS, 1)

`prometheus.py` and `otel.py` of `ops/telemetry/` are the sinks, which `metrics.py` there installs. Recorded is a
number and a few short words from a fixed list. Must never happen here: a value of a state, an argument, a name or an id
in a label. Ids go into spans only, and only if the sink asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Token = Any

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_BYTES = tuple(float(4**power) for power in range(3, 14))  # 64 B to 64 MB
_FEW = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Instrument(NamedTuple):
    """Something that is measured. Names, units and labels are those of OpenTelemetry; a counter has no bounds."""

    name: str
    unit: str
    says: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_DB, _ERROR = "db.system.name", "error.type"  # as in OpenTelemetry's conventions for databases

OPERATION = Instrument(
    "perdure.operation.duration",
    "s",
    "Saves and loads: how long the caller waited. The error's class if it failed, else empty.",
    ("operation", _DB, _ERROR),
    _SECONDS,
)
STATE_BYTES = Instrument("perdure.save.state_size", "By", "Size of the saved states, as text.", (_DB,), _BYTES)
STORED_BYTES = Instrument(
    "perdure.save.stored_size", "By", "What the saves wrote: the difference, and now and then the full text.", (_DB,),
    _BYTES,
)  # fmt: skip
RATIO = Instrument(
    "perdure.save.ratio", "1", "Size of a state over what its save wrote.", (_DB,),
    (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0),
)  # fmt: skip
LOADED_BYTES = Instrument("perdure.load.state_size", "By", "Size of the loaded states, as text.", (_DB,), _BYTES)
COMMIT = Instrument(
    "perdure.commit.duration", "s", "Write transactions, from the first statement to the end of COMMIT.", (_DB,),
    _SECONDS,
)  # fmt: skip
COMMIT_JOBS = Instrument("perdure.commit.jobs", "{job}", "Writes that shared one commit and its fsync.", (_DB,), _FEW)
LOCK_WAIT = Instrument(
    "perdure.lock.wait.duration",
    "s",
    "Waits of writers: for this process's queue, for other processes' file lock, for a connection of the pool. "
    "What did not have to wait is not counted.",
    (_DB, "lock"),
    _SECONDS,
)
LOCK_TIMEOUTS = Instrument("perdure.lock.timeouts", "{timeout}", "Waits that were given up with Busy.", (_DB,))
RETRIES = Instrument(
    "perdure.retries", "{retry}", "Transactions that were run again: a deadlock, a lost connection, a stale plan.",
    (_DB, "reason"),
)  # fmt: skip
ROUND_TRIPS = Instrument("perdure.round_trips", "{trip}", "Exchanges with the database server.", (_DB,))
RECOVERIES = Instrument(
    "perdure.recoveries",
    "{recovery}",
    "Damage that was worked around: a keyframe that was rebuilt, an older checkpoint that stood in.",
    ("kind",),
)
CORRUPTIONS = Instrument(
    "perdure.corruptions", "{corruption}", "Stored data that was not what was saved, where it was met.", ("kind",)
)
RUN_EVENTS = Instrument(
    "perdure.run.events",
    "{event}",
    "What became of runs: started, resumed, taken_over, in_doubt, and how they left this process: done, failed, "
    "waiting, stuck …",
    ("event",),
)
RUN_TIME = Instrument(
    "perdure.run.duration", "s", "How long runs were in this process, by how they left it.", ("status",), _LONG_SECONDS
)
STEP_TIME = Instrument(
    "perdure.step.duration", "s", "Calls of the bodies of steps and effects.", ("kind", _ERROR), _LONG_SECONDS
)
STEP_RETRIES = Instrument("perdure.step.retries", "{retry}", "Attempts of steps and effects that are made again.")
COMPACTIONS = Instrument("perdure.compactions", "{compaction}", "Compactions of a tenant's data that were finished.")
COMPACTED = Instrument(
    "perdure.compaction.removed", "{checkpoint}", "Checkpoints that compactions removed, because retention says so."
)
SAVED_BYTES = Instrument("perdure.compaction.saved", "By", "What compactions saved by compressing and packing.")

INSTRUMENTS = (
    OPERATION,
    STATE_BYTES,
    STORED_BYTES,
    RATIO,
    LOADED_BYTES,
    COMMIT,
    COMMIT_JOBS,
    LOCK_WAIT,
    LOCK_TIMEOUTS,
    RETRIES,
    ROUND_TRIPS,
    RECOVERIES,
    CORRUPTIONS,
    RUN_EVENTS,
    RUN_TIME,
    STEP_TIME,
    STEP_RETRIES,
    COMPACTIONS,
    COMPACTED,
    SAVED_BYTES,
)


class Meter(Protocol):
    """Who measures. Called on any thread, in the middle of work: quick, and it never raises."""

    def record(self, what: Instrument, value: float, *labels: str) -> None:
        """A count grew by `value`, or this was measured. `labels`: a word for each of the instrument's."""
        ...

    def begin(self, name: str, attributes: dict[str, str], ids: dict[str, str]) -> Token:
        """A span begins here, around what follows on this thread or task."""
        ...

    def end(self, token: Token, attributes: dict[str, str], error: BaseException | None) -> None:
        """It has ended."""
        ...


sink: Meter | None = None
_meters: list[Meter] = []
_lock = Lock()


class _Several:
    """Tells all of them."""

    def __init__(self, meters: list[Meter]) -> None:
        self._meters = tuple(meters)

    def record(self, what: Instrument, value: float, *labels: str) -> None:
        for meter in self._meters:
            meter.record(what, value, *labels)

    def begin(self, name: str, attributes: dict[str, str], ids: dict[str, str]) -> Token:
        return [(meter, meter.begin(name, attributes, ids)) for meter in self._meters]

    def end(self, token: Token, attributes: dict[str, str], error: BaseException | None) -> None:
        for meter, each in reversed(token):
            meter.end(each, attributes, error)


def install(meter: Meter) -> None:
    """From now on tell this one too."""
    with _lock:
        _meters.append(meter)
        _choose()


def remove(meter: Meter) -> None:
    """Tell it no more. May be called twice."""
    with _lock:
        _meters[:] = [known for known in _meters if known is not meter]
        _choose()


def _choose() -> None:
    global sink
    sink = None if not _meters else _meters[0] if len(_meters) == 1 else _Several(_meters)


SYSTEMS = {"sqlite": "sqlite", "postgres": "postgresql"}  # a driver's dialect, as OpenTelemetry calls it


def operation(
    name: str,
) -> Callable[[Callable[P, Generator[Any, Any, T]]], Callable[P, Generator[Any, Any, T]]]:
    """For a flow whose first parameters are a context, or what has one (`ctx`), and a thread's name, or what has one:
    measured if anybody measures, else the flow itself."""

    def decorate(flow: Callable[P, Generator[Any, Any, T]]) -> Callable[P, Generator[Any, Any, T]]:
        @wraps(flow)
        def measured(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
            made, meter = flow(*args, **kwargs), sink
            return made if meter is None else _measured(meter, name, args, made)

        return measured

    return decorate


def _measured(meter: Meter, name: str, args: tuple[Any, ...], flow: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    system = system_of(getattr(args[0], "ctx", args[0]).driver)
    thread = str(getattr(args[1], "name", args[1]))
    token = meter.begin(f"perdure.{name}", {_DB: system}, {"perdure.thread": thread})
    begun = perf_counter()
    failure: BaseException | None = None
    try:
        return (yield from flow)
    except BaseException as error:
        failure = error
        raise
    finally:
        meter.record(OPERATION, perf_counter() - begun, name, system, error_type(failure))
        meter.end(token, {}, failure)


def system_of(driver: Any) -> str:
    return SYSTEMS.get(driver.dialect, "other_sql")


def error_type(error: BaseException | None) -> str:
    """The class of an error, and nothing of its text: that may hold what nobody may see."""
    return "" if error is None else type(error).__name__
