"""Programs of a channel between two stores: pack what waits for the other store, make a batch, take one.

A member that lives in another store has a run here that no process executes: its box collects what is sent to it.
Packing numbers these messages and puts them into the outbox. Each program first keeps snapshots away and then reads the
number of the cut: so what it does is wholly before a cut or wholly after it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from perdure.errors import BatchRefused, Busy, NotFound, UsageError
from perdure.runs.journal.entries import compress
from perdure.runs.journal.mail import LOCK_RUNS, NOTIFY, Outgoing, about_of, put_statements
from perdure.runs.journal.rows import FINISHED, NEVER, SET_ARGS, NewRun, insert, look_up, look_up_all
from perdure.runs.run_table import RunRow
from perdure.runs.tables import INPUT, MAIL_HEADER, MAIL_VALUE
from perdure.storage.program import Batch, Program, Rows, Sql
from perdure.teams.channel_tables import OUTBOX_BODY, PEER_SECRET
from perdure.teams.members import ELSEWHERE
from perdure.teams.parcels import (
    PARCEL_BYTES_MAX,
    Letter,
    MovingMember,
    Parcel,
    decode_parcel,
    encode_parcel,
    some_frames,
)
from perdure.teams.protocol import Accept, Acknowledged, Command, Marks, Member, Parted, PeerBatch, PeerFrame, Saved
from perdure.threads.save_engine import PreparedSave

PACKED_MAX = 500  # messages in one transaction
# PostgreSQL: a snapshot waits for this transaction. Only a later statement sees whether one was taken before.
_KEEP_SNAPSHOTS_AWAY = Sql(sqlite="SELECT 1", postgres="LOCK TABLE epoch IN ROW SHARE MODE")
_PART = Sql(
    "SELECT store, era, cut, restoring FROM team_store WHERE tenant = :tenant AND team = :team {for_update}",
)
_MARKS = "sent, sent_link, acked, received, received_link"
_READ_MARKS = Sql(f"SELECT peer, {_MARKS} FROM peer WHERE tenant = :tenant AND team = :team")
_WRITE_MARKS = Sql(
    f"""INSERT INTO peer (tenant, team, peer, {_MARKS})
    VALUES (:tenant, :team, :peer, :sent, :sent_link, :acked, :received, :received_link)
    ON CONFLICT (tenant, team, peer) DO UPDATE SET sent = excluded.sent, sent_link = excluded.sent_link,
        acked = excluded.acked, received = excluded.received, received_link = excluded.received_link"""
)
_WAITING = Sql(
    f"""SELECT m.run, m.seq, r.id, m.key, m.sender, m.sent_turn, m.topic, m.header, m.value
    FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND r.function = '{ELSEWHERE}' AND r.version = :peer AND m.state = 0
    ORDER BY m.run, m.seq LIMIT :limit""",
    opens={7: MAIL_HEADER.at(0, 3), 8: MAIL_VALUE.at(0, 3)},
)
_HAS_MAIL = Sql(
    f"""SELECT 1 WHERE EXISTS (SELECT 1 FROM outbox WHERE tenant = :tenant AND team = :team AND peer = :peer)
        OR EXISTS (SELECT 1 FROM run r JOIN mail m ON m.tenant = r.tenant AND m.run = r.run AND m.state = 0
            WHERE r.tenant = :tenant AND r.root = :root AND r.function = '{ELSEWHERE}' AND r.version = :peer)"""
)
_PACKED = Sql("UPDATE mail SET state = 1 WHERE tenant = :tenant AND run = :run AND seq = :seq AND state = 0")
_ADD = Sql(
    "INSERT INTO outbox (tenant, team, peer, seq, body, link) VALUES (:tenant, :team, :peer, :seq, :body, :link)",
    seals={"body": OUTBOX_BODY},
)
_OUTBOX = Sql(
    """SELECT seq, body, link FROM outbox WHERE tenant = :tenant AND team = :team AND peer = :peer
    ORDER BY seq LIMIT :limit""",
    opens={1: OUTBOX_BODY.at("team", "peer", 0)},
)
_LINK = Sql("SELECT link FROM outbox WHERE tenant = :tenant AND team = :team AND peer = :peer AND seq = :seq")
_DROP = Sql("DELETE FROM outbox WHERE tenant = :tenant AND team = :team AND peer = :peer AND seq <= :upto")
_WAS_SENT = Sql(
    "SELECT 1 FROM mail WHERE tenant = :tenant AND run = :run AND key = :key AND sender = :sender AND state = 1"
)
_IS_DEAD = Sql("UPDATE mail SET state = 2 WHERE tenant = :tenant AND run = :run AND key = :key AND state = 0")
_ARRIVE = Sql(
    f"""UPDATE run SET function = :function, version = :version, input = :input, turn = :turn, crashes = 0,
        fence = fence + 1, owner = NULL, waiting = NULL, wakeup_pending = 0, changed_at = {{now}},
        status = CASE WHEN {{has_mail}} THEN 'queued' ELSE 'waiting' END,
        wake_at = CASE WHEN {{has_mail}} THEN 0 ELSE {NEVER} END
    WHERE tenant = :tenant AND run = :run""".replace(
        "{has_mail}",
        "EXISTS (SELECT 1 FROM mail m WHERE m.tenant = :tenant AND m.run = :run AND m.topic = '' AND m.state = 0)",
    ),
    seals={"input": INPUT},
)
_IS_LINKED = Sql("SELECT store FROM team_store WHERE tenant = :tenant AND team = :team")
_SENT_AWAY = Sql(
    f"""SELECT m.sender, m.sent_turn, r.version FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND r.function = '{ELSEWHERE}' AND m.state = 1
        AND m.sent_turn IS NOT NULL"""
)
_SECRETS = Sql(
    "SELECT peer, secret FROM peer_key WHERE tenant = :tenant AND team = :team",
    opens={1: PEER_SECRET.at("team", 0)},
)
Steps = Generator[Batch, list[Rows], Any]


class TeamPlace(NamedTuple):
    """A team in one store: its tenant, its name, and the number of the run that stands for it."""

    tenant: int
    team: str
    root: int

    @property
    def key(self) -> dict[str, Any]:
        return {"tenant": self.tenant, "team": self.team}


def load(place: TeamPlace) -> Generator[Batch, list[Rows], Member]:
    """Return this store's part in the team, and keep snapshots away until the transaction ends.

    Raises NotFound, and Busy while the team is restored.
    """
    yield Batch(_KEEP_SNAPSHOTS_AWAY())
    [parts] = yield Batch(_PART(**place.key))  # its lock is waited for before the marks are read
    if not parts:
        raise NotFound(f"team {place.team!r} has one store only: link it with another one first")
    store, era, cut, restoring = parts[0]
    if restoring:
        raise Busy(f"store {store!r} is in the middle of a restore of team {place.team!r}: restore it again to finish")
    return Member(place.team, store, era, cut, (yield from read_marks(place)))


def _store(place: TeamPlace, member: Member, peer: str) -> Any:
    return _WRITE_MARKS(**place.key, peer=peer, **vars(member.marks[peer]))


def secrets_of(place: TeamPlace) -> Program[dict[str, bytes]]:
    """Return the secrets that this store shares with others."""
    [rows] = yield Batch(_SECRETS(**place.key), last=True)
    return dict(rows)


def read_marks(place: TeamPlace) -> Program[dict[str, Marks]]:
    [rows] = yield Batch(_READ_MARKS(**place.key))
    return {peer: Marks(*numbers) for peer, *numbers in rows}


def read_saved(place: TeamPlace) -> Program[Saved]:
    """Return the marks and outboxes of a store, as a snapshot sees them."""
    marks = yield from read_marks(place)
    outbox: dict[str, list[PeerFrame]] = {}
    for peer in marks:
        [frames] = yield Batch(_OUTBOX(**place.key, peer=peer, limit=2**62))
        outbox[peer] = [PeerFrame(*frame) for frame in frames]
    return Saved(marks, outbox)


def refuse_linked(tenant: int, team: str) -> Program[None]:
    """Raise UsageError if a team is in several stores: one of them alone must not go back."""
    [rows] = yield Batch(_IS_LINKED(tenant=tenant, team=team), last=True)
    if rows:
        raise UsageError(
            f"team {team!r} is in several stores, and this is {rows[0][0]!r}: take all of them back together, by "
            "`perdure.teams.link(…).restore(…)`"
        )


def refuse_sent_away(tenant: int, root: int, back: Mapping[str, int]) -> Generator[Batch, list[Rows], None]:
    """Raise UsageError if members that go back, by their ids, have sent to another store what would be undone."""
    [rows] = yield Batch(_SENT_AWAY(tenant=tenant, root=root))
    for sender, sent_turn, store in rows:
        if sent_turn > back.get(sender, sent_turn):
            raise UsageError(
                f"{sender!r} has sent a message to store {store!r} in turn {sent_turn}, which would be undone, and a "
                "message that has left cannot be withdrawn. Restore the whole team to a cut"
            )


# --- out


def has_mail_for(place: TeamPlace, peer: str) -> Program[bool]:
    """Return whether messages wait for members in another store, or to be acknowledged by it."""
    [rows] = yield Batch(_HAS_MAIL(**place.key, root=place.root, peer=peer), last=True)
    return bool(rows)


def pack(place: TeamPlace, peer: str) -> Program[int]:
    """Put messages that wait for members in another store into the outbox. Return how many."""
    member = yield from load(place)
    return (yield from pack_into(place, member, peer, PACKED_MAX))


def pack_into(place: TeamPlace, member: Member, peer: str, limit: int) -> Generator[Batch, list[Rows], int]:
    [rows] = yield Batch(_WAITING(tenant=place.tenant, root=place.root, peer=peer, limit=limit))
    if rows:
        statements = []
        for run, seq, to, key, sender, sent_turn, topic, header, value in rows:
            if len(value) > PARCEL_BYTES_MAX:  # the answer to a call: no batch could have it
                statements.append(_IS_DEAD(tenant=place.tenant, run=run, key=key))
                continue
            statements.append(_PACKED(tenant=place.tenant, run=run, seq=seq))
            letter = Letter(to, key, sender, sent_turn, topic, header, value)
            if sender is not None and not sender.startswith(f"{place.team}/"):  # a run of this store alone
                letter = _without_sender(letter, member.name)
            statements.append(_added(place, member, peer, letter))
        yield Batch(*statements, *((_store(place, member, peer),) if peer in member.marks else ()))
    return len(rows)


def put_parcel(place: TeamPlace, member: Member, peer: str, parcel: Parcel) -> Steps:
    """Add a parcel to the outbox."""
    yield Batch(_added(place, member, peer, parcel), _store(place, member, peer))


def _added(place: TeamPlace, member: Member, peer: str, parcel: Parcel) -> Any:
    frame = member.send(peer, encode_parcel(parcel))
    return _ADD(**place.key, peer=peer, **frame._asdict())


def _without_sender(letter: Letter, store: str) -> Letter:
    """Return a letter whose sender only that store vouches for. It cannot be answered."""
    about = about_of(letter.header)
    header = orjson.dumps({name: one for name, one in about.items() if name not in ("reply", "turn")})
    return Letter(
        letter.to, letter.key, f"{letter.sender}@{store}", None, letter.topic, header if about else None, letter.value
    )


def make_batch(place: TeamPlace, peer: str, *, acknowledge: bool = False) -> Program[PeerBatch]:
    """Return what is to be sent to a store now: the first frames of the outbox, or only what was taken from it."""
    member = yield from load(place)
    if acknowledge:
        return member.batch(peer)
    [rows] = yield Batch(_OUTBOX(**place.key, peer=peer, limit=PACKED_MAX))
    return member.batch(peer, some_frames([PeerFrame(*row) for row in rows]))


# --- in


def take(place: TeamPlace, batch: PeerBatch, arriving: Mapping[str, PreparedSave], now: int) -> Program[list[Command]]:
    """Take a batch whose signature was checked. Return the commands; a cut, or the register, comes before the batch.

    `arriving` has the prepared states of members that move here with it, by their ids. Raises BatchRefused.
    """
    member = yield from load(place)
    [links] = yield Batch(_LINK(**place.key, peer=batch.source, seq=batch.ack))
    commands = member.receive(batch, links[0][0] if links else None)
    accepted: list[tuple[PeerFrame, Parcel]] = []
    for command in commands:
        match command:
            case Parted(_, why):
                raise BatchRefused(why)
            case Acknowledged(target, upto):
                yield Batch(_DROP(**place.key, peer=target, upto=upto))
            case Accept(_, frame):
                accepted.append((frame, decode_parcel(frame.body)))
    yield from _deliver(place, batch.source, [parcel for _, parcel in accepted], arriving, now)
    if accepted or any(isinstance(command, Acknowledged) for command in commands):
        yield Batch(_store(place, member, batch.source), *((NOTIFY(),) if accepted else ()))
    return commands


def _deliver(
    place: TeamPlace, source: str, parcels: Iterable[Parcel], arriving: Mapping[str, PreparedSave], now: int
) -> Steps:
    parcels = list(parcels)
    ids = {parcel.to if isinstance(parcel, Letter) else parcel.id for parcel in parcels}
    ids |= {parcel.sender for parcel in parcels if isinstance(parcel, Letter) and parcel.sender}
    runs = yield from look_up_all(place.tenant, sorted(ids))
    numbers = sorted({row.run for row in runs.values()} | {place.root})
    yield Batch(LOCK_RUNS(tenant=place.tenant, runs=orjson.dumps(numbers).decode()))
    runs = yield from look_up_all(place.tenant, sorted(ids))  # as they are under the lock
    for parcel in parcels:
        if isinstance(parcel, Letter):
            yield from _deliver_letter(place, source, parcel, runs, now)
        else:
            yield from _arrive(place, source, parcel, runs, arriving[parcel.id], now)
            runs |= yield from look_up_all(place.tenant, [parcel.id])


def _deliver_letter(place: TeamPlace, source: str, letter: Letter, runs: Mapping[str, RunRow], now: int) -> Steps:
    """Put a letter into the box of its member, or of the team if it has no such member: a person decides there."""
    receiver = runs.get(letter.to)
    known = receiver is not None and receiver.root == place.root and letter.to.startswith(f"{place.team}/")
    to = receiver.run if receiver is not None and known else place.root
    letter = yield from _checked_sender(place, source, letter, to, runs)
    key = f"{source}>{letter.key}"  # a message that comes back to the store that sent it is another one there
    out = Outgoing(to, letter.topic, key, letter.value, letter.header)
    statements = put_statements(place.tenant, out, letter.sender, letter.sent_turn, now)
    yield Batch(*statements, *(() if known else (_IS_DEAD(tenant=place.tenant, run=to, key=key),)))
    about, caller = about_of(letter.header), runs.get(letter.sender or "")
    if "reply" in about and caller is not None and (receiver is None or receiver.status in FINISHED):
        value = compress(orjson.dumps([False, "its receiver left the team"]))
        reply = Outgoing(caller.run, about["reply"], f"{key}/left", value, for_turn=about.get("turn"))
        yield Batch(*put_statements(place.tenant, reply, None, None, now))


def _checked_sender(
    place: TeamPlace, source: str, letter: Letter, to: int, runs: Mapping[str, RunRow]
) -> Generator[Batch, list[Rows], Letter]:
    """Return the letter with the sender that this store believes. Raises BatchRefused for one of its own members."""
    sender = runs.get(letter.sender or "")
    if letter.sender is None or sender is None or sender.root != place.root:
        return letter
    if sender.function != ELSEWHERE:  # it lives here: only what it sent itself comes back, if its receiver has moved
        about = {"tenant": place.tenant, "run": to, "sender": letter.sender}
        [sent] = yield Batch(_WAS_SENT(**about, key=letter.key))
        if not sent:
            raise BatchRefused(f"store {source!r} sends in the name of {letter.sender!r}, which lives in this store")
        return letter
    return letter if sender.version == source else _without_sender(letter, source)


def _arrive(
    place: TeamPlace, source: str, moving: MovingMember, runs: Mapping[str, RunRow], state: PreparedSave, now: int
) -> Steps:
    """Let a member continue here."""
    row = runs.get(moving.id)
    if not moving.id.startswith(f"{place.team}/"):
        raise BatchRefused(f"store {source!r} sends {moving.id!r}, which is no member of team {place.team!r}")
    if row is not None and (row.root != place.root or row.function != ELSEWHERE or row.version != source):
        raise BatchRefused(f"store {source!r} sends {moving.id!r}, which this store has already, or has from another")
    yield from state.program()
    if row is None:
        raise BatchRefused(f"store {source!r} sends {moving.id!r}, which was not announced: link the stores again")
    about = {"id": row.id, "function": moving.function, "version": moving.version, "turn": moving.turn, "now": now}
    key = {"tenant": place.tenant, "run": row.run}
    yield Batch(_ARRIVE(**key, **about, input=b""), SET_ARGS(**key, incarnation=row.incarnation, args=moving.args))


def new_stand_in(place: TeamPlace, run_id: str, peer: str, incarnation: bytes) -> NewRun:
    """Return the run that stands here for a member in another store."""
    return NewRun(
        run_id, ELSEWHERE, peer, compress(b"{}"), b"", incarnation, parent=place.root, root=place.root, wake_at=NEVER,
        status="paused",
    )  # fmt: skip


def add_stand_in(place: TeamPlace, new: NewRun, now: int) -> Program[bool]:
    """Add a stand-in for a member in another store, unless there is one. Return False if the id is another run's."""
    row = yield from look_up(place.tenant, new.id)
    if row is not None:
        return row.function == ELSEWHERE and row.version == new.version
    return (yield from insert(place.tenant, new, now=now))
