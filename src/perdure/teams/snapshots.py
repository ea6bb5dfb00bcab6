"""`TeamSnapshot`: a team at one instant, with the messages that were on their way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from perdure.runs.journal.entries import decompress
from perdure.runs.run_table import TEAM
from perdure.runs.tables import MAIL_VALUE
from perdure.snapshots.diff import read_at
from perdure.snapshots.handle import Snapshot
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, either
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Handle
from perdure.threads.models import moment
from perdure.values.codec import decode

if TYPE_CHECKING:
    from perdure.ops.store import Store

_IN_FLIGHT = Sql(
    f"""SELECT m.value, m.run, m.key, r.id, m.sender, m.sent_turn, m.topic, m.at FROM mail m
    JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND m.state = 0
        AND r.root = (SELECT t.run FROM run t WHERE t.tenant = :tenant AND t.id = :team AND t.function = '{TEAM}')
    ORDER BY m.run, m.seq""",
    opens={0: MAIL_VALUE.at(1, 2)},
)


@dataclass(frozen=True)
class MessageInFlight:
    """A message that was sent and not yet taken."""

    sender: str | None
    """the member or run that sent it; None if it came from outside"""
    receiver: str
    message: Any
    key: str
    sent_turn: int | None
    """the sender's turn that sent it"""
    answers_call: bool
    at: datetime


class TeamSnapshot(Handle):
    """A team at one instant: every member's state, and what was in flight between them."""

    def __init__(self, live: Store, team: str, snapshot: Snapshot) -> None:
        self._context, self.team, self.snapshot = live._context, team, snapshot

    def __repr__(self) -> str:
        return f"<TeamSnapshot {self.name!r} of team {self.team!r}>"

    @property
    def name(self) -> str:
        return self.snapshot.name

    @property
    def taken_at(self) -> datetime:
        return self.snapshot.taken_at

    @blocking
    def in_flight(self, *, raw: bool = False) -> Flow[list[MessageInFlight]]:
        """Return the messages that were sent and not yet taken, by receiver, the oldest first.

        `raw` decodes to a readable form that needs none of your classes."""
        return self._flying(raw)

    ain_flight = awaited(in_flight)

    def _flying(self, raw: bool = False) -> Flow[list[MessageInFlight]]:
        """Return the flow of `in_flight`, for other flows."""
        tenant = (yield from self._context.tenant()) or 0
        past = self.snapshot.store._context

        def look() -> Program[Rows]:
            [rows] = yield Batch(_IN_FLIGHT(tenant=tenant, team=self.team), last=True)
            return rows

        rows = yield from read_at(past, look)
        return [
            MessageInFlight(
                None if sender is None else sender.removeprefix(f"{self.team}/"),
                receiver.removeprefix(f"{self.team}/"),
                decode(decompress(value), self._context.codec, raw=raw),
                key,
                sent_turn,
                topic.startswith("call:"),
                moment(at),
            )
            for value, _, key, receiver, sender, sent_turn, topic, at in rows
        ]

    @blocking
    def state(self, member: str) -> Flow[Any]:
        """Return the state of a member at the cut. Raises NotFound."""
        thread = self.snapshot.thread(f"run:{self.team}/{member}")
        return (yield from either(thread.load, thread.aload)).state

    astate = awaited(state)
