"""Child processes that can be killed at any instant, forked from a process that has imported everything (2 ms each).

What a child writes to its pipe before it dies is read after its death, line by line, and then its end.

    with ForkServer("mymodule:function") as server:     # called as function(say, *arguments) in the child
        child = server.start("sqlite:///a.db", 7)
        for line in child.lines(): ...                  # until it ends
        child.kill()
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

Say = Callable[[Any], None]
_START = "import json, sys; from perdure.testing.processes import serve; serve(*json.loads(sys.argv[1]))"


class ChildProcess:
    """A running child of a fork server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._ended = False

    def lines(self) -> Iterator[Any]:
        """What the child says, one value after the other, until it ends. Raises if it failed by itself."""
        while not self._ended:
            said = self._server._read()
            if said.get("ended") == self.pid:
                self._ended = True
                if said["code"] not in (0, -signal.SIGKILL):
                    raise RuntimeError(f"child {self.pid} ended by itself: {said}")
                return
            yield said["said"]

    def kill(self) -> list[Any]:
        """`kill -9`, and what the child had said until then that was not read yet."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return list(self.lines())


class ForkServer:
    """A process that forks children which run `target` ("module:function"). One child at a time."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([target, sys.path])],  # it finds what we find
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C on the terminal is for its user, who then ends it with its children
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C: a child may run for long
            self.kill()
        self.close()

    def kill(self) -> None:
        """Kill it with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def start(self, *arguments: Any) -> ChildProcess:
        """Fork a child and call the target in it with these arguments (what JSON can carry)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        return ChildProcess(self, int(self._read()["started"]))

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        heard: dict[str, Any] = json.loads(line)
        return heard


def serve(target: str, path: list[str]) -> None:
    """The fork server's own loop: one line in, one child; its end is written after everything it wrote itself."""
    sys.path[:] = path
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    for late in ("ops.store", "storage.sqlite.driver", "storage.postgres.driver"):  # what opening a store imports
        with suppress(ImportError):  # without psycopg no child opens PostgreSQL
            importlib.import_module(f"perdure.{late}")
    gc.freeze()  # what was imported stays: no child looks at it for garbage, which would copy its pages
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _run(function, json.loads(line))
        _write("ended", pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(function: Callable[..., None], arguments: list[Any]) -> None:
    code = 0
    _write("started", os.getpid())
    try:
        function(lambda value: _write("said", value), *arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)  # no cleaning up: it belongs to the fork server


def _write(key: str, value: Any, **more: Any) -> None:
    os.write(1, json.dumps({key: value, **more}).encode() + b"\n")  # one write: a kill leaves no half of a line
