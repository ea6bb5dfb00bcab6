"""Taking a team back: to a snapshot, or one member to an earlier turn with all that fall with it.

Both are one transaction. It locks all members and raises their fences, so that no turn of a lost owner lands on a state
that was restored. Effects that happened since are listed: what they did stays, whatever the team forgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import orjson

from perdure.errors import NotFound, UsageError
from perdure.log.append import Place, append, prepare
from perdure.log.ids import new_id
from perdure.log.reading import read_state
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import try_thread
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.journal.entries import INTENT, unpack
from perdure.runs.journal.rows import NEVER
from perdure.runs.tables import JOURNAL_BODY
from perdure.snapshots import rewind
from perdure.snapshots.diff import read_at
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.restore import replace_thread
from perdure.snapshots.store import SnapshotStore
from perdure.storage.program import (
    Batch,
    ConstraintFailed,
    Flow,
    Program,
    Rows,
    Sql,
    as_subprogram,
    read,
    side_by_side,
    write,
)
from perdure.teams.channels import refuse_sent_away
from perdure.teams.members import find_team, member_rows
from perdure.teams.recovery import Fall, RecoveryLine, SentMessage, recovery_line
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

_AT_ONCE = 50  # members whose states are written in one batch
_FAMILY = Sql(
    "SELECT run, id, parent, turn FROM run WHERE tenant = :tenant AND root = :root AND run <> :root ORDER BY run"
)
_INTENTS = f"""SELECT j.run, j.seq, j.kind, j.body FROM {{table}} j
    WHERE j.tenant = :tenant AND j.run IN {{{{numbers:runs}}}} AND j.kind = {INTENT}"""
_LIVE_INTENTS = Sql(_INTENTS.format(table="journal"), opens={3: JOURNAL_BODY.at(0, 1, 2)})
_INTENTS_SINCE = Sql(
    " UNION ALL ".join(f"{_INTENTS.format(table=table)} AND j.stamp > :s" for table in ("journal", "journal_past")),
    opens={3: JOURNAL_BODY.at(0, 1, 2)},
)
_LOCK = Sql("SELECT run, turn FROM run WHERE tenant = :tenant AND run IN {numbers:runs} ORDER BY run {for_update}")
_MESSAGES = Sql(
    """SELECT m.sender, m.sent_turn, r.id, m.taken_turn FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.state <> 3"""
)
# Members outside the line that may be in the middle of a turn with a message that is withdrawn.
_INTERRUPTED = Sql(
    """SELECT DISTINCT m.run FROM mail m WHERE m.tenant = :tenant AND m.sender = :sender AND m.sent_turn > :turn
    AND m.state = 0"""
)
_WITHDRAW = Sql(
    """UPDATE mail SET state = 3, taken_turn = NULL, record = NULL
    WHERE tenant = :tenant AND sender = :sender AND sent_turn > :turn"""
)
_RETURN = Sql(
    """UPDATE mail SET state = 0, taken_turn = NULL, record = NULL
    WHERE tenant = :tenant AND run = :run AND taken_turn > :turn AND state <> 3"""
)
# Answers to calls of undone turns have no receiver.
_FORGET_ANSWERS = Sql("UPDATE mail SET state = 3 WHERE tenant = :tenant AND run = :run AND topic <> '' AND state = 0")
_RECORD = Sql(
    """SELECT record FROM mail WHERE tenant = :tenant AND run = :run AND taken_turn <= :turn AND record IS NOT NULL
    ORDER BY taken_turn DESC LIMIT 1"""
)
_KEPT_TURNS = Sql("SELECT count(*) FROM mail WHERE tenant = :tenant AND run = :run AND taken_turn <= :turn")
_FIRST_RECORD = Sql(
    """SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND parent IS NULL
    ORDER BY id LIMIT 1"""
)
_BACK = Sql(
    f"""UPDATE run SET turn = :turn, crashes = 0, fence = fence + 1, owner = NULL, lease_until = 0, wakeup_pending = 0,
        waiting = NULL, since = :since, seq = :since, entries = 0, digest = 0, changed_at = {{now}},
        status = CASE WHEN status IN ('running', 'waiting', 'queued', 'stuck') THEN 'queued' ELSE status END,
        wake_at = CASE WHEN status = 'paused' THEN {NEVER} ELSE 0 END
    WHERE tenant = :tenant AND run = :run"""
)
_LAST = Sql(
    """SELECT coalesce(max(j.seq), 0), (SELECT r.seq FROM run r WHERE r.tenant = :tenant AND r.run = :run)
    FROM journal j WHERE j.tenant = :tenant AND j.run = :run"""
)
# Intents of turns that stay are kept.
_DROP = [
    Sql(
        f"""DELETE FROM {table} WHERE tenant = :tenant AND run = :run
        {f"AND (kind <> {INTENT} OR seq IN {{numbers:undone}})" if table == "journal" else ""}"""
    )
    for table in ("answer", "ask", "journal", "run_blob")
]


@dataclass(frozen=True)
class PastEffect:
    """An effect that ran, or may have run, after the point that a team goes back to."""

    member: str
    name: str
    key: str
    """its idempotency key"""
    turn: int | None
    at: datetime

    def __str__(self) -> str:
        return f"{self.member} ran {self.name} at {self.at:%Y-%m-%d %H:%M:%S} ({self.key})"


@dataclass(frozen=True)
class TeamRestore:
    """What a restore of a team did, or would do if it is a dry run."""

    team: str
    snapshot: str
    members: tuple[str, ...]
    """the members that go back"""
    removed: tuple[str, ...]
    """members and child runs that are removed, because they joined or began after the cut"""
    effects: tuple[PastEffect, ...]
    """the effects since the cut: they happened, whatever the team forgets"""
    _undo: Snapshot | None = field(default=None, repr=False, compare=False)

    @property
    def undo(self) -> Snapshot:
        """The store as it was before: restoring the team to it undoes this. Raises UsageError after a dry run."""
        if self._undo is None:
            raise UsageError("nothing was restored: there is nothing to undo")
        return self._undo


@dataclass(frozen=True)
class TeamRewind:
    """What a rewind did, or would do if it is a dry run."""

    team: str
    falls: tuple[Fall, ...]
    """the members that go back, from which turn to which, and why: `str(fall)` says it"""
    returned: int
    """messages that wait again, because the turns that took them are undone"""
    withdrawn: int
    """messages that were never sent now, because the turns that sent them are undone"""
    effects: tuple[PastEffect, ...]
    """the effects of the turns that are undone: they happened, whatever the team forgets"""

    def __str__(self) -> str:
        return "\n".join(map(str, self.falls))


class _OldState(NamedTuple):
    """A state that a member gets back."""

    name: str  # of its thread
    run_id: str
    text: bytes


# --- to a snapshot


def restore(whole: Any, team: str, snap: Snapshot, keys: str | None, *, dry_run: bool) -> Flow[TeamRestore]:
    """Take all members of a team back to a snapshot. Raises UsageError without `keys` if effects ran since."""
    ctx: StoreContext = whole._context
    _check_keys(keys)
    tenant, root = yield from find_team(ctx, team)
    past, s = snap.store._context, snap._row.epoch
    family = partial(_family, tenant, root.run)
    then: dict[int, Any] = yield from read_at(past, family)
    now = yield from read(family)
    if not then:
        raise NotFound(f"team {team!r} had no member when snapshot {snap.name!r} was taken")
    changed = [
        rewind.ChangedRun(run, row[1], _kind(run in then, run in now), row[2], root.run, was_deleted=False)
        for run, row in sorted({**now, **then}.items())
    ]
    effects = yield from read(partial(_effects_since, tenant, [one.run for one in changed], s, _ids(changed)))
    members = tuple(_name(team, one.id) for one in changed if one.kind != "added" and _is_member(one, then, now))
    removed = tuple(_name(team, one.id) for one in changed if one.kind == "added")
    result = TeamRestore(team, snap.name, members, removed, effects)
    if dry_run:
        return result
    _refuse(effects, keys, f"since snapshot {snap.name!r}")
    places = yield from read_at(past, partial(_states_then, tenant, [one for one in changed if one.kind != "added"]))
    undo = yield from SnapshotStore(whole)._snapshot("undo", f"before team {team} went back", None, numbered=True)
    choice = rewind.KeyChoice(keys, ctx.entropy(16))
    chances = [ctx.entropy(SALT_BYTES + 4) for _ in places]
    op = partial(_restore, tenant, changed, places, chances, s, ctx.clock_us(), choice)
    yield from _write(op)
    return TeamRestore(team, snap.name, members, removed, effects, undo)


def _write(op: Any) -> Flow[None]:
    """Write, and retry once if a member was made or removed meanwhile."""
    try:
        yield from write(op, solo=True)
    except ConstraintFailed:
        yield from write(op, solo=True)


def _kind(was_there: bool, is_there: bool) -> str:
    return "changed" if was_there and is_there else "removed" if was_there else "added"


def _is_member(one: rewind.ChangedRun, *families: Mapping[int, Any]) -> bool:
    return any(one.run in family and family[one.run][3] is not None for family in families)


def _family(tenant: int, root: int) -> Program[dict[int, Any]]:
    [rows] = yield Batch(_FAMILY(tenant=tenant, root=root), last=True)
    return {row[0]: row for row in rows}


def _states_then(tenant: int, runs: Sequence[rewind.ChangedRun]) -> Program[list[_OldState]]:
    """Return the states of runs at a snapshot, of those that had one."""
    places: list[_OldState] = []
    for start in range(0, len(runs), _AT_ONCE):
        some = runs[start : start + _AT_ONCE]
        texts = yield from side_by_side([_state_at(tenant, run.state, None) for run in some])
        places += [
            _OldState(run.state, run.id, text) for run, text in zip(some, texts, strict=True) if text is not None
        ]
    return places


def _state_at(tenant: int, name: str, record: int | None) -> Program[bytes | None]:
    """Return a state's text, at a checkpoint or at the head; None if there is none."""
    row = yield from try_thread(tenant, name)
    if row is None or row.head is None:
        return None
    loaded = yield from read_state(tenant, row.tree, row.head if record is None else record)
    return None if loaded is None else loaded.data


def _restore(
    tenant: int,
    changed: Sequence[rewind.ChangedRun],
    places: Sequence[_OldState],
    chances: Sequence[bytes],
    s: int,
    now: int,
    keys: rewind.KeyChoice,
) -> Program[None]:
    yield from rewind.rewind(tenant, changed, s, now, keys)
    kept = {place.run_id for place in places}
    for run in changed:
        if run.id not in kept:
            yield from replace_thread(tenant, run.state, None, s, keys)
    yield from _set_states(tenant, places, chances, now, "restored from a snapshot")


def _set_states(
    tenant: int, places: Sequence[_OldState], chances: Sequence[bytes], now: int, note: str
) -> Program[None]:
    """Give members their old states back, each as a new head: the history stays."""
    pairs = list(zip(places, chances, strict=True))
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        yield from side_by_side([_set_state(tenant, place, chance, now, note) for place, chance in some])


def _set_state(tenant: int, place: _OldState, chance: bytes, now: int, note: str) -> Program[None]:
    row = yield from try_thread(tenant, place.name, lock=True)
    head = row.head if row is not None else None
    if row is not None and head is not None:
        loaded = yield from read_state(tenant, row.tree, head)
        if loaded is not None and loaded.data == place.text:
            return
    draft = prepare(place.text, None, chance[:SALT_BYTES], kind="rollback", note=note, metadata=None)
    record = new_id(now, int.from_bytes(chance[SALT_BYTES:], "little"), head or 0)
    where = Place(tenant, place.name, None, {RUN_KEY: place.run_id} if row is None else None)
    yield from as_subprogram(append(draft, where, record, now))


# --- effects


def _check_keys(keys: str | None) -> None:
    if keys not in (None, "same", "new"):
        raise UsageError(f'keys={keys!r}: "same" or "new"')


def _refuse(effects: Sequence[PastEffect], keys: str | None, when: str) -> None:
    if effects and keys is None:
        names = "; ".join(str(effect) for effect in effects[:3])
        raise UsageError(
            f"{len(effects)} effects ran {when}, and would run again: {names}. Nothing has changed; dry_run=True lists "
            'them, keys="same" lets them run again under the same idempotency keys, keys="new" under new ones'
        )


def _ids(changed: Iterable[rewind.ChangedRun]) -> dict[int, str]:
    return {one.run: one.id for one in changed}


def _effects_since(tenant: int, runs: Sequence[int], s: int, ids: Mapping[int, str]) -> Program[tuple[PastEffect, ...]]:
    [rows] = yield Batch(_INTENTS_SINCE(tenant=tenant, runs=orjson.dumps(list(runs)).decode(), s=s), last=True)
    return _effects(rows, ids)


def _effects(rows: Rows, ids: Mapping[int, str]) -> tuple[PastEffect, ...]:
    """Return the effects of journal rows, each key once, the oldest first."""
    effects: dict[str, PastEffect] = {}
    for run, _, _, body in rows:
        entry = unpack(body)
        extra = entry.extra or {}
        effect = PastEffect(ids[run].partition("/")[2], entry.name, extra["key"], extra.get("turn"), moment(entry.at))
        effects.setdefault(effect.key, effect)
    return tuple(sorted(effects.values(), key=lambda effect: effect.at))


def _name(team: str, run_id: str) -> str:
    return run_id.removeprefix(f"{team}/")


# --- to a turn


class _Line(NamedTuple):
    """A recovery line, with the numbers of the members' runs."""

    line: RecoveryLine
    runs: dict[str, int]
    turns: dict[str, int]
    counts: tuple[int, int]  # messages returned, withdrawn
    effects: tuple[PastEffect, ...]
    undone: dict[int, list[int]]  # their rows in the journals

    def back(self) -> dict[int, int]:
        """Return the turns that members go back to, by their runs."""
        return {self.runs[fall.member]: fall.to_turn for fall in self.line.falls}


def rewind_member(
    ctx: StoreContext, team: str, member: str, turn: int, keys: str | None, *, dry_run: bool
) -> Flow[TeamRewind]:
    """Take a member back to a turn, with the members that took its messages since."""
    _check_keys(keys)
    tenant, root = yield from find_team(ctx, team)
    plan = yield from read(partial(_plan, tenant, root.run, team, member, turn))
    if not dry_run and plan.line.falls:
        _refuse(plan.effects, keys, "in the turns that would be undone")
        choice = rewind.KeyChoice(keys, ctx.entropy(16))
        chances = [ctx.entropy(SALT_BYTES + 4) for _ in plan.runs]
        op = partial(_rewind, tenant, root.run, team, member, turn, chances, ctx.clock_us(), choice)
        plan = yield from write(op, solo=True)
    return TeamRewind(team, tuple(plan.line.falls), *plan.counts, plan.effects)


def _plan(tenant: int, root: int, team: str, member: str, turn: int) -> Program[_Line]:
    rows = yield from member_rows(tenant, root)
    runs = {_name(team, row.id): row.run for row in rows}
    turns = {_name(team, row.id): row.turn or 0 for row in rows}
    if member not in runs:
        raise NotFound(f"there is no member {member!r} in team {team!r}")
    numbers = orjson.dumps(list(runs.values())).decode()
    found, intents = yield Batch(_MESSAGES(tenant=tenant, root=root), _LIVE_INTENTS(tenant=tenant, runs=numbers))
    mail = [
        SentMessage(_name(team, sender or ""), sent or 0, _name(team, to), taken) for sender, sent, to, taken in found
    ]
    line = recovery_line(turns, mail, {member: turn})
    yield from refuse_sent_away(tenant, root, {f"{team}/{fall.member}": fall.to_turn for fall in line.falls})
    back = {runs[fall.member]: fall.to_turn for fall in line.falls}
    own = [row for row in intents if row[0] in back and _turn_in(row[3], back[row[0]] + 1) > back[row[0]]]
    undone: dict[int, list[int]] = {}
    for run, seq, _, _ in own:
        undone.setdefault(run, []).append(seq)
    effects = _effects(own, {run: f"{team}/{name}" for name, run in runs.items()})
    counts = len(line.returned(mail)), len(line.withdrawn(mail))
    return _Line(line, runs, turns, counts, effects, undone)


def _turn_in(body: bytes, default: int) -> int:
    """Return the turn of an intent."""
    return int((unpack(body).extra or {}).get("turn", default))


def _rewind(
    tenant: int,
    root: int,
    team: str,
    member: str,
    turn: int,
    chances: Sequence[bytes],
    now: int,
    keys: rewind.KeyChoice,
) -> Program[_Line]:
    """Lock all members, compute the line again, and take back the members beyond it."""
    rows = yield from member_rows(tenant, root)
    yield Batch(_LOCK(tenant=tenant, runs=orjson.dumps([row.run for row in rows]).decode()))
    plan = yield from _plan(tenant, root, team, member, turn)
    _refuse(plan.effects, keys.choice, "while the team was to be rewound")
    back = plan.back()
    names = {run: f"{team}/{name}" for name, run in plan.runs.items()}
    places = yield from _states_before(tenant, names, back)
    interrupted: set[int] = set()
    for run, to_turn in back.items():
        sent = {"tenant": tenant, "sender": names[run], "turn": to_turn}
        [others] = yield Batch(_INTERRUPTED(**sent))
        interrupted |= {other for (other,) in others if other not in back}
        yield Batch(_WITHDRAW(**sent))
    turns = {plan.runs[name]: count for name, count in plan.turns.items()}
    for run in sorted({*back, *interrupted}):
        key = {"tenant": tenant, "run": run}
        to_turn = back.get(run, turns[run])
        [[(last, seq)]] = yield Batch(_LAST(**key))
        if run in back:
            yield Batch(_RETURN(**key, turn=to_turn))
        yield Batch(
            _FORGET_ANSWERS(**key),
            *(drop(**key, undone=orjson.dumps(plan.undone.get(run, [])).decode()) for drop in _DROP),
            _BACK(**key, turn=to_turn, since=max(1, last, seq), now=now),
        )
        if keys.choice == "new" and run in back:
            yield from rewind.renew(tenant, run, keys.seed)
    yield from _set_states(tenant, places, chances[: len(places)], now, f"rewound with {member}")
    return plan


def _states_before(tenant: int, names: Mapping[int, str], back: Mapping[int, int]) -> Program[list[_OldState]]:
    """Return the states that members had after the turns they go back to. Raises UsageError if one is gone."""
    places: list[_OldState] = []
    for run, turn in sorted(back.items()):
        name = thread_name(names[run])
        thread = yield from try_thread(tenant, name)
        [records] = yield Batch(_RECORD(tenant=tenant, run=run, turn=turn))
        [[(kept,)]] = yield Batch(_KEPT_TURNS(tenant=tenant, run=run, turn=turn))
        if not records and thread is not None and kept == turn:  # none of these turns has changed the state
            [records] = yield Batch(_FIRST_RECORD(tenant=tenant, tree=thread.tree, thread=thread.thread))
        text = (yield from _state_at(tenant, name, records[0][0])) if records else None
        if text is None:
            raise UsageError(
                f"the state of {names[run]!r} after turn {turn} is not kept any more: retention removed it. "
                "Choose a later turn"
            )
        places.append(_OldState(name, names[run], text))
    return places
