"""A restore in a child process that dies."""

from __future__ import annotations

import itertools
import os
import signal

import perdure
from perdure.testing.processes import Say


def restore_and_die(say: Say, url: str, at: int) -> None:
    """Restore the snapshot "s" with its runs, and die by SIGKILL at the n-th step of the store's transactions."""
    steps = itertools.count(1)

    def hook(_step: str) -> None:
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    with perdure.open(url, hook=hook) as store:
        store.restore("s", runs="rewind", keys="same")
    say("done")
