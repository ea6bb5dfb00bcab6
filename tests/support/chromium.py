"""The browser of the tests: the system's Chromium, or one that `python chromium.py` puts into `.venv` for any user.

npm's @sparticuz/chromium is a headless Chromium for x86-64 Linux with the libraries that a bare system lacks.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[2] / ".venv" / "chromium"
MISSING = "these tests need a browser: make .venv/.chromium, or sudo apt-get install chromium"
_PACKAGE = "@sparticuz/chromium@153.0.0"
_SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)


def options() -> dict[str, Any]:
    """Return the options of Playwright's `chromium.launch`. Raises RuntimeError if there is no browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), str(PLACE / "chromium"))
    if not Path(program).exists():
        raise RuntimeError(MISSING)
    env = {**os.environ, "LD_LIBRARY_PATH": str(PLACE / "lib")} if program.startswith(str(PLACE)) else dict(os.environ)
    return {"executable_path": program, "args": ["--no-sandbox", "--disable-gpu"], "env": env}


def install() -> None:
    """Download the browser, check it, and unpack it."""
    brotli: Any = importlib.import_module("brotli")  # the Makefile installs it for this alone
    npm = Path(sys.executable).with_name("npm")
    with tempfile.TemporaryDirectory() as folder:
        # npm asks the registry that this machine is set up for.
        subprocess.run([npm, "pack", "--silent", "--pack-destination", folder, _PACKAGE], check=True, cwd=folder)
        [archive] = Path(folder).glob("*.tgz")
        package = archive.read_bytes()
    if hashlib.sha512(package).hexdigest() != _SHA512:
        sys.exit(f"npm's archive of {_PACKAGE} is not the file that was expected: nothing is installed")
    PLACE.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as parts:
        for name in ("al2023.tar", "swiftshader.tar", "chromium"):
            part = parts.extractfile(f"package/bin/{name}.br")
            assert part is not None
            content = brotli.decompress(part.read())
            if name == "chromium":
                (PLACE / name).write_bytes(content)
                (PLACE / name).chmod(0o755)
            else:
                with tarfile.open(fileobj=io.BytesIO(content)) as files:
                    files.extractall(PLACE, filter="data")


if __name__ == "__main__":
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("there is no browser to download for this system")
    install()
