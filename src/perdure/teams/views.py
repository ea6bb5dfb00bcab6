"""What a team of several stores agrees on: era, cut and members. Values; `register.py` keeps the newest one.

Every change is a compare-and-set of the whole view, so all stores see the same order of changes.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from perdure.errors import Undecodable, UsageError

_STARTED_MAX = 32  # cuts that a view names: older ones that never completed are given up


class Started(NamedTuple):
    """A cut that was started: in which era, and who takes part."""

    era: int
    members: tuple[str, ...]


class RestoredCut(NamedTuple):
    """The newest restore: a cut of an era, and the number from which later cuts count."""

    era: int
    cut: int
    resumes: int


class TeamView(msgspec.Struct, frozen=True):
    """The state of a team at one revision of its register."""

    era: int = 0
    cut: int = 0
    members: tuple[str, ...] = ()
    restored: RestoredCut | None = None
    started: dict[int, Started] = {}
    revision: int = 0

    def start(self) -> TeamView:
        """Start the next cut, with all present members."""
        cut = self.cut + 1
        started = {**self.started, cut: Started(self.era, self.members)}
        kept = dict(sorted(started.items())[-_STARTED_MAX:])
        return self._changed(cut=cut, started=kept)

    def join(self, name: str) -> TeamView:
        """Add a store. It takes part in the cuts that are started from now on."""
        return self if name in self.members else self._changed(members=tuple(sorted({*self.members, name})))

    def restore(self, cut: int, newest: int, started: Started | None = None) -> TeamView:
        """Go back to a complete cut. `newest` is the greatest cut that any store has reached.

        `started` is what the cut's own manifest says, for one that the view no longer names.
        """
        started = started or self.started.get(cut)
        if started is None:
            raise UsageError(f"the team has no cut {cut}; it has {', '.join(map(str, self.started)) or 'none'}")
        resumes = max(self.cut, newest)
        restored = RestoredCut(started.era, cut, resumes)
        return self._changed(era=self.era + 1, cut=resumes, restored=restored, members=started.members)

    def _changed(self, **fields: object) -> TeamView:
        return msgspec.structs.replace(self, revision=self.revision + 1, **fields)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(text: bytes) -> TeamView:
        """Read a view. Raises Undecodable."""
        try:
            return msgspec.json.decode(text, type=TeamView)
        except msgspec.DecodeError as error:
            raise Undecodable(f"what the team agreed on cannot be read: {error}") from error
