"""A process that imports and dies: `python import_run.py SOURCE TARGET STATEMENTS`.

It kills itself before so many statements of write transactions; without that argument it ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys

from perdure.langgraph import PerdureSaver, importing_writing
from perdure.langgraph.importing import import_langgraph

ITEMS = 5


def main(source: str, target: str, left: int) -> None:
    importing_writing._ITEMS_MAX = ITEMS
    statements = 0

    def hook(step: str) -> None:
        nonlocal statements
        statements += 1
        if statements == left:
            os.kill(os.getpid(), signal.SIGKILL)

    with PerdureSaver(target, hook=hook) as saver:
        done = import_langgraph(source, saver, verify=False)
    print(statements, done.checkpoints, done.skipped)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
