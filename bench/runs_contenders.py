"""Who is compared when durable runs are measured: children that keep one store open and do what they are told.

Ours (`bench.runs_ours`) and DBOS (`bench.runs_dbos`) are processes with the same commands, so that neither has the
other's threads beside it, a fresh process can be had for a resume, and one can be killed in the middle of a run.
A command is a line of JSON on a child's stdin; its answer is a line of JSON on its stdout.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import apsw
import psycopg

from bench.measure import Prose, in_child

OURS = "bench.runs_ours"
DBOS = "bench.runs_dbos"
RESULT_BYTES = 1000
ANSWER_TIMEOUT_S = 300.0
TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), pg_total_relation_size(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
"""


class Contender:
    """A child with a store open. `ask` sends it a command and waits for the answer."""

    def __init__(self, module: str, location: str, *options: object) -> None:
        self.location = location
        self._child = in_child(module, location, *options)
        self._read()  # it is up

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self._read()

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command whose answer is not waited for."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._child.stdin.flush()

    def rate(self, command: str, count: int, *arguments: object) -> float:
        """How many per second a command does of the `count` it is told to do; it answers with the seconds it took."""
        return count / float(self.ask(command, count, *arguments))

    def kill(self) -> None:
        """SIGKILL: what a crash leaves behind."""
        self._child.kill()
        self._end()

    def close(self) -> None:
        """Let it end by itself, which closes its store."""
        if self._child.poll() is None and self._child.stdin is not None:
            self._child.stdin.close()
            try:
                self._child.wait(30)
            finally:
                self._child.kill()
        self._end()

    def _end(self) -> None:
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _read(self) -> Any:
        pipe = self._child.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], ANSWER_TIMEOUT_S)
        line = pipe.readline() if ready else b""
        if not line:
            self.kill()
            raise RuntimeError(f"{self._child.args!r} " + ("died" if ready else "did not answer in time"))
        return json.loads(line)


def serve(commands: Mapping[str, Callable[..., object]]) -> None:
    """The child's side: answer commands until stdin ends."""
    answer("ready")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer(commands[name](*arguments))


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def stop_here() -> NoReturn:
    """From inside a body: tell the parent that the run is this far, and wait to be killed."""
    answer("here")
    time.sleep(ANSWER_TIMEOUT_S)
    raise RuntimeError("no kill came")


def texts(count: int) -> list[str]:
    """Results of 1 kB that have nothing in common."""
    prose = Prose(17)
    return [prose.words_of(RESULT_BYTES // 2)[:RESULT_BYTES] for _ in range(count)]


def stored_bytes(location: str) -> int:
    """What a database holds, without room that is free: a vacuumed copy of a file, the tables on PostgreSQL.

    Other processes may keep it open.
    """
    if "://" in location:
        with psycopg.connect(location, autocommit=True) as connection:
            tables = connection.execute(TABLES).fetchall()
            for name, _ in tables:
                connection.execute(f"VACUUM {name}".encode())
            return sum(int(row[1]) for row in connection.execute(TABLES))
    copy = Path(f"{location}.copy")
    connection_ = apsw.Connection(location)
    try:
        connection_.execute("VACUUM INTO ?", (str(copy),))
        return copy.stat().st_size
    finally:
        connection_.close()
        copy.unlink(missing_ok=True)
