"""A restore in a child process that dies."""

from __future__ import annotations

from striking import die_at

import perdure
from perdure.testing.processes import Say


def restore_and_die(say: Say, url: str, at: int, instant: str | None = None) -> None:
    """Restore the snapshot "s", or an instant, with runs, and die by SIGKILL at the n-th step of the transactions."""
    with perdure.open(url, hook=die_at(at)) as store:
        store.restore(None if instant else "s", at=instant, runs="rewind", keys="same")
    say("done")
