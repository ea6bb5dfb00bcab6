"""A process that imports and dies: before so many statements of write transactions.

With 0 it ends by itself, and says how many it ran.
"""

from __future__ import annotations

import os
import signal

from perdure.langgraph import PerdureSaver, import_langgraph
from perdure.testing.processes import Say


def child(say: Say, source: str, target: str, left: int) -> None:
    statements = 0

    def hook(step: str) -> None:
        nonlocal statements
        statements += 1
        if statements == left:
            os.kill(os.getpid(), signal.SIGKILL)

    with PerdureSaver(target, hook=hook) as saver:
        import_langgraph(source, saver, verify=False)
    say(statements)
