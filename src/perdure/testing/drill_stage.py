"""Run the agent in the processes that a drill kills, with a stage between the agent and the outside world.

The stage writes effects to a ledger, gives plain steps their results from the rehearsal, and notes changes to the
outside world that are no effects. The ledger is a file to which every process of the drill appends whole lines.
Nothing here decides whether a drill passed.
"""

from __future__ import annotations

import base64
import dis
import functools
import inspect
import json
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import perdure
from perdure.errors import PerdureError
from perdure.ops.store import Store, open_store
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.calls.outcome import Done, NotDone, check_verdict
from perdure.runs.engine import flows
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import NAMING_KEY_BYTES, Execution
from perdure.runs.execution.hooks import Point
from perdure.runs.execution.scope import StepCall, current
from perdure.runs.functions.inputs import annotations_of, digest, is_key
from perdure.runs.functions.specs import StepSpec, every_step, flavour_of, known_durables
from perdure.runs.journal.rows import FINISHED, NEVER
from perdure.runs.run_table import RunRow
from perdure.runs.workers.loading import load_app, load_script
from perdure.runs.workers.worker import Worker
from perdure.storage.program import drive
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec
from perdure.values.safe_repr import shown

_ROUNDS_MAX = 1000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"),
    *("os.symlink", "os.truncate", "shutil.rmtree", "ftplib.connect", "smtplib.send"),
)
_READS = (b"GET ", b"HEAD ", b"OPTIONS ")
# `platform` runs `uname` when a client describes this machine to its server.
_NOT_THE_USERS = (str(Path(perdure.__file__).parent) + os.sep, "<frozen importlib.", platform.__file__)
# The plain step whose body runs, or None. Tasks and threads that copy the context inherit it.
_inside: ContextVar[str | None] = ContextVar("perdure_drill_inside", default=None)
_TOOL_CALL_ID = r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9_-]*"
_codec = Codec()
# A wrapped call: yields the function to call, if any, receives its return value, and returns the result.
Plan = Callable[..., Generator[Callable[[], Any], Any, Any]]


class Ledger:
    """A file of events, one JSON object per line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lives: dict[str, list[str]] = {}  # the lives of each run, by their first event
        for line in read_ledger(path):
            if "body" in line:
                self._number(line["run"], line["life"])

    def body(self, frame: StepCall, name: str) -> str:
        """Note that a body begins, and return its place, which is the same in every trial.

        The place is the child, named by where its parent started it, how often it had started over, and the path.
        """
        row = frame.execution.row
        self.note(body=frame.path, name=name, run=row.id, life=life_of(row))
        return f"{_child_of(row.id)}:{self._number(row.id, life_of(row))}:{frame.path}"

    def _number(self, run: str, life: str) -> int:
        lives = self._lives.setdefault(_child_of(run), [])
        if life not in lives:
            lives.append(life)
        return lives.index(life)

    def note(self, **line: Any) -> None:
        os.write(self._file, json.dumps({"t": time.time(), "pid": os.getpid(), **line}).encode() + b"\n")

    def operation(self, key: str) -> dict[str, Any] | None:
        """Return the line of the effect or undo with this key, or None. The ledger honours keys, as receivers do."""
        for line in read_ledger(self._path):
            if line.get("key") == key and ("effect" in line or "undo" in line) and not line.get("repeat"):
                return line
        return None


def read_ledger(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def life_of(row: RunRow) -> str:
    """Return the id of a run's life: from its start to its end, or until it starts over. Paths are unique in a life."""
    return f"{row.id} {row.incarnation.hex()}"


def _child_of(run: str) -> str:
    """Return which child a run is, without the name of its trial and the number of its parent's life."""
    return re.sub(r"/\d+:", "/", re.sub(r"^(rehearsal|drill-\d+)(?=/|$)", "", run))


class Places:
    """Paths in which numbers stand for the ids of tool calls: a real model chooses other ids in every trial."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}  # in the order in which a process met them, by the path before

    def of(self, path: str) -> str:
        parts = path.split(".")
        for at, part in enumerate(parts):
            if re.fullmatch(_TOOL_CALL_ID, part):
                known = self._ids.setdefault(".".join(parts[:at]), [])
                if part not in known:
                    known.append(part)
                parts[at] = f"#{known.index(part) + 1}"
        return ".".join(parts)


class Stage:
    """Replaces steps, effects and undos, so that the agent does not reach the outside world."""

    def __init__(self, ledger: Ledger, pins: dict[str, str], *, real: bool, results: dict[str, Any], rehearsal: bool):
        self._ledger, self._pins = ledger, pins
        self._real, self._results, self._rehearsal = real, results, rehearsal
        self._bodies: set[CodeType] = set()
        self.unmarked: list[str] = []  # changes to the outside world that are no effects

    def install(self, reached: Callable[[Point], None]) -> None:
        for durable in known_durables().values():
            self._bodies |= _codes(durable.fn)
        for spec in every_step():
            self._bodies |= _codes(spec.fn)
            self._replace(spec)
        hooks.hook = reached
        Execution.shared_naming_key = bytes(NAMING_KEY_BYTES)  # paths of tasks are the same in every trial
        if self._rehearsal:
            sys.addaudithook(self._audit)

    def _replace(self, spec: StepSpec) -> None:
        spec.binder.plan  # noqa: B018 - computed and cached while the function is still the user's
        plan = self._effect(spec, spec.body) if spec.kind == "effect" else self._step(spec, spec.body)
        spec.body = spec.fn = functools.wraps(spec.fn)(_wrapped(plan, spec.is_async))
        spec.flavour = "async" if spec.is_async else "sync"
        if spec.reconcile is not None:
            spec.reconcile = self._looked(spec, spec.reconcile)
        if spec.undo is not None and not isinstance(getattr(spec.undo, "perdure", None), StepSpec):
            spec.undo = self._undo(spec, spec.undo)  # an undo that is an effect is replaced as an effect

    def _step(self, spec: StepSpec, body: Callable[..., Any]) -> Plan:
        def plan(*args: Any, **kwargs: Any) -> Generator[Callable[[], Any], Any, Any]:
            frame, pin = _frame(), ""
            if frame is not None:  # None: called with `.direct`, without the journal
                pin = f"{spec.name}@{self._ledger.body(frame, spec.name)}@{_input(spec, args, kwargs)}"
            if pin in self._pins and not self._rehearsal and not self._real:
                return decode(base64.b64decode(self._pins[pin]), _codec)
            token = _inside.set(_inside.get() if frame is None or frame.spec.kind == "effect" else spec.name)
            try:
                result = yield functools.partial(body, *args, **kwargs)
            finally:
                _inside.reset(token)
            if pin and self._rehearsal:
                try:
                    self._pins[pin] = base64.b64encode(encode(result, _codec)).decode()
                except Exception:  # not storable: the run itself raises for it
                    pass
            return result

        return plan

    def _effect(self, spec: StepSpec, body: Callable[..., Any]) -> Plan:
        def plan(*args: Any, **kwargs: Any) -> Generator[Callable[[], Any], Any, Any]:
            result = self._done(spec, args, kwargs, body)
            return (yield functools.partial(body, *args, **kwargs)) if self._real else result

        return plan

    def _done(self, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], body: Callable[..., Any]) -> Any:
        """Note that an effect is done, and return the answer of the stage's own receiver."""
        frame = _frame()
        bound = _input(spec, args, kwargs)
        if frame is None:  # `.direct` in a run: done again whenever the run is resumed
            self._ledger.note(effect=spec.name, path="", key="", input=bound, protected=False)
            return self._result(spec, "")
        self._ledger.body(frame, spec.name)
        # An undo that is repeated without a key cancels twice, even if the receiver honours keys.
        judged = self._real or frame.path.startswith("undo:")
        key = spec.binder.plan.key
        protected = not judged or spec.reconcile is not None or _uses(body, () if key is None else (key,))
        repeat = protected and not self._real and self._ledger.operation(str(frame.key)) is not None
        facts = {"effect": spec.name, "path": frame.path, "key": str(frame.key), "input": bound}
        self._ledger.note(**facts, repeat=repeat, protected=protected)
        return self._result(spec, frame.path)

    def _looked(self, spec: StepSpec, reconcile: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the user's reconcile, which must not fail. With real effects its verdict counts, else the ledger's."""

        def plan(*args: Any, **kwargs: Any) -> Generator[Callable[[], Any], Any, Any]:
            try:
                verdict = yield functools.partial(reconcile, *args, **kwargs)
                check_verdict(verdict)
            except Exception as error:
                self._ledger.note(reconcile=spec.name, raised=f"{type(error).__name__}: {error}")
                raise
            frame = _frame()
            line = None if frame is None else self._ledger.operation(str(frame.key))
            return verdict if self._real else NotDone() if line is None else Done(self._answer(line))

        return functools.wraps(reconcile)(_wrapped(plan, flavour_of(reconcile) == "async"))

    def verdict(self, key: str) -> dict[str, Any]:
        """Return the verdict on an effect in doubt, according to the ledger, as arguments of `resolve`."""
        line = self._ledger.operation(key)
        return {"not_done": True} if line is None else {"done": self._answer(line)}

    def _answer(self, line: dict[str, Any]) -> Any:
        if "undo" in line:
            return None
        spec = next(spec for spec in every_step() if spec.kind == "effect" and spec.name == line["effect"])
        return self._result(spec, line["path"])

    def _result(self, spec: StepSpec, path: str) -> Any:
        if spec.name in self._results:
            return self._results[spec.name]
        annotation = str(spec.binder.signature.return_annotation)
        for kind, value in (("int", 1), ("float", 1.0), ("bool", True), ("dict", {}), ("list", []), ("None", None)):
            if annotation in (kind, f"<class '{kind}'>") or annotation.startswith(f"{kind}["):
                return value
        return f"{spec.name}#{path}"

    def _undo(self, spec: StepSpec, undo: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a plain function as undo: note it in the ledger, and call it only with real effects."""
        keys = tuple(name for name, annotation in annotations_of(undo).items() if is_key(annotation))
        protected = _uses(undo, keys)

        def plan(*args: Any, **kwargs: Any) -> Generator[Callable[[], Any], Any, Any]:
            frame = _frame()
            if frame is not None:
                self._ledger.note(undo=spec.name, path=frame.path, key=str(frame.key), protected=protected)
            return (yield functools.partial(undo, *args, **kwargs)) if self._real else None

        return functools.wraps(undo)(_wrapped(plan, flavour_of(undo) == "async"))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        act = _change(event, args) if event in ("open", "http.client.send") or event in _CHANGES else ""
        step, scope = _inside.get(), current.get()
        if not act or (step is None and (scope is None or scope.body is not None)):  # not in the run, or in an effect
            return
        if not self._is_the_users(sys._getframe(1)):
            return
        if step is not None:
            line = f"{step}: {act}"
        else:
            assert scope is not None
            line = f"{scope.execution.row.function} itself: {act}: put it into an effect"
        if line not in self.unmarked:
            self.unmarked.append(line)

    def _is_the_users(self, frame: FrameType | None) -> bool:
        """Return whether the user's code is at work, and not Perdure (its store, its driver) or an import."""
        events = sys.modules.get("asyncio.events")
        while frame is not None:
            code = frame.f_code
            # A callback of an event loop belongs to the user or a library: Perdure's own have a frame of Perdure first.
            if code in self._bodies or (events is not None and code is events.Handle._run.__code__):
                return True
            if code.co_filename.startswith(_NOT_THE_USERS):
                return False
            frame = frame.f_back
        return True  # a thread that the user's code started


def _wrapped(plan: Plan, is_async: bool) -> Callable[..., Any]:
    async def awrapper(*args: Any, **kwargs: Any) -> Any:
        flow = plan(*args, **kwargs)
        try:
            call = next(flow)
            try:
                result = (await call()) if is_async else call()
            except BaseException as error:
                flow.throw(error)
                raise
            flow.send(result)
        except StopIteration as stop:
            return stop.value

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            awrapper(*args, **kwargs).send(None)  # it awaits nothing, and ends at once
        except StopIteration as stop:
            return stop.value

    return awrapper if is_async else wrapper


def _codes(fn: Callable[..., Any]) -> set[CodeType]:
    return {function.__code__ for function in (fn, inspect.unwrap(fn)) if hasattr(function, "__code__")}


def _change(event: str, args: tuple[Any, ...]) -> str:
    """Describe the change that an audit event makes to the outside world; return "" if it only reads."""
    if event == "http.client.send":
        data = bytes(args[1][:2000]) if isinstance(args[1], bytes | bytearray | memoryview) else b""
        first = data.split(b"\r\n", 1)[0]
        if first.endswith((b"HTTP/1.1", b"HTTP/1.0")) and not first.startswith(_READS):
            return f"sends {first.split(b'?')[0].decode(errors='replace')[:60]}"
        return ""
    if event == "open":
        path, flags = str(args[0]), args[2] if isinstance(args[2], int) else 0
        return f"writes {path}" if flags & _WRITES and path != os.devnull and not path.isdecimal() else ""
    return f"does {event}"


def _frame() -> StepCall | None:
    """Return the running step or effect, or None if it was called without the journal."""
    scope = current.get()
    return None if scope is None else scope.body


def _input(spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        return digest(spec.binder.text(args, kwargs, Codec())).hex()
    except Exception:  # the input only makes a pin's name unique
        return ""


def _uses(body: Callable[..., Any], parameters: tuple[str, ...]) -> bool:
    """Return whether a function uses one of these parameters, `effect_key`, or `idempotency_key`."""
    code = getattr(inspect.unwrap(body), "__code__", None)
    if code is None:
        return True
    names = (*parameters, "effect_key")
    for instruction in dis.get_instructions(code):
        named = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "idempotency_key" in named or ("LOAD" in instruction.opname and any(name in names for name in named)):
            return True
    return any(name in code.co_cellvars for name in names)


# --- the process


def play(say: Any, plan: dict[str, Any]) -> None:
    """Run or resume the agent, and report its points and its end with `say`. The plan may make it kill itself."""
    begun = time.monotonic()
    rehearsal = bool(plan.get("rehearsal"))
    try:
        load = load_script if plan.get("as_script") else load_app
        function = durable_spec(getattr(load(plan["app"]), plan["function"])).fn
    except (AttributeError, PerdureError) as error:
        say({"end": "refused", "why": str(error)})
        return
    ledger = Ledger(plan["ledger"])
    pins = {} if rehearsal else json.loads(Path(plan["pins"]).read_text())
    stage = Stage(ledger, pins, real=plan["real"], results=plan["results"], rehearsal=rehearsal)
    live: list[float] = []
    places = Places()

    def reached(point: Point) -> None:
        place = point._replace(path=places.of(point.path)) if plan["real"] else point
        if point.kind == "done" and point.when == "after":
            ledger.note(recorded=point.path)
        if rehearsal:
            say({"point": list(place)})
        if point.kind in ("body", "intent") and not live:
            live.append(time.monotonic() - begun)
            say({"live": live[0]})
        if list(place) == plan.get("kill"):
            _kill(ledger, str(point))

    stage.install(reached)
    if (after_s := plan.get("kill_after_s")) is not None:
        timer = threading.Timer(after_s, _kill, (ledger, f"after {after_s:.4f} s"))
        timer.daemon = True
        timer.start()
    # Each trial has its own tenant, so that ids that the agent chooses do not clash.
    with open_store(plan["store"], tenant=plan["run"], lease_s=plan.get("lease_s", 5.0)) as store:
        if plan.get("worker"):
            Worker(store, poll_s=0.05, concurrency=2).run()
            return
        ready = time.monotonic()
        end = _to_the_end(store, function, plan, stage)
        say({**end, "took": time.monotonic() - ready})
    if rehearsal:
        Path(plan["pins"]).write_text(json.dumps(pins))
        say({"unmarked": stage.unmarked})


def _kill(ledger: Ledger, when: str) -> None:
    ledger.note(kill=when)
    os.kill(os.getpid(), signal.SIGKILL)


def _to_the_end(store: Store, function: Any, plan: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Resume the run and answer its questions until it ends or cannot continue."""
    for _ in range(_ROUNDS_MAX):
        info = store.run(function, *plan["args"], id=plan["run"], **plan["kwargs"]).refresh()
        if info.status in FINISHED:
            break
        family = family_of(store, plan["run"])
        stuck = [row.id for row in family if row.status == "stuck"]
        if stuck:
            return {"end": "stuck", "why": getattr(store.get_run(stuck[0]).refresh().waiting_for, "text", None)}
        if not help_on(store, plan["run"], plan["answers"], stage):
            sleeping = [row for row in family if row.status == "waiting" and row.wake_at < NEVER]
            if not sleeping:
                return {"end": info.status, "why": str(info.waiting_for)}
            first = min(sleeping, key=lambda row: row.wake_at)
            now_us = store._context.clock_us() + Execution.ahead_us
            Execution.ahead_us += max(0, first.wake_at - now_us) + 1000
            store.get_run(first.id).resume()
    return outcome(store, plan["run"])


def family_of(store: Store, run_id: str) -> list[RunRow]:
    """Return a run with all its descendants."""
    return drive(store._context.driver, flows.whole_family(store._context, run_id))


def outcome(store: Store, run_id: str) -> dict[str, Any]:
    """Return how a run ended, in a form that can be compared between runs."""
    run = store.get_run(run_id)
    status = run.status
    try:
        result = run._raw_result()
        text = base64.b64encode(encode(result, store._context.codec)).decode()
        return {"end": status, "result": text, "shown": shown(result, 200)}
    except PerdureError as error:
        return {"end": status, "result": type(error).__name__, "shown": str(error).replace(run_id, "RUN")[:300]}


def help_on(store: Store, run_id: str, answers: dict[str, Any], stage: Stage) -> bool:
    """Answer the open questions of a run and its children, and settle doubts by the ledger. Return False if none."""
    open_runs = [row.id for row in family_of(store, run_id) if row.status not in FINISHED]
    questions = [question for run in open_runs for question in store.questions(run)]
    for question in questions:
        if question.kind == "doubt":
            store.get_run(question.run).resolve(str(question.step), **stage.verdict(str(question.key)))
            continue
        for name in (question.approvers or ["drill"])[: question.quorum]:
            store.answer(question.run, _answer(question, answers), step=question.path, who=name)
    return bool(questions)


def _answer(question: Any, answers: dict[str, Any]) -> Any:
    for name in (question.path, question.text):
        if name in answers:
            return answers[name]
    schema = question.schema or {}
    if options := question.options or schema.get("enum"):
        return options[0]
    kind = str(schema.get("type", "string"))
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(kind, "drill")
