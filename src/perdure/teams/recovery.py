"""The recovery line: which members must go back when one does, to which turn, and why. Pure.

A member at turn k has the effects of its turns 1 … k. A message is an *orphan* if the turn that sent it is undone and
the turn that took it is not: no run of the team could have led there. The recovery line is the newest state without
orphans. If members save rarely, one orphan can undo the send of another, and so on: the *domino effect*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from perdure.errors import UsageError


class SentMessage(NamedTuple):
    """A message between members. `taken_turn` is None while it waits in the mailbox."""

    member: str  # the sender
    sent_turn: int
    receiver: str
    taken_turn: int | None


class Fall(NamedTuple):
    """A member that goes back. `because` is the orphan that drew it back furthest; None: it was asked to."""

    member: str
    from_turn: int
    to_turn: int
    because: SentMessage | None

    def __str__(self) -> str:
        goes = f"{self.member} goes back from turn {self.from_turn} to turn {self.to_turn}"
        if self.because is None:
            return f"{goes}: you asked for it"
        orphan = self.because
        saved = "" if orphan.taken_turn == self.to_turn + 1 else "; its newest save before that is this one"
        return (
            f"{goes}: its turn {orphan.taken_turn} took a message that {orphan.member} sent in turn "
            f"{orphan.sent_turn}, which is undone{saved}"
        )


class RecoveryLine(NamedTuple):
    """Where every member stands after a rewind."""

    turns: dict[str, int]
    falls: list[Fall]  # in the order in which the members were drawn in
    waves: int  # 0: no other member falls; above 1: who was drawn back drew others back

    def returned(self, messages: Iterable[SentMessage]) -> list[SentMessage]:
        """Return the messages that go back to their mailboxes: their sends stay, the turns that took them do not."""
        return [
            message
            for message in messages
            if message.taken_turn is not None
            and message.taken_turn > self.turns.get(message.receiver, message.taken_turn)
            and message.sent_turn <= self.turns.get(message.member, message.sent_turn)
        ]

    def withdrawn(self, messages: Iterable[SentMessage]) -> list[SentMessage]:
        """Return the messages that were never sent now: the turns that sent them are undone."""
        return [m for m in messages if m.sent_turn > self.turns.get(m.member, m.sent_turn)]


def recovery_line(
    turns: Mapping[str, int],
    messages: Iterable[SentMessage],
    rewind: Mapping[str, int],
    *,
    saves: Mapping[str, Sequence[int]] | None = None,
) -> RecoveryLine:
    """Return the newest state without orphans in which no member is beyond its turn in `rewind`.

    `turns` is the newest turn of each member. A sender that is not in it (a person, another store) never goes back.
    Members can go back to any turn. A member of `saves` can go back to the turns that are named there, in ascending
    order, and to turn 0.
    """
    for member, turn in rewind.items():
        if member not in turns:
            raise UsageError(f"the team has no member {member!r}; it has {', '.join(sorted(turns)) or 'none'}")
        if not 0 <= turn <= turns[member]:
            raise UsageError(f"{member!r} has turns 0 to {turns[member]}: turn {turn} cannot be gone back to")
    line, because = dict(turns), dict[str, SentMessage | None]()
    for member, turn in rewind.items():
        if turn < turns[member]:
            line[member], because[member] = _save_at(turn, saves, member), None
    sent = _by_sender(messages, turns)
    falling, waves = list(because), -1
    sorted_senders: set[str] = set()
    while falling:
        waves += 1
        fell, falling = falling, []
        for member in fell:
            outgoing = sent.get(member, [])
            if member not in sorted_senders:  # only who falls: most senders never do
                outgoing.sort(key=itemgetter(1))
                sorted_senders.add(member)
            while outgoing and outgoing[-1][1] > line[member]:  # each message is looked at once
                orphan = outgoing.pop()
                receiver, taken = orphan[2], orphan[3]
                if taken is not None and taken <= line.get(receiver, -1):  # a member elsewhere stays
                    line[receiver], because[receiver] = _save_at(taken - 1, saves, receiver), SentMessage(*orphan)
                    falling.append(receiver)
    falls = [Fall(member, turns[member], line[member], why) for member, why in because.items()]
    return RecoveryLine(line, falls, max(waves, 0))


def _by_sender(messages: Iterable[SentMessage], turns: Mapping[str, int]) -> dict[str, list[SentMessage]]:
    by_sender: dict[str, list[SentMessage]] = {member: [] for member in turns}
    for message in messages:
        if message[0] in by_sender:
            by_sender[message[0]].append(message)
    return by_sender


def _save_at(turn: int, saves: Mapping[str, Sequence[int]] | None, member: str) -> int:
    """Return the newest turn that a member can go back to, not after `turn`."""
    if saves is None or member not in saves:
        return turn
    before = bisect_right(saves[member], turn)
    return saves[member][before - 1] if before else 0


def induced_save(own: int, carried: int) -> int | None:
    """Return the number of the save that a receiver makes before it takes a message, or None.

    This is communication-induced checkpointing by index (Briatico, Ciuffoletti and Simoncini): saves are numbered, each
    message carries the number of its sender's newest save, and saves of one number are consistent. So no domino falls.
    """
    return carried if carried > own else None
