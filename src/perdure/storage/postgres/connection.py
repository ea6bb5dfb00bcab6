"""One connection to PostgreSQL in pipeline mode: it sends statements and one Sync, then reads the results.

It uses libpq's calls (`psycopg.pq`), not cursors: a batch is one write and one wait. PostgreSQL infers the types of
parameters, so that one text is one prepared statement; an ambiguous one fails at its first run (write `CAST(:name AS
bigint)`). Nothing is retried here, and callers decide what an error means.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import psycopg
from psycopg import errors, pq
from psycopg.adapt import Transformer

from perdure.errors import UsageError
from perdure.storage.postgres.tenants import Tenancy
from perdure.storage.program import SERVER_NOW, Rows, Sql, Statement

# More distinct texts than this are generated ones. They are not prepared, which bounds the cache here and the server's
# memory.
PREPARED_MAX = 512
# Added to the server's own timeouts, which end first unless the server or the network hangs.
GRACE_S = 5.0

_TEXT, _BINARY = pq.Format.TEXT, pq.Format.BINARY
_OK, _TUPLES = pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK
_ERROR, _SYNC = pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_SYNC
_IDLE = pq.TransactionStatus.IDLE

# Texts that may contain a colon without a parameter, then `::`, then a parameter.
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
    def __init__(self, *, prepare: bool) -> None:
        self.prepare = prepare
        self.callers_clock = False  # {now} is the caller's time, not the server's
        self.tenancy: Tenancy | None = None  # of a role that must say whose rows a statement is about
        self._by_text: dict[str, Compiled] = {}
        self._edition = 0

    def renew(self) -> None:
        """Prepare all statements again, under other names, on every connection: a table has changed its columns."""
        self._edition += 1
        self._by_text = {}

    def compiled(self, sql: Sql) -> Compiled:
        text = sql.postgres
        statement = self._by_text.get(text)
        if statement is None:
            if self.callers_clock:
                text = text.replace(SERVER_NOW, "CAST(:now AS bigint)")
            if len(self._by_text) >= PREPARED_MAX:
                return Compiled(text, None)
            # The name is a hash of the text: two threads that get here at once make the same one.
            name = f"pd{self._edition}_{blake2b(text.encode(), digest_size=12).hexdigest()}"
            statement = self._by_text.setdefault(sql.postgres, Compiled(text, name.encode()))
        return statement


class ConnectionLost(Exception):
    """The connection broke while an exchange was under way."""


class ServerTimeout(ConnectionLost):
    """The server did not answer in time. Another attempt would take as long."""


class PipelinedConnection:
    """A connection in pipeline mode."""

    def __init__(self, connection: psycopg.Connection[Any], statements: Statements, timeout_s: float) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        self.pgconn.enter_pipeline_mode()
        # An exchange is under way: until its Sync is answered, nothing else can use the connection.
        self._pending = False
        # The exchange under way commits a write: if its answer is lost, the outcome is unknown.
        self.decisive = False
        self._statements = statements
        self._timeout_s = timeout_s
        self._prepared: set[bytes] = set()
        self._preparing: set[bytes] = set()  # by the exchange under way: a batch may repeat a statement
        self._transformer = Transformer()
        self._expected: list[bytes | bool] = []
        self._results: list[Any] = []
        self._tenant: dict[str, Any] = {}  # the tenant that the running transaction was given

    @property
    def reusable(self) -> bool:
        """Return whether the connection is open, has no transaction, and no exchange is under way."""
        return not self._pending and self.pgconn.transaction_status == _IDLE

    @property
    def is_quiet(self) -> bool:
        """Return whether an idle connection can be used. If it is readable, the server has closed it."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return not poll.poll(0)

    def exchange(
        self,
        statements: Sequence[Statement],
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        decisive: bool = False,
    ) -> list[Any]:
        """Send statements with one Sync at their end, wait, and return the result of each. Raises the first error."""
        self.decisive = False
        asides: set[int] = set()
        if self._statements.tenancy is not None:
            if self.pgconn.transaction_status == _IDLE:
                self._tenant = {}
            statements, asides = self._statements.tenancy.with_tenant_settings(statements, self._tenant)
        compiled = [(self._statements.compiled(sql), params) for sql, params in statements]
        ready = [(each, *encode(each.names, params)) for each, params in compiled]
        self._expected, self._results = [], []
        self._preparing.clear()
        self._pending, self.decisive = True, decisive
        sent = False
        # The server applies its timeout to each statement.
        patience_s = self._timeout_s * max(1, len(ready)) + GRACE_S
        try:
            if begin is not None:
                self._control(begin)
            for index, (each, values, formats) in enumerate(ready):
                self._statement(each, values, formats)
                if index in asides:
                    self._expected[-1] = False
            if end is not None:
                self._control(end)
            sent = True
            self.pgconn.pipeline_sync()
            self._wait(patience_s)
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        except KeyboardInterrupt:
            # The server executes what was sent even if the connection is closed. Wait for it, because it must not be
            # committed after a later write. A second interruption ends this wait.
            with suppress(psycopg.OperationalError, ServerTimeout):
                if sent and decisive and self._pending and not self._receive():  # it may have arrived already
                    self._wait(patience_s)
            raise
        return self._take()

    def rows(self, result: Any) -> Rows:
        """Return the rows of one result; [] for a statement without rows."""
        if result.status != _TUPLES:
            return []
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def close(self) -> None:
        self.pgconn.finish()

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

    def _wait(self, patience_s: float) -> None:
        """Block until the server has answered the exchange under way."""
        deadline = time.monotonic() + patience_s
        pgconn, poll = self.pgconn, select.poll()
        writing = pgconn.flush() != 0
        poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if writing else 0))
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ServerTimeout(f"no answer within {patience_s:g} s")
            events = poll.poll(left_s * 1000)
            if writing:
                writing = pgconn.flush() != 0
                if not writing:
                    poll.modify(pgconn.socket, select.POLLIN)
            if any(event & ~select.POLLOUT for _, event in events) and self._receive():
                return

    def _receive(self) -> bool:
        """Read what has arrived. Return whether the exchange is answered completely."""
        pgconn = self.pgconn
        pgconn.consume_input()
        nothing = 0
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                # One None separates two commands; two of them are the end.
                nothing += 1
                if nothing > 1:
                    raise psycopg.OperationalError("the connection was closed")
                continue
            nothing = 0
            if result.status == _SYNC:
                self._pending = False
                return True
            self._results.append(result)
        return False

    def _lost(self, error: psycopg.Error) -> ConnectionLost:
        """Return the error for a lost connection, with the reason that the server gave before it closed it."""
        for result in self._results:
            if result.status == _ERROR:
                reported = errors.error_from_result(result)
                if reported.sqlstate:
                    return ConnectionLost(reported.diag.message_primary or str(reported))
        return ConnectionLost(str(error).strip())

    def _take(self) -> list[Any]:
        answers: list[Any] = []
        failed = None
        for index, result in enumerate(self._results):
            kind = self._expected[index] if index < len(self._expected) else False
            if result.status == _ERROR:
                failed = failed or result
            elif kind is True:
                answers.append(result)
            elif kind is not False and result.status == _OK:
                self._prepared.add(kind)
        self._results = []
        if failed is not None:
            raise errors.error_from_result(failed)
        return answers


def encode(names: tuple[str, ...], params: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Return a statement's parameters for libpq: values and formats, in the order of their numbers."""
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
    # libpq takes text up to the first NUL and would drop the bytes after it without an error.
    if "\0" in value:
        raise UsageError(f"the text given for {name} holds a NUL character, which PostgreSQL cannot store")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text given for {name} is not valid Unicode: {error.reason}") from error


def _other(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return b"1" if value else b"0"  # valid as a boolean and as a number, as in SQLite
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
    """Return one element of an array, quoted so that it may be any text."""
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        return b'"\\\\x' + value.hex().encode() + b'"'
    [encoded], _ = encode((name,), {name: value})
    return b'"' + bytes(encoded).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
