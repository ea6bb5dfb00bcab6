"""A process that moves data out or back, and kills itself on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from far_kit import at

import perdure
from perdure.testing.processes import Say


def move(say: Say, url: str, folder: str, what: str, point: int) -> None:
    seen = 0

    def hook(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == point + skipped:
            os.kill(os.getpid(), signal.SIGKILL)

    skipped = 10**9
    with perdure.open(url, objects=at(Path(folder)), hook=hook) as store:
        skipped = seen
        (store.move_out if what == "out" else store.bring_back)()
    say("done")
