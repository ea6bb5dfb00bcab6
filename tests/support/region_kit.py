"""A process that replicates a store and is killed at a point of the round."""

from __future__ import annotations

import os
import signal
from typing import Any

import perdure
from perdure.snapshots import replication as module
from perdure.snapshots.handle import Snapshot

# before the transfer, amid it, and between the commit of the target and the release of the old snapshot
POINTS = ("snapshot", "transfer", "release")


def replicate_and_die(_say: Any, source: str, target: str, options: dict[str, Any], point: str) -> None:
    """Replicate; killed at the point."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    place, name = {"snapshot": (module, "_apply"), "transfer": (module, "COUNTERS"), "release": (Snapshot, "release")}[
        point
    ]
    setattr(place, name, die)
    with perdure.open(source) as here, perdure.open(target, **options) as there:
        module.replicate(here, there)
