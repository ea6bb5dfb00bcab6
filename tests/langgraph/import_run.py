"""A process that imports and dies: `python import_run.py SOURCE TARGET STATEMENTS`.

It kills itself before so many statements of write transactions; with 0 it ends by itself, and prints how many it ran.
"""

from __future__ import annotations

import os
import signal
import sys

from perdure.langgraph import PerdureSaver, import_langgraph


def main(source: str, target: str, left: int) -> None:
    statements = 0

    def hook(step: str) -> None:
        nonlocal statements
        statements += 1
        if statements == left:
            os.kill(os.getpid(), signal.SIGKILL)

    with PerdureSaver(target, hook=hook) as saver:
        import_langgraph(source, saver, verify=False)
    print(statements)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
