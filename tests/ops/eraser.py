"""The child of the kill tests of erasing: erases, and is killed at a point of the driver."""

from __future__ import annotations

import os
import signal

import perdure
from perdure.testing.processes import Say


class Killer:
    """A hook that ends the process at its n-th point; it counts only once it is told to."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.armed = at, 0, False

    def __call__(self, point: str) -> None:
        self.count += self.armed
        if self.armed and self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def erase(say: Say, url: str, what: str, name: str, checkpoint: str, at: int) -> None:
    """Erase a thread, a run, a checkpoint or memory; says how many points there are if it comes to its end."""
    killer = Killer(at)
    with perdure.open(url, hook=killer, durability="normal") as store:
        killer.armed = True
        if what == "run":
            store.ops.erase_run(name)
        elif what == "checkpoint":
            store.thread(name).erase(checkpoint)
        elif what == "memory":
            store.memory("users", name).erase_all()
        else:
            store.ops.erase(name, forks=True)
        killer.armed = False
    say(killer.count)
