"""Child processes for tests that kill them at any instant, forked in 2 ms from a process that has imported everything.

Lines that a child wrote to its pipe before it died can still be read after its death, and then its end.

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
_reports = 1  # the descriptor that a fork server and its children write their reports to
_START = "import json, sys; from perdure.testing.processes import serve; serve(*json.loads(sys.argv[1]))"


class ChildProcess:
    """A running child of a fork server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._ended = False

    def lines(self) -> Iterator[Any]:
        """Yield the values that the child says until it ends. Raises RuntimeError if it failed by itself."""
        while not self._ended:
            said = self._server._read()
            if said.get("ended") == self.pid:
                self._ended = True
                if said["code"] not in (0, -signal.SIGKILL):
                    raise RuntimeError(f"child {self.pid} ended by itself: {said}")
                return
            yield said["said"]

    def kill(self) -> list[Any]:
        """Kill the child with SIGKILL, and return the values it had said that were not read yet."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return list(self.lines())


class ForkServer:
    """A process that forks children, one at a time, to run `target` ("module:function")."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([target, sys.path])],  # it can import what this process can
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches only this process, which then kills the group
        )
        self._child: ChildProcess | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C: do not wait for a child that runs long
            self.kill()
        self.close()

    def kill(self) -> None:
        """Kill the fork server with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def start(self, *arguments: Any) -> ChildProcess:
        """Fork a child and call the target in it with these arguments, which must be JSON values.

        A child that its caller left behind is killed first.
        """
        self._end_child()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        self._child = ChildProcess(self, int(self._read()["started"]))
        return self._child

    def close(self) -> None:
        """Kill the child if it still runs, and end the fork server."""
        self._end_child()
        self._process.communicate(timeout=30)

    def _end_child(self) -> None:
        """Kill a child whose end was not read. It may wait for a test that has failed."""
        child, self._child = self._child, None
        if child is not None and not child._ended:
            with suppress(RuntimeError):  # the child has failed by itself, or the fork server has been killed
                child.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        heard: dict[str, Any] = json.loads(line)
        return heard


def serve(target: str, path: list[str]) -> None:
    """Run the loop of the fork server: fork one child per input line, and report its end after all that it wrote."""
    global _reports
    _reports = os.dup(1)
    os.dup2(2, 1)  # what the code under test prints must not get between the reports
    sys.path[:] = path
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    for late in ("ops.store", "storage.sqlite.driver", "storage.postgres.driver"):  # imported by `open`
        with suppress(ImportError):  # psycopg is optional
            importlib.import_module(f"perdure.{late}")
    gc.freeze()  # garbage collection in a child would touch, and so copy, the pages of all imported objects
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _run(function, json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            _write("ended", pid, code=code)
        except BrokenPipeError:  # the process that reads the reports was killed
            return


def _run(function: Callable[..., None], arguments: list[Any]) -> None:
    code = 0
    _write("started", os.getpid())
    try:
        function(lambda value: _write("said", value), *arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)  # no cleanup: open files and exit handlers belong to the fork server


def _write(key: str, value: Any, **more: Any) -> None:
    os.write(_reports, json.dumps({key: value, **more}).encode() + b"\n")  # one write: a kill leaves no partial line
