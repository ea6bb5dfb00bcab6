"""A transaction on PostgreSQL that a test drives statement by statement, with the statements that Perdure sends."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import psycopg

from perdure.storage.program import Sql


class Session:
    """A connection whose statements the test sends one by one."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True, options="-c search_path=perdure")
        self._waiting: threading.Thread | None = None
        self.error: BaseException | None = None

    def run(self, sql: Sql | str, **params: Any) -> list[Any]:
        text = sql.postgres if isinstance(sql, Sql) else sql
        text = re.sub(r"(?<!:):(\w+)", r"%(\1)s", text)
        cursor = self.connection.execute(text.encode(), params)
        return cursor.fetchall() if cursor.description else []

    def begin_waiting(self, watcher: Session, sql: Sql | str, **params: Any) -> None:
        """Send a statement that has to wait for the other session, and return once it does."""

        def work() -> None:
            try:
                self.run(sql, **params)
            except psycopg.Error as error:
                self.error = error

        self._waiting = threading.Thread(target=work)
        self._waiting.start()
        pid, deadline = self.connection.info.backend_pid, time.monotonic() + 30
        while not watcher.run("SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND wait_event_type = 'Lock'", pid=pid):
            assert time.monotonic() < deadline, "it did not come to wait"
            assert self._waiting.is_alive(), f"it did not wait ({self.error})"

    def end_waiting(self) -> None:
        assert self._waiting is not None
        self._waiting.join(30)
        assert not self._waiting.is_alive()

    def close(self) -> None:
        self.connection.close()
