"""Processes that replicate a store, or promote a replica, and are killed on the way."""

from __future__ import annotations

import os
import signal
from typing import Any

from striking import die_at

import perdure
from perdure.regions import promote
from perdure.regions import replication as module
from perdure.snapshots.handle import Snapshot
from perdure.testing.processes import Say

# before the transfer, amid it, and between the commit of the target and the release of the old snapshot
POINTS = ("snapshot", "transfer", "release")


def replicate_and_die(_say: Any, source: str, target: str, options: dict[str, Any], point: str) -> None:
    """Replicate; killed at the point."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    place, name = {
        "snapshot": (module, "_apply"),
        "transfer": (module, "set_counters"),
        "release": (Snapshot, "release"),
    }[point]
    setattr(place, name, die)
    with perdure.open(source) as here, perdure.open(target, **options) as there:
        module.replicate(here, there)


def promote_and_die(say: Say, target: str, options: dict[str, Any], at: int) -> None:
    """Promote; killed at the n-th step of the store's transactions."""
    with perdure.open(target, hook=die_at(at), **options) as there:
        promote(there)
    say("done")
