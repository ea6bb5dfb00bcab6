"""`perdure --help` imports neither the library nor a database driver."""

from __future__ import annotations

import subprocess
import sys

HELP = """
import sys
from perdure.cli import main
code = main(["--help"])
heavy = {"apsw", "msgspec", "psycopg", "rich", "asyncio", "perdure.ops.store"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else code)
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
