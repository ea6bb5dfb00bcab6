"""A standby of a test's PostgreSQL: streaming replication, which a test can pause."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from perdure.testing.ports import free_port
from perdure.testing.postgres_server import PostgresServer


class Standby:
    """A server that follows another one."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def url(self, database: str) -> str:
        return f"postgresql://postgres@{self._host}:{self._port}/{database}"

    def pause(self) -> None:
        """Stop following, until `resume`."""
        self._execute("SELECT pg_wal_replay_pause()")
        while self._execute("SELECT pg_get_wal_replay_pause_state()") != "paused":
            time.sleep(0.005)

    def resume(self) -> None:
        self._execute("SELECT pg_wal_replay_resume()")

    def promote(self) -> None:
        """Make it a primary, which takes writes."""
        self._execute("SELECT pg_promote()")

    def catch_up(self, primary: str) -> None:
        """Wait until it has everything that the primary has committed."""
        with psycopg.connect(primary, autocommit=True) as connection:
            [position] = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone() or [None]
        while self._execute(f"SELECT pg_last_wal_replay_lsn() >= '{position}'") is not True:
            time.sleep(0.005)

    def _execute(self, statement: str) -> object:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            row = connection.execute(statement.encode()).fetchone()
            return row and row[0]


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[Standby]:
    """Start a standby; it is gone at the end."""
    root = Path(tempfile.mkdtemp(prefix="pd-standby-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    user, programs, port = primary._user, primary._bin, free_port()
    if user is not None:
        shutil.chown(root, user)
    source = ["-h", primary.host, "-p", str(primary.port), "-U", "postgres"]
    copy = [str(programs / "pg_basebackup"), *source, "-D", str(root / "data"), "-R", "--checkpoint=fast", "--no-sync"]
    subprocess.run(copy, user=user, cwd=root, check=True, capture_output=True)
    settings = {"port": port, "listen_addresses": primary.host, "unix_socket_directories": root, "fsync": "off"}
    settings |= {"max_connections": primary._max_connections, "max_prepared_transactions": 100}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with open(root / "log", "wb") as log:
        command = [str(programs / "postgres"), "-D", str(root / "data"), *options]
        process = subprocess.Popen(command, user=user, cwd=root, stdout=log, stderr=log, start_new_session=True)
    standby = Standby(primary.host, port)
    try:
        while True:
            try:
                standby._execute("SELECT 1")
                break
            except psycopg.OperationalError:
                if process.poll() is not None:
                    raise RuntimeError((root / "log").read_text()) from None
                time.sleep(0.01)
        yield standby
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(root, ignore_errors=True)
