"""The stage of a drill, inside the process that is killed: effects go to a ledger, plain results are pinned, and what
touches the outside world without being marked as an effect is noted.

The ledger is a file that every process of the drill appends to; a line is one write, so that a kill never leaves half
of one. Nothing here decides whether a drill passed.
"""

from __future__ import annotations

import base64
import dis
import functools
import inspect
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import aclosing, closing
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import perdure
from perdure.runs.calls.outcome import Done, NotDone, check_verdict
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point
from perdure.runs.execution.scope import BodyFrame, current
from perdure.runs.functions.inputs import annotations_of, digest, is_key
from perdure.runs.functions.specs import StepSpec, every_step, flavour_of, known_durables
from perdure.runs.journal.rows import RunRow
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    [
        "subprocess.Popen",
        "os.system",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "shutil.rmtree",
        "ftplib.connect",
        "smtplib.send",
    ]
)
_TALKS = frozenset(("socket.connect", "socket.sendto", "sqlite3.connect"))
_EVENTS = _CHANGES | _TALKS | {"open", "http.client.send"}
_READS = (b"GET ", b"HEAD ", b"OPTIONS ")
_KEY_CALLS = ("idempotency_key", "current_key")
_OURS = str(Path(perdure.__file__).parent) + os.sep
_LIBRARY = (
    "<",
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
    f"{Path(os.__file__).parent}/",
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_IMPORTS = "<frozen importlib."
# The plain step whose body runs; None elsewhere. Tasks and threads that copy the context have it too.
_inside: ContextVar[str | None] = ContextVar("perdure_drill_inside", default=None)


class Ledger:
    """What happened, as lines of JSON in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lives: dict[str, list[str]] = {}  # of each run, in the order in which something was first done in them
        for line in self.lines():
            if "body" in line:
                self._execute_run(line["run"], line["life"])

    def body(self, frame: BodyFrame, name: str) -> str:
        """Note that a body begins; gives its place, which is the same in every trial: the child, named by where its
        parent started it, how often it had begun anew, and the path."""
        row = frame.scope.execution.row
        run, life = row.id, life_of(row)
        self.note(body=frame.path, name=name, run=run, life=life)
        return f"{_child_of(run)}:{self._execute_run(run, life)}:{frame.path}"

    def _execute_run(self, run: str, life: str) -> int:
        lives = self._lives.setdefault(_child_of(run), [])
        if life not in lives:
            lives.append(life)
        return lives.index(life)

    def note(self, **line: Any) -> None:
        os.write(self._file, json.dumps({"t": time.time(), "pid": os.getpid(), **line}).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]]:
        return read_ledger(self._path)


def read_ledger(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def life_of(row: RunRow) -> str:
    """A run from its beginning to its end, or to where it begins anew: what paths belong to."""
    return f"{row.id} {row.incarnation.hex()}"


def _child_of(run: str) -> str:
    """Which child a run is, whatever its trial is called and whatever its parent's number was when it began anew."""
    return re.sub(r"/\d+:", "/", re.sub(r"^(rehearsal|drill-\d+)(?=/|$)", "", run))


class _Played:
    """One call of a plain step: what the undisturbed run had for it, and while it is entered, the step's name."""

    def __init__(
        self, ledger: Ledger, pins: dict[str, str] | None, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """`pins` None: nothing is looked up or kept."""
        frame = _frame()  # None: called past the journal, by `.direct`
        self._before = _inside.get()
        self._name = self._before if frame is None or frame.is_effect else spec.name
        self._pins = pins
        self._pin = ""
        self.known: list[Any] = []
        if frame is None:
            self._pins = None
            return
        self._pin = f"{spec.name}@{ledger.body(frame, spec.name)}@{_input(spec, args, kwargs)}"
        if pins is not None and self._pin in pins:
            self.known.append(decode(base64.b64decode(pins[self._pin]), _codec))

    def __enter__(self) -> None:
        self._before = _inside.get()
        _inside.set(self._name)

    def __exit__(self, *_: object) -> None:
        _inside.set(self._before)

    def keep(self, result: Any) -> None:
        if self._pins is None:
            return
        try:
            self._pins[self._pin] = base64.b64encode(encode(result, _codec)).decode()
        except Exception:  # not storable: the run itself says so
            pass


_codec = Codec()


class Stage:
    """Stands between the agent and the world."""

    def __init__(self, ledger: Ledger, pins: dict[str, str], *, real: bool, results: dict[str, Any], rehearsal: bool):
        self._ledger = ledger
        self._pins = pins
        self._real = real
        self._results = results
        self._rehearsal = rehearsal
        self._bodies: set[CodeType] = set()
        self.listeners: list[Callable[[Point], None]] = []
        self.found: list[str] = []  # effects that nobody marked
        self.notes: list[str] = []  # what may be one: nobody can tell from outside

    def install(self) -> None:
        for durable in known_durables().values():
            self._bodies |= _codes(durable.fn)
        for spec in every_step():
            self._bodies |= _codes(spec.fn)
            self._replace(spec)
        hooks.hook = self._reached
        if self._rehearsal:
            sys.addaudithook(self._audit)

    # --- steps and effects

    def _replace(self, spec: StepSpec) -> None:
        spec.binder.plan, spec.flavour  # noqa: B018 - taken from the function while it is still the user's
        body = spec.fn
        made = self._as_effect(spec, body) if spec.kind == "effect" else self._as_step(spec, body)
        spec.fn = functools.wraps(body)(made)
        if spec.reconcile is not None:
            spec.reconcile = self._looked(spec, spec.reconcile)
        if spec.undo is not None and not isinstance(getattr(spec.undo, "perdure", None), StepSpec):
            spec.undo = self._undo(spec, spec.undo)  # one that is an effect is replaced as such

    def _as_step(self, spec: StepSpec, body: Callable[..., Any]) -> Callable[..., Any]:
        ledger, pins = self._ledger, None if self._real else self._pins

        def made(*args: Any, **kwargs: Any) -> Any:
            call = _Played(ledger, pins, spec, args, kwargs)
            if call.known and not self._rehearsal:
                return call.known[0]
            with call:
                result = body(*args, **kwargs)
            call.keep(result)
            return result

        async def amade(*args: Any, **kwargs: Any) -> Any:
            call = _Played(ledger, pins, spec, args, kwargs)
            if call.known and not self._rehearsal:
                return call.known[0]
            with call:
                result = await body(*args, **kwargs)
            call.keep(result)
            return result

        def generated(*args: Any, **kwargs: Any) -> Any:
            call = _Played(ledger, pins, spec, args, kwargs)
            if call.known and not self._rehearsal:
                yield from call.known[0][0]
                return call.known[0][1]
            chunks: list[Any] = []
            with closing(body(*args, **kwargs)) as inner:
                while True:
                    try:
                        with call:  # not across the yield: what comes between is not the step's
                            chunk = next(inner)
                    except StopIteration as stop:
                        call.keep([chunks, stop.value])
                        return stop.value
                    chunks.append(chunk)
                    yield chunk

        async def agenerated(*args: Any, **kwargs: Any) -> Any:
            call = _Played(ledger, pins, spec, args, kwargs)
            if call.known and not self._rehearsal:
                for chunk in call.known[0]:
                    yield chunk
                return
            chunks: list[Any] = []
            async with aclosing(body(*args, **kwargs)) as inner:
                while True:
                    try:
                        with call:
                            chunk = await anext(inner)
                    except StopAsyncIteration:
                        break
                    chunks.append(chunk)
                    yield chunk
            call.keep(chunks)

        choice: dict[str, Callable[..., Any]] = {"sync": made, "async": amade, "generator": generated}
        return choice.get(spec.flavour, agenerated)

    def _as_effect(self, spec: StepSpec, body: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            told = self._done(spec, body, args, kwargs)
            return body(*args, **kwargs) if self._real else told

        async def amade(*args: Any, **kwargs: Any) -> Any:
            told = self._done(spec, body, args, kwargs)
            return await body(*args, **kwargs) if self._real else told

        def generated(*args: Any, **kwargs: Any) -> Any:
            told = self._done(spec, body, args, kwargs)
            if self._real:
                told = yield from body(*args, **kwargs)
            return told

        async def agenerated(*args: Any, **kwargs: Any) -> Any:
            told = self._done(spec, body, args, kwargs)
            if not self._real:
                for chunk in told if isinstance(told, list) else [told]:
                    yield chunk
                return
            async with aclosing(body(*args, **kwargs)) as inner:
                async for chunk in inner:
                    yield chunk

        choice: dict[str, Callable[..., Any]] = {"sync": made, "async": amade, "generator": generated}
        return choice.get(spec.flavour, agenerated)

    def _done(self, spec: StepSpec, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write down that an effect is done; gives what the stage's own receiver answers."""
        frame = _frame()
        given = _input(spec, args, kwargs)
        if frame is None:  # `.direct` in a run: done again whenever the run goes on
            self._ledger.note(effect=spec.name, path="", key="", input=given, protected=False)
            return self._result(spec, "")
        self._ledger.body(frame, spec.name)
        # An undo that is repeated without a key cancels twice, whatever the receiver honours.
        protected = _uses_key(spec, body) if self._real or frame.path.startswith("undo:") else True
        repeat = protected and not self._real and self._operation(str(frame.key)) is not None
        what = {"effect": spec.name, "path": frame.path, "key": str(frame.key), "input": given}
        self._ledger.note(**what, repeat=repeat, protected=protected)
        return self._result(spec, frame.path)

    def _operation(self, key: str) -> dict[str, Any] | None:
        """The line of an effect that was done under this key: the ledger honours keys, as a good receiver does."""
        for line in self._ledger.lines():
            if line.get("key") == key and ("effect" in line or "undo" in line) and not line.get("repeat"):
                return line
        return None

    def _looked(self, spec: StepSpec, reconcile: Callable[..., Any]) -> Callable[..., Any]:
        """The user's reconcile, which only looks and must not fail. Real effects have its word, others the ledger's."""

        def judged(said: Any) -> Any:
            frame = _frame()
            line = None if frame is None else self._operation(str(frame.key))
            check_verdict(said)
            return said if self._real else NotDone() if line is None else Done(self._answered(line))

        def failed(error: Exception) -> None:
            self._ledger.note(reconcile=spec.name, raised=f"{type(error).__name__}: {error}")

        def look(*args: Any, **kwargs: Any) -> Any:
            try:
                return judged(reconcile(*args, **kwargs))
            except Exception as error:
                failed(error)
                raise

        async def alook(*args: Any, **kwargs: Any) -> Any:
            try:
                return judged(await reconcile(*args, **kwargs))
            except Exception as error:
                failed(error)
                raise

        return functools.wraps(reconcile)(alook if flavour_of(reconcile) == "async" else look)

    def verdict(self, key: str) -> dict[str, Any]:
        """What a person who looked at the ledger would say of an effect in doubt."""
        line = self._operation(key)
        return {"not_done": True} if line is None else {"done": self._answered(line)}

    def _answered(self, line: dict[str, Any]) -> Any:
        if "undo" in line:
            return None
        spec = next(spec for spec in every_step() if spec.kind == "effect" and spec.name == line["effect"])
        return self._result(spec, line["path"])

    def _result(self, spec: StepSpec, path: str) -> Any:
        if spec.name in self._results:
            return self._results[spec.name]
        wanted = str(spec.binder.signature.return_annotation)
        for kind, value in (("int", 1), ("float", 1.0), ("bool", True), ("dict", {}), ("list", []), ("None", None)):
            if wanted in (kind, f"<class '{kind}'>") or wanted.startswith(f"{kind}["):
                return value
        return f"{spec.name}#{path}"

    def _undo(self, spec: StepSpec, undo: Callable[..., Any]) -> Callable[..., Any]:
        """A plain function as undo: to the ledger, and with real effects to the world."""
        keys = tuple(name for name, annotation in annotations_of(undo).items() if is_key(annotation))
        protected = _names(undo, keys)

        def taken_back(*args: Any, **kwargs: Any) -> Any:
            frame = _frame()
            if frame is not None:
                self._ledger.note(undo=spec.name, path=frame.path, key=str(frame.key), protected=protected)
            return undo(*args, **kwargs) if self._real else None

        async def ataken_back(*args: Any, **kwargs: Any) -> Any:
            found = taken_back(*args, **kwargs)
            return await found if self._real else None

        return functools.wraps(undo)(ataken_back if flavour_of(undo) == "async" else taken_back)

    # --- points

    def _reached(self, point: Point) -> None:
        if point.kind == "done" and point.when == "after":
            self._ledger.note(recorded=point.path)
        for listener in self.listeners:
            listener(point)

    # --- what nobody marked

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        step, scope = _inside.get(), current.get()
        if step is None and (scope is None or scope.body is not None):  # not in the run, or in an effect
            return
        said = _outside(event, args)
        talks = "" if said else _talks(event, args)
        if not (said or talks) or not self._is_the_users(sys._getframe(1)):
            return
        if talks and event == "socket.connect" and _by_http_client(sys._getframe(1)):
            return  # its requests are judged one by one
        if step is not None:
            line = f"{step}: {said or talks}"
            line += " by itself: if that changes something there, mark it as an effect" if talks else ""
        else:
            assert scope is not None
            line = f"{scope.execution.row.function} itself: {said or talks}: put it into "
            line += "a step, or into an effect if that changes something there" if talks else "an effect"
        known = self.found if said else self.notes
        if line not in known:
            known.append(line)

    def _is_the_users(self, frame: FrameType | None) -> bool:
        """Whether the user's code does this, and not Perdure (its store, its database's driver) or an import."""
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if code in self._bodies:
                return True
            if file.startswith((_OURS, _IMPORTS)):
                return False
            if code is _loop_runs():  # a task of a library's own: Perdure's have no scope, or a frame of ours
                return True
            if not (file.startswith(_LIBRARY) or any(part in file for part in _INSTALLED)):
                return True
            frame = frame.f_back
        return True  # a thread that a library began in the run's context


def _codes(fn: Callable[..., Any]) -> set[CodeType]:
    return {made.__code__ for made in (fn, inspect.unwrap(fn)) if hasattr(made, "__code__")}


def _loop_runs() -> CodeType | None:
    """The code that calls the callbacks of an event loop, if there may be one."""
    events = sys.modules.get("asyncio.events")
    return None if events is None else events.Handle._run.__code__


def _by_http_client(frame: FrameType | None) -> bool:
    client = sys.modules.get("http.client")
    while frame is not None and client is not None:
        if isinstance(frame.f_locals.get("self"), client.HTTPConnection):
            return True
        frame = frame.f_back
    return False


def _talks(event: str, args: tuple[Any, ...]) -> str:
    """What an audit event may do to the outside world."""
    if event == "sqlite3.connect":
        return "" if str(args[0]) in (":memory:", "") else f"opens the database {args[0]}"
    if event not in _TALKS:
        return ""
    address = args[1]
    if isinstance(address, tuple) and len(address) > 1:
        host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
        return f"talks to {host}:{address[1]}"
    return f"talks to {os.fsdecode(address) if isinstance(address, bytes | str) else address}"


def _outside(event: str, args: tuple[Any, ...]) -> str:
    """What an audit event does to the outside world; "" for what only looks."""
    if event == "http.client.send":
        data = bytes(args[1][:2000]) if isinstance(args[1], bytes | bytearray | memoryview) else b""
        first = data.split(b"\r\n", 1)[0]
        if first.endswith((b"HTTP/1.1", b"HTTP/1.0")) and not first.startswith(_READS):
            return f"sends {first.split(b'?')[0].decode(errors='replace')[:60]}"
        return ""
    if event == "open":
        path, flags = str(args[0]), args[2] if isinstance(args[2], int) else 0
        return f"writes {path}" if flags & _WRITES and path != os.devnull and not path.isdecimal() else ""
    return f"does {event}" if event in _CHANGES else ""


def _frame() -> BodyFrame | None:
    """The step or effect that runs; None if it was called past the journal."""
    scope = current.get()
    return None if scope is None else scope.body


def _input(spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        bound = spec.binder.bind(args, kwargs)
        return digest(spec.binder.text(bound, Codec())).hex()
    except Exception:  # only a name for a pin
        return ""


def _uses_key(spec: StepSpec, body: Callable[..., Any]) -> bool:
    """Whether an effect does anything with its key, or can look up what became of it."""
    parameter = spec.binder.key_parameter
    return spec.reconcile is not None or _names(body, () if parameter is None else (parameter,))


def _names(body: Callable[..., Any], parameters: tuple[str, ...]) -> bool:
    """Whether a function uses one of these parameters, the key of what it undoes, or asks for its own."""
    code = getattr(inspect.unwrap(body), "__code__", None)
    if code is None:
        return True
    wanted = (*parameters, "effect_key")
    for instruction in dis.get_instructions(code):
        named = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if any(name in _KEY_CALLS or (name in wanted and "LOAD" in instruction.opname) for name in named):
            return True
    return any(name in code.co_cellvars for name in wanted)
