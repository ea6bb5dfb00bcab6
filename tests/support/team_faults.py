"""Protocols that lack one of the rules of `perdure.teams.protocol`: the checkers of `team_sim` must notice each."""

from __future__ import annotations

from team_sim import NoChain

from perdure.teams.protocol import Accept, Command, Marks, Member, PeerBatch
from perdure.teams.views import TeamView


class NoCutOnSight(Member):
    """Ignores the cut that a batch carries."""

    def receive(self, batch: PeerBatch, acked_link: bytes | None = None) -> list[Command]:
        return super().receive(batch._replace(cut=0), acked_link)


class CutsAfter(Member):
    """Delivers first and cuts then."""

    def receive(self, batch: PeerBatch, acked_link: bytes | None = None) -> list[Command]:
        return [*super().receive(batch._replace(cut=self.cut), acked_link), *self.begin(batch.cut)]


class AcknowledgesFirst(Member):
    """Empties the outbox before it cuts."""

    def receive(self, batch: PeerBatch, acked_link: bytes | None = None) -> list[Command]:
        first = super().receive(batch._replace(cut=self.cut, frames=()), acked_link)
        return [*first, *super().receive(batch, acked_link)]


class TakesTwice(Member):
    """Takes each frame that arrives, whatever it has taken."""

    def _take(self, batch: PeerBatch) -> list[Command]:
        marks = self.marks.setdefault(batch.source, Marks())
        for frame in batch.frames:
            if frame.seq == marks.received + 1:
                marks.received, marks.received_link = frame.seq, frame.link
        return [Accept(batch.source, frame) for frame in batch.frames]


class JoinsBlindly(Member):
    """Believes the register's members before it has reached the register's cut."""

    def learn(self, view: TeamView) -> list[Command]:
        return super().learn(view) if view.era > self.era else []


class NoEras(NoChain):
    """Takes batches of any era. The chain of hashes would notice too."""

    def receive(self, batch: PeerBatch, acked_link: bytes | None = None) -> list[Command]:
        return super().receive(batch._replace(era=self.era), acked_link)
