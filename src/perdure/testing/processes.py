"""Child processes that can be killed at any instant: a fork_server that forks them cheaply from a clean parent.

Starting an interpreter and importing Perdure takes a hundred milliseconds; a crash test wants hundreds of
children. So one process imports everything and opens nothing, and forks a child for each call: 2 ms. Whatever a
child writes to its pipe before it dies is read after its death, line by line, and then its end.

    fork_server = ForkServer("mymodule:function")         # called as function(say, *arguments) in the child
    child = fork_server.start("sqlite:///a.db", 7)
    for line in child.lines(): ...                 # until it ends
    child.kill()
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

Say = Callable[[Any], None]


class Child:
    """A running child of a fork_server."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server = fork_server
        self.pid = pid
        self._ended = False

    def lines(self) -> Iterator[Any]:
        """What the child says, one value after the other, until it ends. Raises if it failed by itself."""
        while not self._ended:
            said = self._fork_server._read()
            if said.get("ended") == self.pid:
                self._ended = True
                if said["signal"] not in (0, signal.SIGKILL) or said["code"]:
                    raise RuntimeError(f"child {self.pid} ended by itself: {said}\n{said.get('error', '')}")
                return
            yield said["said"]

    def kill(self) -> list[Any]:
        """`kill -9`, and what the child had said until then that was not read yet."""
        try:
            os.kill(self.pid, signal.SIGKILL)  # it cannot have been reaped: the fork_server waits for us to read that
        except ProcessLookupError:
            pass
        return list(self.lines())


class ForkServer:
    """A process that forks children which run `target` ("module:function"). One child at a time."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([target, sys.path])],  # it finds what we find
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # In a group of its own: Ctrl-C on the terminal is for whoever uses it, who then ends it with its children.
            process_group=0,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C: a child may go on for long
            self.kill()
        self.close()

    def kill(self) -> None:
        """Kill it with all its children."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def start(self, *arguments: Any) -> Child:
        """Fork a child and call the target in it with these arguments (what JSON can carry)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        return Child(self, int(self._read()["started"]))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fork_server has ended")
        heard: dict[str, Any] = json.loads(line)
        return heard


_START = "import json, sys; from perdure.testing.processes import nurse; nurse(*json.loads(sys.argv[1]))"


def nurse(target: str, path: list[str]) -> None:
    """The fork_server's own loop: one line in, one child; its end is said after everything it said itself."""
    sys.path[:] = path
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _live(function, json.loads(line))
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        _write({"ended": pid, "signal": max(0, -code), "code": max(0, code)})


def _live(function: Callable[..., None], arguments: list[Any]) -> None:
    code = 0
    _say("started", os.getpid())
    try:
        function(lambda value: _say("said", value), *arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)  # no cleaning up: it belongs to the fork_server


def _say(key: str, value: Any) -> None:
    _write({key: value})


def _write(value: dict[str, Any]) -> None:
    # One write of less than PIPE_BUF bytes: never mixed with another's, never half of it.
    os.write(1, json.dumps(value).encode() + b"\n")
