"""A real PgBouncer in transaction mode: many clients, one session of the server, handed on after each transaction.

It refuses the startup parameter `options`, resets nothing between clients, and does not know prepared statements.
`make test` installs it from Debian's packages; other systems: `brew install pgbouncer`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

from perdure.testing.ports import free_port
from perdure.testing.postgres_server import unprivileged_user

_READY_S = 30.0


class PgBouncer:
    """`with PgBouncer(port, "app", "database") as bouncer: perdure.open(bouncer.address, prepare=False)`."""

    def __init__(self, port: int, user: str, database: str) -> None:
        self._server_port, self._user, self._database = port, user, database
        self._port = free_port()
        self.address = f"postgresql://{user}@127.0.0.1:{self._port}/{database}"

    def __enter__(self) -> PgBouncer:
        account = unprivileged_user()  # it refuses to run as root
        self._folder = Path(tempfile.mkdtemp(prefix="pd-pgb-"))
        (self._folder / "users").write_text(f'"{self._user}" ""\n')
        (self._folder / "ini").write_text(self._settings())
        if account is not None:
            for path in (self._folder, *self._folder.iterdir()):
                shutil.chown(path, account)
        self._log = open(self._folder / "log", "wb")
        self._process = subprocess.Popen([_program(), "ini"], cwd=self._folder, user=account, stderr=self._log)
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_READY_S)
        self._log.close()
        shutil.rmtree(self._folder)

    def transactions(self) -> int:
        """Count the transactions that passed through the pool."""
        with psycopg.connect(self._console(), autocommit=True) as connection:
            cursor = connection.execute("SHOW STATS_TOTALS")
            names = [column.name for column in cursor.description or ()]
            rows = [dict(zip(names, row, strict=True)) for row in cursor]
        return sum(int(row["xact_count"]) for row in rows if row["database"] == self._database)

    def _settings(self) -> str:
        return f"""[databases]
{self._database} = host=127.0.0.1 port={self._server_port} dbname={self._database} user={self._user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self._port}
unix_socket_dir =
auth_type = trust
auth_file = users
stats_users = {self._user}
pool_mode = transaction
default_pool_size = 1
max_client_conn = 200
"""

    def _console(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self._port}/pgbouncer"

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                psycopg.connect(self.address).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _program() -> str:
    """Where PgBouncer is. Debian puts it where only root looks."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program, "these tests need PgBouncer: apt-get install pgbouncer, or brew install pgbouncer"
    return program
