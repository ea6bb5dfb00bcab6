"""Stores that leave a simulated team. The product has no call for it; a restore may name fewer stores than it had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from perdure.teams.protocol import Saved, in_flight
from perdure.teams.views import Started, TeamView


class SimView(TeamView, frozen=True):
    """What a simulated team agrees on."""

    leaving: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # store to the revision since which it leaves: no store sends to it

    def drain(self, name: str) -> SimView:
        """Let a store leave: from now on no store sends to it."""
        return self._with(leaving={**self.leaving, name: self.revision + 1})

    def leave(self, name: str) -> SimView:
        """Remove a store that has left."""
        others = {store: since for store, since in self.leaving.items() if store != name}
        return self._with(members=tuple(store for store in self.members if store != name), leaving=others)

    def restore(self, cut: int, newest: int, started: Started | None = None) -> SimView:
        view: Any = super().restore(cut, newest, started)
        return cast("SimView", msgspec.structs.replace(view, leaving={}))

    def start(self) -> SimView:
        return cast("SimView", super().start())

    def join(self, name: str) -> SimView:
        return cast("SimView", super().join(name))

    def _with(self, **fields: object) -> SimView:
        return cast("SimView", self._changed(**fields))


def may_leave(name: str, cut: Mapping[str, Saved], since_revision: int) -> bool:
    """Return whether a leaving store may go: its channels are empty in a complete cut, and all knew that it leaves.

    No store sends to one that leaves. So a channel that was empty then stays empty.
    """
    all_knew = all(saved.revision >= since_revision for saved in cut.values())
    return all_knew and not any(name in channel for channel in in_flight(cut))
