"""Archiving in a child process that dies."""

from __future__ import annotations

from striking import die_at

import perdure
from perdure.testing.processes import Say


def archive_and_die(say: Say, url: str, place: str, kind: str, back: bool, at: int) -> None:
    """Archive or unarchive, and die by SIGKILL at the n-th step of the store's transactions."""
    with perdure.open(url, hook=die_at(at)) as store:
        if kind == "thread":
            store.ops.unarchive("rich") if back else store.ops.archive("rich", place)
        else:
            store.ops.unarchive_run("trip") if back else store.ops.archive_run("trip", place)
    say("done")
