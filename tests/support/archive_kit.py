"""Archiving in a child process that dies."""

from __future__ import annotations

import itertools
import os
import signal

import perdure
from perdure.testing.processes import Say


def archive_and_die(say: Say, url: str, place: str, kind: str, back: bool, at: int) -> None:
    """Archive or unarchive, and die by SIGKILL at the n-th step of the store's transactions."""
    steps = itertools.count(1)

    def hook(_step: str) -> None:
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    with perdure.open(url, hook=hook) as store:
        if kind == "thread":
            store.ops.unarchive("rich") if back else store.ops.archive("rich", place)
        else:
            store.ops.unarchive_run("trip") if back else store.ops.archive_run("trip", place)
    say("done")
