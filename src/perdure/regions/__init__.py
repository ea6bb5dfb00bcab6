"""A second region: replicate a store, promote the replica, drill the loss of the first.

Nothing below imports this package: it can be removed as a folder, with `cli/regions.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names

if TYPE_CHECKING:
    from perdure.regions.promotion import Promoted, promote
    from perdure.regions.replication import Replicated, replicate

_LATE = {
    "Promoted": "perdure.regions.promotion",
    "Replicated": "perdure.regions.replication",
    "promote": "perdure.regions.promotion",
    "replicate": "perdure.regions.replication",
}

__all__ = ["Promoted", "Replicated", "promote", "replicate"]

__getattr__, __dir__ = late_names(__name__, __all__, _LATE)
