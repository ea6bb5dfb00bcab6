"""Consistent cuts over stores whose channels lose, repeat, delay and reorder what is sent. Sans I/O.

1. A frame stays in the sender's outbox until it is acknowledged, and is taken in order. Outbox and marks are part of a
   cut. So what is in flight in it is the outbox of one store beyond the mark of the other: nothing is recorded.
2. Each batch, even an empty one, and the register carry era and cut. Who sees a greater cut cuts before anything else.
3. A restore raises the era. Batches of an older era are dropped; one of a newer era sends the store to the register.
4. Each frame has a hash over all frames before it. So a store that was put back to an old backup is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from perdure.teams.recovery import induced_save
from perdure.teams.views import TeamView

_NUMBER_BYTES = 8


class PeerFrame(NamedTuple):
    """A message on its way to another store."""

    seq: int
    body: bytes
    link: bytes  # `link_of` the frame before it

    @staticmethod
    def link_of(before: bytes, seq: int, body: bytes) -> bytes:
        """Return the hash over a frame and, by the link before it, over all frames before it."""
        return blake3(before + seq.to_bytes(_NUMBER_BYTES, "big") + body).digest()


class PeerBatch(NamedTuple):
    """What one store sends to another at once. Without frames it acknowledges, and spreads era and cut."""

    team: str
    source: str
    target: str
    era: int
    cut: int
    base: int  # the source no longer has its frames up to this one
    frames: tuple[PeerFrame, ...]
    ack: int  # the source has taken the target's frames up to this one
    ack_link: bytes  # and this is the link of that one


class CutHere(NamedTuple):
    """Command: take a snapshot of this store now. It stands for the cuts from `first` to `cut`, in this era."""

    era: int
    first: int
    cut: int


class Acknowledged(NamedTuple):
    """Command: remove the frames for this store from the outbox, up to and including `upto`."""

    target: str
    upto: int


class Accept(NamedTuple):
    """Command: deliver a frame."""

    source: str
    frame: PeerFrame


class ReadRegister(NamedTuple):
    """Command: read the register before anything else is done: the team was restored."""


class GoBack(NamedTuple):
    """Command: restore this store, marks and outbox with it, to a cut of an era; then `resume`."""

    era: int
    cut: int


class Parted(NamedTuple):
    """Command: refuse the batch, change nothing. Two stores disagree on what they sent each other."""

    peer: str
    why: str


Command = CutHere | Acknowledged | Accept | ReadRegister | GoBack | Parted


@dataclass
class Marks:
    """How far a store and a peer are with each other: a row of the table `peer`."""

    sent: int = 0
    sent_link: bytes = b""
    acked: int = 0
    received: int = 0
    received_link: bytes = b""


@dataclass
class Member:
    """A store's part in a team. Each call is one transaction: the caller carries out the commands in their order, and
    stores era, cut and marks with them. Then it sends what `batch` returns."""

    team: str
    name: str
    era: int = 0
    cut: int = 0
    marks: dict[str, Marks] = field(default_factory=dict)

    def send(self, target: str, body: bytes) -> PeerFrame:
        """Return the frame to be put into the outbox, in the transaction of the sender's turn."""
        marks = self._marks(target)
        marks.sent += 1
        marks.sent_link = PeerFrame.link_of(marks.sent_link, marks.sent, body)
        return PeerFrame(marks.sent, body, marks.sent_link)

    def batch(self, target: str, frames: Sequence[PeerFrame] = ()) -> PeerBatch:
        """Return the batch to send now. `frames` are the first ones of the outbox for this store."""
        marks = self._marks(target)
        about = (self.team, self.name, target, self.era, self.cut)
        return PeerBatch(*about, marks.acked, tuple(frames), marks.received, marks.received_link)

    def begin(self, cut: int) -> list[Command]:
        """Reach a cut that was started, or begin one: `begin(self.cut + 1)`."""
        due = induced_save(self.cut, cut)
        if due is None:
            return []
        first, self.cut = self.cut + 1, due
        return [CutHere(self.era, first, due)]

    def learn(self, view: TeamView) -> list[Command]:
        """Follow the register: its cut counts like that of a batch."""
        if view.era > self.era:
            return [view_restored(view)]
        return self.begin(view.cut)

    def receive(self, batch: PeerBatch, acked_link: bytes | None = None) -> list[Command]:
        """Take a batch. `acked_link` is the link of frame `batch.ack` if the outbox still has it.

        `CutHere` comes alone, before anything of the batch counts: the caller cuts and passes the batch again.
        """
        if batch.era != self.era:
            return [ReadRegister()] if batch.era > self.era else []
        parted = self._parted(batch, acked_link)
        if parted is not None:
            return [parted]
        return self.begin(batch.cut) or [*self._acknowledge(batch), *self._take(batch)]

    def resume(self, view: TeamView) -> None:
        """Continue after `GoBack`, with the marks of the cut. The cut's number never goes back."""
        assert view.restored is not None
        self.era, self.cut = view.era, view.restored.resumes

    def _marks(self, peer: str) -> Marks:
        return self.marks.setdefault(peer, Marks())

    def _acknowledge(self, batch: PeerBatch) -> list[Command]:
        marks = self._marks(batch.source)
        if batch.ack <= marks.acked:
            return []
        marks.acked = batch.ack
        return [Acknowledged(batch.source, batch.ack)]

    def _take(self, batch: PeerBatch) -> list[Command]:
        marks, accepted = self._marks(batch.source), list[Command]()
        for frame in batch.frames:
            if frame.seq == marks.received + 1:
                marks.received, marks.received_link = frame.seq, frame.link
                accepted.append(Accept(batch.source, frame))
        return accepted

    def _parted(self, batch: PeerBatch, acked_link: bytes | None) -> Parted | None:
        """Return why the two stores cannot continue with each other, or None if they can."""
        marks, peer = self._marks(batch.source), batch.source
        backup = "was it restored from an old backup? Restore the team to a cut that both have"
        if batch.ack > marks.sent:
            lost = f"store {peer} has taken {batch.ack} messages of store {self.name}, which knows of {marks.sent}"
            return Parted(self.name, f"{lost}: {backup}")
        if batch.base > marks.received:
            lost = f"store {self.name} acknowledged {batch.base} messages of store {peer} and has {marks.received}"
            return Parted(self.name, f"{lost}: {backup}")
        known = marks.sent_link if batch.ack == marks.sent else acked_link
        if batch.ack > marks.acked and batch.ack_link != known:
            return Parted(self.name, f"store {peer} has taken other messages than store {self.name} sent: {backup}")
        received, link = marks.received, marks.received_link
        for frame in batch.frames:
            if frame.seq == received + 1:
                received, link = frame.seq, PeerFrame.link_of(link, frame.seq, frame.body)
                if link != frame.link:
                    other = f"the messages of store {peer} do not continue those that store {self.name} has"
                    return Parted(peer, f"{other}, from number {frame.seq} on: {backup}")
        return None


def view_restored(view: TeamView) -> GoBack:
    """Return the command that brings a store to the newest restore of its team."""
    assert view.restored is not None
    return GoBack(view.restored.era, view.restored.cut)


class Saved(NamedTuple):
    """What a store's snapshot has of its channels: marks, and the outbox by target."""

    marks: Mapping[str, Marks]
    outbox: Mapping[str, Sequence[PeerFrame]]
    revision: int = 0  # of the register, when the cut was taken


def in_flight(cut: Mapping[str, Saved]) -> dict[tuple[str, str], list[PeerFrame]]:
    """Return what was sent in a cut and not received in it, by (source, target)."""
    channels: dict[tuple[str, str], list[PeerFrame]] = {}
    for source, saved in cut.items():
        for target, frames in saved.outbox.items():
            if target not in cut:  # it has left, and had taken these: only the acknowledgement was lost
                continue
            mark = cut[target].marks.get(source, Marks()).received
            late = [frame for frame in frames if frame.seq > mark]
            if late:
                channels[source, target] = late
    return channels


def contradiction(cut: Mapping[str, Saved]) -> str:
    """Return why the parts of a cut cannot belong together: a store was put back to an old backup. "" if they can."""
    for source, saved in cut.items():
        for target, marks in saved.marks.items():
            if target not in cut:
                continue
            received = cut[target].marks.get(source, Marks())
            links = {frame.seq: frame.link for frame in saved.outbox.get(target, ())} | {marks.sent: marks.sent_link}
            known = links.get(received.received, received.received_link)
            if not marks.acked <= received.received <= marks.sent or known != received.received_link:
                return f"stores {source} and {target} disagree on what the first sent: one is from an old backup"
    return ""
