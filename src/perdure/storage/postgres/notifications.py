"""LISTEN on a connection of its own: PostgreSQL notifies as soon as a run is due (`DUE_RUNS` in runs/tables.py).

Behind a pooler in transaction mode no notification arrives. That is no error, because waiters also poll.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import sql

from perdure.errors import Unavailable
from perdure.storage.postgres.errors import ConnectionTarget, lost, not_connected
from perdure.storage.postgres.opening import Connection

_CHANNEL_MAX = 63  # the longest name that the server accepts


class PostgresNotifications:
    """Notifications of one store's schema. It connects at the first wait, and again after the connection broke."""

    def __init__(self, connect: Callable[[], Connection], target: ConnectionTarget) -> None:
        self._connect = connect
        self._target = target
        self._channel = f"perdure_{target.schema}"[:_CHANNEL_MAX]
        self._connection: Connection | None = None

    def wait(self, timeout_s: float) -> bool:
        if self._connection is None:
            self._listen()
            return True  # notifications before this connection are lost: the caller must look
        try:
            return any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
        except psycopg.Error as error:
            self.close()
            raise lost(str(error), self._target) from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _listen(self) -> None:
        try:
            connection = self._connect()
        except psycopg.Error as error:
            raise not_connected(error, self._target) from error
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except psycopg.Error as error:
            connection.close()
            raise Unavailable(f"cannot LISTEN on {self._target}: {type(error).__name__}") from error
        self._connection = connection
