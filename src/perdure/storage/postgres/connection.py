"""One connection to PostgreSQL, spoken to in pipelines: statements out, one Sync, results in.

Works on libpq's own calls as psycopg exposes them (`psycopg.pq`), not on cursors: the same state machine
serves blocking and async callers, and a batch is one write and one wait.

Parameters are sent without a declared type: PostgreSQL takes it from the context, the same for every value,
so one text is one prepared statement and an ambiguous statement fails in its first test, not on the first
NULL in production (write `CAST(:name AS bigint)` where it cannot tell). Bytes go and come in binary; rows
come in binary.

Must never happen here: waiting, retrying, or deciding what an error means for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import psycopg
from psycopg import errors, pq
from psycopg.adapt import Transformer

from perdure.errors import UsageError
from perdure.storage.postgres.tenants import Tenancy
from perdure.storage.program import Rows, Sql, Statement

# More distinct texts than this are not a program's own but made up on the fly; they go unprepared, so that
# neither the cache here nor the server's memory grows without bound.
PREPARED_MAX = 512

_TEXT, _BINARY = pq.Format.TEXT, pq.Format.BINARY
_OK, _TUPLES = pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK
_ERROR, _SYNC = pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_SYNC
_IDLE = pq.TransactionStatus.IDLE

# Whatever may contain a colon that is not a parameter, then `::`, then a parameter.
_TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | \$(\w*)\$.*?\$\1\$ | :: | :([A-Za-z_]\w*)""",
    re.DOTALL | re.VERBOSE,
)


class Compiled:
    """A statement's text with `$n` parameters, their names in order, and its name on the server."""

    __slots__ = ("names", "prepared_as", "text")

    def __init__(self, text: str, prepared_as: bytes | None) -> None:
        order: dict[str, int] = {}

        def number(token: re.Match[str]) -> str:
            name = token[2]
            return f"${order.setdefault(name, len(order) + 1)}" if name else token[0]

        self.text = _TOKEN.sub(number, text).encode()
        self.names = tuple(order)
        self.prepared_as = prepared_as


class Statements:
    """Compiled statements by their `Sql`, each text compiled once."""

    def __init__(self, *, prepare: bool) -> None:
        self.prepare = prepare
        self.tenancy: Tenancy | None = None  # of a role that must say whose rows a statement is about
        self._by_sql: dict[Sql, Compiled] = {}
        self._by_text: dict[str, Compiled] = {}
        self._edition = 0

    def renew(self) -> None:
        """Prepare everything anew, under other names, on every connection: a table changed its columns."""
        self._edition += 1
        self._by_sql, self._by_text = {}, {}

    def compiled(self, sql: Sql) -> Compiled:
        found = self._by_sql.get(sql)
        if found is None:
            found = self._by_text.get(sql.postgres) or self._compile(sql.postgres)
            if len(self._by_sql) >= 4 * PREPARED_MAX:
                self._by_sql.clear()
            self._by_sql[sql] = found
        return found

    def _compile(self, text: str) -> Compiled:
        if len(self._by_text) >= PREPARED_MAX:
            return Compiled(text, None)
        # Named by its content: two threads that get here at once agree.
        name = f"pd{self._edition}_{blake2b(text.encode(), digest_size=12).hexdigest()}"
        return self._by_text.setdefault(text, Compiled(text, name.encode()))


class ConnectionLost(Exception):
    """The connection broke while an exchange was under way."""


class ServerTimeout(ConnectionLost):
    """The server did not answer in time. To ask again would take as long again."""


class PipelinedConnection:
    """A connection in pipeline mode. `send` starts an exchange, `receive` ends it, `take` gives its rows."""

    def __init__(self, connection: psycopg.BaseConnection[Any], statements: Statements) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        self.pgconn.enter_pipeline_mode()
        self.fileno = self.pgconn.socket
        # An exchange is under way: the connection cannot be used for anything else until its Sync was
        # answered.
        self.pending = False
        # The exchange under way commits a write: if its answer is lost, nobody knows.
        self.decisive = False
        self.statements_sent = 0
        self._statements = statements
        self._prepared: set[bytes] = set()
        self._preparing: set[bytes] = set()  # by the exchange under way: a batch may repeat a statement
        self._transformer = Transformer()
        self._expected: list[bytes | bool] = []
        self._results: list[Any] = []
        self._told: dict[str, Any] = {}  # whose rows the running transaction is about

    @property
    def reusable(self) -> bool:
        """Nothing under way, no transaction open, still connected."""
        return not self.pending and self.pgconn.transaction_status == _IDLE

    def send(
        self,
        statements: Sequence[Statement],
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        decisive: bool = False,
    ) -> None:
        """Hand everything to libpq with one Sync at its end. Whoever waits must flush."""
        asides: set[int] = set()
        if self._statements.tenancy is not None:
            if self.pgconn.transaction_status == _IDLE:
                self._told = {}
            statements, asides = self._statements.tenancy.told(statements, self._told)
        encoded = [(self._statements.compiled(sql), params) for sql, params in statements]
        ready = [(compiled, *encode(compiled.names, params)) for compiled, params in encoded]
        pgconn, self._expected, self._results = self.pgconn, [], []
        self._preparing.clear()
        self.pending, self.decisive, self.statements_sent = True, decisive, len(ready)
        try:
            if begin is not None:
                self._control(begin)
            for index, (compiled, values, formats) in enumerate(ready):
                self._statement(compiled, values, formats)
                if index in asides:
                    self._expected[-1] = False
            if end is not None:
                self._control(end)
            pgconn.pipeline_sync()
        except psycopg.OperationalError as error:
            raise ConnectionLost(str(error)) from error

    def _control(self, command: bytes) -> None:
        self.pgconn.send_query_params(command, None)
        self._expected.append(False)

    def _statement(self, compiled: Compiled, values: list[Any], formats: list[int]) -> None:
        name = compiled.prepared_as
        if name is None or not self._statements.prepare:
            self.pgconn.send_query_params(compiled.text, values, param_formats=formats, result_format=_BINARY)
        else:
            if name not in self._prepared and name not in self._preparing:
                self._preparing.add(name)
                self.pgconn.send_prepare(name, compiled.text)
                self._expected.append(name)
            self.pgconn.send_query_prepared(name, values, formats, _BINARY)
        self._expected.append(True)

    def flush(self) -> bool:
        """Write what the socket takes. True if something is left."""
        try:
            return self.pgconn.flush() != 0
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def receive(self) -> bool:
        """Read what has arrived once the socket is readable. True when the exchange is answered in full."""
        pgconn = self.pgconn
        try:
            pgconn.consume_input()
            nothing = 0
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    # One stands between two commands; two mean that nothing more will come.
                    nothing += 1
                    if nothing > 1:
                        raise psycopg.OperationalError("the connection was closed")
                    continue
                nothing = 0
                if result.status == _SYNC:
                    self.pending = False
                    return True
                self._results.append(result)
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        return False

    def _lost(self, error: psycopg.Error) -> ConnectionLost:
        """The reason that the server gave before it hung up says more than that it did."""
        for result in self._results:
            if result.status == _ERROR:
                told = errors.error_from_result(result)
                if told.sqlstate:
                    return ConnectionLost(told.diag.message_primary or str(told))
        return ConnectionLost(str(error).strip())

    def take(self) -> list[Rows]:
        """The rows of each statement. Raises the first error of the exchange."""
        return [self.rows(result) for result in self.take_results()]

    def take_counts(self) -> list[int]:
        """How many rows each statement has changed. Raises the first error of the exchange."""
        return [result.command_tuples or 0 for result in self.take_results()]

    def take_results(self) -> list[Any]:
        """What the server said of each statement. Raises the first error of the exchange."""
        answers: list[Any] = []
        failed = None
        for index, result in enumerate(self._results):
            kind = self._expected[index] if index < len(self._expected) else False
            status = result.status
            if status == _ERROR:
                failed = failed or result
            elif kind is True:
                answers.append(result)
            elif kind is not False and status == _OK:
                self._prepared.add(kind)
        self._results = []
        if failed is not None:
            raise errors.error_from_result(failed)
        return answers

    def rows(self, result: Any) -> Rows:
        """The rows of one result; empty for a statement that gives none."""
        if result.status != _TUPLES:
            return []
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def close(self) -> None:
        self.pgconn.finish()


def encode(names: tuple[str, ...], params: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """A statement's parameters as libpq takes them: values and formats, in the order of their numbers."""
    values: list[Any] = []
    formats: list[int] = []
    for name in names:
        value = params[name]
        kind = type(value)
        if kind is int:
            values.append(b"%d" % value)
            formats.append(_TEXT)
        elif kind is bytes:
            values.append(value)
            formats.append(_BINARY)
        elif value is None:
            values.append(None)
            formats.append(_TEXT)
        elif kind is str:
            values.append(_text(name, value))
            formats.append(_TEXT)
        else:
            values.append(_other(name, value))
            formats.append(_BINARY if isinstance(value, bytes | bytearray | memoryview) else _TEXT)
    return values, formats


def _text(name: str, value: str) -> bytes:
    # libpq measures text up to the first NUL: it would be cut short without a word.
    if "\0" in value:
        raise UsageError(f"the text given for {name} holds a NUL character, which PostgreSQL cannot store")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text given for {name} is not valid Unicode: {error.reason}") from error


def _other(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return b"1" if value else b"0"  # PostgreSQL reads both as a boolean and as a number, as SQLite does
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, float):
        return repr(float(value)).encode()
    if isinstance(value, str):
        return _text(name, str(value))
    if isinstance(value, list | tuple):
        return b"{" + b",".join(_element(name, element) for element in value) + b"}"
    raise UsageError(f"the value given for {name} is a {type(value).__name__}, which is no database value")


def _element(name: str, value: Any) -> bytes:
    """One element of an array, quoted so that any text can stand in it."""
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        return b'"\\\\x' + value.hex().encode() + b'"'
    [encoded], _ = encode((name,), {name: value})
    return b'"' + bytes(encoded).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
