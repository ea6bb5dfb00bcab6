"""`Post`: a team in one of its stores. It makes batches for other stores, takes theirs, and cuts when it is due.

A batch is bytes: `LinkedTeam` carries them between stores that one process has open, and any other transport may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from perdure.errors import BatchRefused, Conflict, NotFound, UsageError
from perdure.log.thread_table import try_thread
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.engine.flows import request
from perdure.runs.journal.entries import compress, decompress
from perdure.runs.journal.rows import ARGS_OF, FINISHED, LOCK, NEVER, look_up_all
from perdure.runs.run_table import RunRow
from perdure.runs.tables import INPUT
from perdure.snapshots import rows as snapshots
from perdure.snapshots.diff import read_at
from perdure.snapshots.handle import Snapshot, list_snapshots
from perdure.snapshots.rewind import rows_back
from perdure.snapshots.store import SnapshotStore
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Batch, Flow, Program, Sql, read, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.versions import analyse, install, installed
from perdure.teams import channels
from perdure.teams.channel_tables import PEER_SECRET
from perdure.teams.channels import TeamPlace
from perdure.teams.members import ELSEWHERE, ensure_members, ensure_team, find_team, member_rows
from perdure.teams.parcels import (
    PARCEL_BYTES_MAX,
    SECRET_BYTES,
    MovingMember,
    decode_batch,
    decode_parcel,
    encode_batch,
)
from perdure.teams.protocol import CutHere, PeerBatch, ReadRegister, Saved
from perdure.teams.views import TeamView
from perdure.threads import flows as threads
from perdure.threads.context import Cursor, Handle
from perdure.threads.save_engine import Moved, PreparedSave
from perdure.threads.saves import Save

if TYPE_CHECKING:
    from perdure.teams.team import Team

_PAUSE_S, _PATIENCE = 0.05, 200  # for the end of a turn
_INCOMPLETE_US = 24 * 3600 * 1_000_000  # how long an incomplete part of a cut is kept
_PART = Sql("SELECT store, era, cut, restoring FROM team_store WHERE tenant = :tenant AND team = :team")
_LOCK_PART = Sql("SELECT 1 FROM team_store WHERE tenant = :tenant AND team = :team {for_update}")
_JOIN = Sql(
    """INSERT INTO team_store (tenant, team, store, era, cut, restoring)
    VALUES (:tenant, :team, :store, :era, :cut, 0) ON CONFLICT (tenant, team) DO NOTHING"""
)
_SET_CUT = Sql("UPDATE team_store SET cut = :cut WHERE tenant = :tenant AND team = :team")
_SET_ERA = Sql(
    "UPDATE team_store SET era = :era, cut = :cut, restoring = :restoring WHERE tenant = :tenant AND team = :team"
)
_SHARE = Sql(
    """INSERT INTO peer_key (tenant, team, peer, secret) VALUES (:tenant, :team, :peer, :secret)
    ON CONFLICT (tenant, team, peer) DO UPDATE SET secret = excluded.secret""",
    seals={"secret": PEER_SECRET},
)
_JOURNALED = Sql("SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since AND kind <> 1 LIMIT 1")
_GO = Sql(
    f"""UPDATE run SET function = :function, version = :to, input = :input, turn = NULL, status = 'paused',
        fence = fence + 1, owner = NULL, waiting = NULL, request = NULL, wakeup_pending = 0, wake_at = {NEVER},
        changed_at = {{now}} WHERE tenant = :tenant AND run = :run""",
    seals={"input": INPUT},
)
_STAND_INS = Sql(
    f"""UPDATE run SET status = 'paused', wake_at = {NEVER}
    WHERE tenant = :tenant AND root = :root AND function = '{ELSEWHERE}'"""
)


class _Passed(Exception):
    """The cut was taken by another process meanwhile. Raised to roll back the snapshot."""


@dataclass(frozen=True)
class StorePart:
    """This store's part in a team of several."""

    store: str
    era: int
    cut: int
    restoring: bool


class Post(Handle):
    """The post office of a team in one store."""

    def __init__(self, team: Team) -> None:
        self._team, self._whole, self._context = team, team._whole, team._context

    def __repr__(self) -> str:
        return f"<Post of {self._team!r}>"

    # --- batches

    @blocking
    def outgoing(self, to: str) -> Flow[bytes]:
        """Return the batch to send to another store now: messages that wait for its members, and what was taken."""
        return self.packing(to)

    aoutgoing = awaited(outgoing)

    def packing(self, to: str) -> Flow[bytes]:
        """Return the flow of `outgoing`, for other flows."""
        place = yield from self.place()
        yield from write(partial(channels.pack, place, to))
        batch = yield from write(partial(channels.make_batch, place, to))
        return encode_batch(batch, (yield from self._secret(place, to)))

    @blocking
    def accept(self, data: bytes) -> Flow[bytes]:
        """Take a batch of another store. Return the batch that acknowledges it. Raises BatchRefused.

        If it carries a cut that this store has not reached, the store cuts first."""
        return self.taking(data)

    aaccept = awaited(accept)

    def taking(self, data: bytes) -> Flow[bytes]:
        """Return the flow of `accept`, for other flows."""
        place = yield from self.place()
        part = yield from self.part()
        secrets = yield from read(partial(channels.secrets_of, place))
        batch = decode_batch(data, place.team, part.store, secrets.get)
        yield from self._take(place, batch)
        answer = yield from write(partial(channels.make_batch, place, batch.source, acknowledge=True))
        return encode_batch(answer, secrets[batch.source])

    def _take(self, place: TeamPlace, batch: PeerBatch) -> Flow[None]:
        while True:
            arriving = yield from self._states(batch)
            try:
                commands = yield from write(
                    partial(channels.take, place, batch, arriving, self._context.clock_us()), solo=True
                )
            except Moved as moved:  # a state of the same name was saved meanwhile
                for saving in arriving.values():
                    saving.drop(moved)
                continue
            for saving in arriving.values():
                if saving.done is not None:
                    saving.settle()
            if any(isinstance(command, ReadRegister) for command in commands):
                raise BatchRefused(
                    f"store {batch.source!r} is in era {batch.era} of team {place.team!r}, which was restored: "
                    "restore this store too"
                )
            cut = next((command for command in commands if isinstance(command, CutHere)), None)
            if cut is None:
                return
            yield from self.cut(cut)

    def _states(self, batch: PeerBatch) -> Flow[dict[str, PreparedSave]]:
        """Prepare the states of members that arrive with a batch."""
        states = {}
        for parcel in (decode_parcel(frame.body) for frame in batch.frames):
            if isinstance(parcel, MovingMember):
                cursor = Cursor(thread_name(parcel.id), merge={RUN_KEY: parcel.id})
                try:
                    yield from threads.load(self._context, cursor)
                except NotFound:
                    pass  # it was never here
                states[parcel.id] = yield from Save(self._context, cursor, text=decompress(parcel.state)).prepare()
        return states

    def _secret(self, place: TeamPlace, peer: str) -> Flow[bytes]:
        secrets = yield from read(partial(channels.secrets_of, place))
        if peer not in secrets:
            raise UsageError(f"store {peer!r} is not linked with this one; it has {', '.join(secrets) or 'none'}")
        return secrets[peer]

    def acknowledged_by(self, peer: str) -> Flow[int]:
        """Return how many messages another store has taken."""
        place = yield from self.place()
        saved = yield from read(partial(channels.read_marks, place))
        return saved[peer].acked if peer in saved else 0

    # --- where it stands

    def place(self) -> Flow[TeamPlace]:
        tenant, root = yield from find_team(self._context, self._team.name)
        return TeamPlace(tenant, self._team.name, root.run)

    def part(self) -> Flow[StorePart]:
        """Return what this store knows of its part. Raises NotFound."""
        place = yield from self.place()
        return (yield from read(partial(_part, place)))

    def has_mail_for(self, peer: str) -> Flow[bool]:
        """Return whether messages wait for members in another store, or to be acknowledged by it."""
        place = yield from self.place()
        return (yield from read(partial(channels.has_mail_for, place, peer)))

    def local_members(self, *, going: bool = False) -> Flow[list[str]]:
        """Return the ids of the members that live in this store; with `going`, those that are not paused."""
        place = yield from self.place()
        rows = yield from read(partial(_member_rows, place))
        return [row.id for row in rows if row.status not in FINISHED and not (going and row.status == "paused")]

    # --- joining

    def join(self, store: str, view: TeamView) -> Flow[None]:
        """Give this store its name in the team. Raises UsageError if it has another one."""
        ctx = self._context
        tenant, root = yield from ensure_team(ctx, self._team.name)
        yield from ensure_members(ctx, self._team.name)
        if not (yield from read(installed)):  # couriers lock what snapshots lock
            tables = list(versioned_tables().values())
            yield from SnapshotStore(self._whole)._patiently(partial(install, tables, ctx.driver.dialect))
            yield from write(partial(analyse, list(versioned_tables())), solo=True)
        place = TeamPlace(tenant, self._team.name, root.run)
        part = yield from write(partial(_join, place, store, view))
        if part.store != store:
            raise UsageError(f"this store is {part.store!r} in team {place.team!r}, not {store!r}")

    def secret_with(self, peer: str) -> Flow[bytes]:
        """Return the secret that this store shares with another one. Make it on first use."""
        place = yield from self.place()
        secrets = yield from read(partial(channels.secrets_of, place))
        if peer not in secrets:
            secrets[peer] = self._context.entropy(SECRET_BYTES)
            yield from self.share(peer, secrets[peer])
        return secrets[peer]

    def share(self, peer: str, secret: bytes) -> Flow[None]:
        place = yield from self.place()
        yield from write(partial(_run_one, _SHARE(**place.key, peer=peer, secret=secret)))

    def announce(self, members: Sequence[str], peer: str) -> Flow[None]:
        """Add a stand-in for each member of another store. Raises UsageError if one lives here too."""
        place = yield from self.place()
        for run_id in members:
            new = channels.new_stand_in(place, run_id, peer, self._context.entropy(16))
            if not (yield from write(partial(channels.add_stand_in, place, new, self._context.clock_us()))):
                raise UsageError(
                    f"{run_id!r} is in store {peer!r} and in this one, or in a third: a member lives in one store. Let "
                    "one of them leave the team, or declare it in one store only"
                )

    # --- cuts

    def cut(self, cut: CutHere) -> Flow[None]:
        """Take the snapshot of a cut, together with its number, unless another process was first."""
        place = yield from self.place()
        token, clock = self._context.entropy(16).hex(), self._context.clock_us
        try:
            yield from SnapshotStore(self._whole)._patiently(partial(_take_cut, place, cut, token, clock))
        except _Passed:
            pass

    def find_cut(self, era: int, cut: int) -> Flow[Snapshot | None]:
        """Return the snapshot that stands for a cut in this store."""
        for snapshot in (yield from list_snapshots(self._whole)):
            about: Any = snapshot.manifest.get("team") or {}
            if about.get("team") == self._team.name and about["era"] == era and about["first"] <= cut <= about["cut"]:
                return snapshot
        return None

    def saved(self, snapshot: Snapshot) -> Flow[Saved]:
        """Return marks and outboxes at a snapshot."""
        place = yield from self.place()
        return (yield from read_at(snapshot.store._context, partial(channels.read_saved, place)))

    def complete(self, snapshot: Snapshot, manifest: dict[str, Any], name: str) -> Flow[Snapshot]:
        """Note in a snapshot which others it belongs to, and give it its name."""
        columns: dict[str, Any] = {"manifest": orjson.dumps(manifest).decode(), "name": name, "keep_until": None}
        yield from write(partial(snapshots.update, snapshot._row.token, **columns))
        return Snapshot(self._whole, snapshot._row._replace(**columns))

    # --- restoring

    def begin_restore(self, view: TeamView) -> Flow[bool]:
        """Stop the channels for a restore. Return False if this store has ended it already."""
        place = yield from self.place()
        return (yield from write(partial(_begin_restore, place, view)))

    def end_restore(self, view: TeamView, snapshot: Snapshot) -> Flow[None]:
        """Put marks and outbox back to a snapshot, and continue in the new era."""
        place = yield from self.place()
        yield from write(partial(_end_restore, place, view, snapshot._row.epoch))

    # --- moving

    def park(self, run_id: str) -> Flow[RunRow]:
        """Pause a member when its turn is over. Raises Conflict if the turn does not end."""
        place = yield from self.place()
        for _ in range(_PATIENCE):
            status = yield from request(self._context, run_id, "pause")
            row, is_idle = yield from read(partial(_look, place, run_id))
            if status == "paused" and is_idle:
                return row
            if status == "paused":
                break
            yield from sleep(_PAUSE_S)
        yield from self.unpark(run_id)
        raise Conflict(f"member {run_id!r} is in the middle of a turn, and continues: try again when it has ended")

    def unpark(self, run_id: str) -> Flow[None]:
        """Let a parked member continue."""
        yield from request(self._context, run_id, "resume")

    def send_member(self, run_id: str, to: str) -> Flow[None]:
        """Send a parked member to another store: in one transaction it stops living here and is in the outbox."""
        place = yield from self.place()
        while True:
            cursor = Cursor(thread_name(run_id))
            _, loaded, _ = yield from threads.load(self._context, cursor, strict=True)
            state = compress(loaded.data)
            if len(state) > PARCEL_BYTES_MAX:
                raise UsageError(
                    f"the state of {run_id!r} has {len(state):,} bytes compressed: at most {PARCEL_BYTES_MAX:,} "
                    "can be moved. Keep large data in threads or memory"
                )
            op = partial(_send_member, place, run_id, to, state, cursor.record, self._context.clock_us())
            if (yield from write(op, solo=True)):
                return


def _run_one(statement: Any) -> Program[None]:
    yield Batch(statement)


def _part(place: TeamPlace) -> Program[StorePart]:
    [rows] = yield Batch(_PART(**place.key))
    if not rows:
        raise NotFound(f"team {place.team!r} has one store only: link it with another one (`perdure.teams.link`)")
    return StorePart(rows[0][0], rows[0][1], rows[0][2], bool(rows[0][3]))


def _member_rows(place: TeamPlace) -> Program[list[RunRow]]:
    return (yield from member_rows(place.tenant, place.root))


def _join(place: TeamPlace, store: str, view: TeamView) -> Program[StorePart]:
    yield Batch(_JOIN(**place.key, store=store, era=view.era, cut=view.cut))
    return (yield from _part(place))


def _take_cut(place: TeamPlace, cut: CutHere, token: str, clock: Any) -> Program[None]:
    until = clock() + _INCOMPLETE_US  # daily maintenance releases it, unless it becomes complete
    row = yield from snapshots.take(f"{place.team}-cut-{cut.cut}-{token[:8]}", token, None, until, clock)
    yield Batch(_LOCK_PART(**place.key))
    part = yield from _part(place)
    if (part.era, part.restoring) != (cut.era, False) or part.cut >= cut.cut:
        raise _Passed
    about = {"team": place.team, "store": part.store, **cut._asdict(), "first": part.cut + 1}
    manifest = orjson.dumps({**orjson.loads(row.manifest), "team": about}).decode()
    yield from snapshots.update(row.token, manifest=manifest)
    yield Batch(_SET_CUT(**place.key, cut=cut.cut))


def _begin_restore(place: TeamPlace, view: TeamView) -> Program[bool]:
    yield Batch(_LOCK_PART(**place.key))
    part = yield from _part(place)
    if part.era == view.era and not part.restoring:
        return False
    yield Batch(_SET_ERA(**place.key, era=view.era, cut=part.cut, restoring=1))
    return True


def _end_restore(place: TeamPlace, view: TeamView, epoch: int) -> Program[None]:
    assert view.restored is not None
    yield Batch(*rows_back(["peer", "outbox"], epoch, **place.key))
    yield Batch(
        _STAND_INS(tenant=place.tenant, root=place.root),
        _SET_ERA(**place.key, era=view.era, cut=view.restored.resumes, restoring=0),
    )


def _look(place: TeamPlace, run_id: str) -> Program[tuple[RunRow, bool]]:
    row = (yield from look_up_all(place.tenant, [run_id]))[run_id]
    [journaled] = yield Batch(_JOURNALED(tenant=place.tenant, run=row.run, since=row.since))
    return row, not journaled


def _send_member(place: TeamPlace, run_id: str, to: str, state: bytes, record: int | None, now: int) -> Program[bool]:
    member = yield from channels.load(place)
    key = {"tenant": place.tenant, "run": (yield from look_up_all(place.tenant, [run_id]))[run_id].run}
    [locked], args, thread = (yield Batch(LOCK(**key))), (yield Batch(ARGS_OF(**key))), None
    thread = yield from try_thread(place.tenant, thread_name(run_id))
    row = RunRow._make(locked[0])
    if row.turn is None or row.status != "paused":
        raise Conflict(f"member {run_id!r} continued or moved meanwhile: nothing was done")
    if thread is None or thread.head != record:
        return False  # its state was changed meanwhile: read it again
    while (yield from channels.pack_into(place, member, to, channels.PACKED_MAX)):
        pass  # what it sent before goes before it
    moving = MovingMember(run_id, row.function, row.version, row.turn, args[0][0][0], state)
    yield from channels.put_parcel(place, member, to, moving)
    yield Batch(_GO(**key, id=run_id, function=ELSEWHERE, input=b"", to=to, now=now))
    return True
