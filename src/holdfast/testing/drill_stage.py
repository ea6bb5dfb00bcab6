"""The stage of a drill, inside the process that is killed: effects go to a ledger, plain results are pinned, and what
touches the outside world without being marked as an effect is noted.

The ledger is a file that every process of the drill appends to; a line is one write, so that a kill never leaves half
of one. Nothing here decides whether a drill passed.
"""

from __future__ import annotations

import base64
import dis
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.runs import points
from holdfast.runs.doubt import Done, NotDone
from holdfast.runs.inputs import digest
from holdfast.runs.points import Point
from holdfast.runs.scope import BodyFrame, current
from holdfast.runs.specs import StepSpec, every_step
from holdfast.values.codec import decode, encode
from holdfast.values.registry import Codec

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"subprocess.Popen", "os.system", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "ftplib.connect", "smtplib.send"}  # fmt: skip # noqa: E501
_READS = (b"GET ", b"HEAD ", b"OPTIONS ")


class Ledger:
    """What happened, as lines of JSON in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

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


class Stage:
    """Stands between the agent and the world."""

    def __init__(self, ledger: Ledger, pins: dict[str, str], *, real: bool, results: dict[str, Any], rehearsal: bool):
        self._ledger = ledger
        self._pins = pins
        self._real = real
        self._results = results
        self._rehearsal = rehearsal
        self._codec = Codec()
        self._inside = threading.local()
        self.found: list[str] = []  # effects that nobody marked

    def install(self) -> None:
        for spec in every_step():
            self._replace(spec)
        points.hook = self._reached
        if self._rehearsal:
            sys.addaudithook(self._audit)

    # --- steps and effects

    def _replace(self, spec: StepSpec) -> None:
        spec.binder.plan, spec.flavour  # noqa: B018 - taken from the function while it is still the user's
        play = self._effect if spec.kind == "effect" else self._step
        body, flavour = spec.fn, spec.flavour

        def made(*args: Any, **kwargs: Any) -> Any:
            return play(spec, body, args, kwargs)

        async def amade(*args: Any, **kwargs: Any) -> Any:
            found = play(spec, body, args, kwargs)
            return await found if hasattr(found, "__await__") else found

        def generated(*args: Any, **kwargs: Any) -> Any:
            yield from play(spec, body, args, kwargs) or ()

        async def agenerated(*args: Any, **kwargs: Any) -> Any:
            found = play(spec, body, args, kwargs)
            if hasattr(found, "__aiter__"):
                async for chunk in found:
                    yield chunk
            else:
                for chunk in found or ():
                    yield chunk

        choice: dict[str, Callable[..., Any]] = {"sync": made, "async": amade, "generator": generated}
        spec.fn = functools.wraps(body)(choice.get(flavour, agenerated))
        spec.process = False
        if spec.kind == "effect" and not self._real:
            if spec.reconcile is not None:
                spec.reconcile = self._reconcile
            if spec.undo is not None:
                undo = getattr(spec.undo, "holdfast", None)
                spec.undo = self._undo(spec, undo.fn if undo is not None else spec.undo)

    def _step(self, spec: StepSpec, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = _frame()
        pin = f"{spec.name}@{frame.path}@{_input(spec, args, kwargs)}"
        self._ledger.note(body=frame.path, name=spec.name)
        if not self._real and not self._rehearsal and pin in self._pins:
            return decode(base64.b64decode(self._pins[pin]), self._codec)
        self._inside.name = spec.name
        try:
            result = body(*args, **kwargs)
        finally:
            self._inside.name = None
        if self._rehearsal and not self._real and spec.flavour == "sync":
            try:
                self._pins[pin] = base64.b64encode(encode(result, self._codec)).decode()
            except Exception:  # not storable: the run itself says so
                pass
        return result

    def _effect(self, spec: StepSpec, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = _frame()
        self._ledger.note(body=frame.path, name=spec.name)
        what = {"effect": spec.name, "path": frame.path, "key": str(frame.key), "input": _input(spec, args, kwargs)}
        if self._real:
            self._ledger.note(**what, protected=_uses_key(spec, body))
            return body(*args, **kwargs)
        known = self._act(str(frame.key))
        self._ledger.note(**what, repeat=known is not None, protected=True)
        return self._result(spec, frame.path)

    def _act(self, key: str) -> dict[str, Any] | None:
        """The line of an effect that was done under this key: the ledger honours keys, as a good receiver does."""
        for line in self._ledger.lines():
            if line.get("key") == key and "effect" in line and not line.get("repeat"):
                return line
        return None

    def _reconcile(self, key: str, *args: Any, **kwargs: Any) -> Done | NotDone:
        line = self._act(str(key))
        if line is None:
            return NotDone()
        spec = next(spec for spec in every_step() if spec.kind == "effect" and spec.name == line["effect"])
        return Done(self._result(spec, line["path"]))

    def verdict(self, key: str) -> dict[str, Any]:
        """What a person who looked at the ledger would say of an effect in doubt."""
        line = self._act(key)
        if line is None:
            return {"not_done": True}
        spec = next(spec for spec in every_step() if spec.kind == "effect" and spec.name == line["effect"])
        return {"done": self._result(spec, line["path"])}

    def _result(self, spec: StepSpec, path: str) -> Any:
        if spec.name in self._results:
            return self._results[spec.name]
        wanted = str(spec.binder.signature.return_annotation)
        for kind, value in (("int", 1), ("float", 1.0), ("bool", True), ("dict", {}), ("list", []), ("None", None)):
            if wanted in (kind, f"<class '{kind}'>") or wanted.startswith(f"{kind}["):
                return value
        return f"{spec.name}#{path}"

    def _undo(self, spec: StepSpec, undo: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(undo)
        def taken_back(*args: Any, **kwargs: Any) -> None:
            self._ledger.note(undo=spec.name, path=_frame().path)

        return taken_back

    # --- points

    def _reached(self, point: Point) -> None:
        if point.kind == "done" and point.when == "after":
            self._ledger.note(recorded=point.path)
        for listener in self.listeners:
            listener(point)

    listeners: list[Callable[[Point], None]] = []  # noqa: RUF012 - one stage per process

    # --- what nobody marked

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        name = getattr(self._inside, "name", None)
        if name is None:
            return
        said = _outside(event, args)
        if said and f"{name}: {said}" not in self.found:
            self.found.append(f"{name}: {said}")


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
        harmless = path.endswith((".pyc", ".db", ".db-wal", ".db-shm", ".jsonl")) or path in ("/dev/null",)
        return f"writes {path}" if flags & _WRITES and not harmless and not path.isdecimal() else ""
    return f"does {event}" if event in _CHANGES else ""


def _frame() -> BodyFrame:
    scope = current.get()
    assert scope is not None
    assert scope.body is not None
    return scope.body


def _input(spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        bound = spec.binder.bind(args, kwargs)
        return digest(spec.binder.text(bound, Codec())).hex()
    except Exception:  # only a name for a pin
        return ""


def _uses_key(spec: StepSpec, body: Callable[..., Any]) -> bool:
    """Whether an effect does anything with its key, or can look up what became of it."""
    if spec.reconcile is not None:
        return True
    code = getattr(body, "__code__", None)
    if code is None:
        return True
    parameter = spec.binder.key_parameter
    for instruction in dis.get_instructions(code):
        if parameter is not None and instruction.argval == parameter and instruction.opname.startswith("LOAD"):
            return True
        if instruction.argval in ("idempotency_key", "current_key", "idempotency_headers"):
            return True
    return any(parameter in code.co_cellvars for _ in range(1)) if parameter else False
