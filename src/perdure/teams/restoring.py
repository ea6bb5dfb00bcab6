"""Taking a team back to a snapshot, in one transaction; what a rewind (`rewinding.py`) shares with it.

The transaction locks all members and raises their fences, so that no turn of a lost owner lands on a state
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
from perdure.runs.calls.state import RUN_KEY
from perdure.runs.journal.entries import INTENT, compress, unpack
from perdure.runs.journal.rows import FINISHED, untyped
from perdure.runs.tables import JOURNAL_BODY, MAIL_HEADER, MAIL_VALUE
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
from perdure.teams.members import find_team
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

_OVER = ", ".join(f"'{status}'" for status in FINISHED)
_AT_ONCE = 50  # members whose states are written in one batch
_FAMILY = Sql(
    "SELECT run, id, parent, turn FROM run WHERE tenant = :tenant AND root = :root AND run <> :root ORDER BY run"
)
INTENTS = f"""SELECT j.run, j.seq, j.kind, j.body FROM {{table}} j
    WHERE j.tenant = :tenant AND j.run IN {{{{numbers:runs}}}} AND j.kind = {INTENT}"""
_INTENTS_SINCE = Sql(
    " UNION ALL ".join(f"{INTENTS.format(table=table)} AND j.stamp > :s" for table in ("journal", "journal_past")),
    opens={3: JOURNAL_BODY.at(0, 1, 2)},
)
_GIVEN_UP = Sql(
    """SELECT m.run, m.key, m.header, m.sender FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.stamp > :s AND m.header IS NOT NULL""",
    opens={2: MAIL_HEADER.at(0, 1)},
)
# With the message, whether its turn had begun at the cut.
_HEADER = Sql(
    """SELECT m.header, r.entries > 0 AND m.state = 0 AND m.seq = (SELECT min(n.seq) FROM mail n
        WHERE n.tenant = :tenant AND n.run = :run AND n.topic = '' AND n.state = 0)
    FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE m.tenant = :tenant AND m.run = :run AND m.key = :key""",
    opens={0: MAIL_HEADER.at("run", "key")},
)
_PUT_WITHDRAWN = """INSERT INTO mail (tenant, run, seq, topic, key, sender, state, header, value, at)
    SELECT r.tenant, r.run,
        (SELECT coalesce(max(m.seq), 0) + 1 FROM mail m WHERE m.tenant = r.tenant AND m.run = r.run),
        '', :key::text, :sender::text, 3, :header::bytea, :value::bytea, {now}
    FROM run r WHERE r.tenant = :tenant AND r.run = :run"""
_WITHDRAWN = Sql(_PUT_WITHDRAWN, sqlite=untyped(_PUT_WITHDRAWN), seals={"header": MAIL_HEADER, "value": MAIL_VALUE})
_SET_HEADER = Sql(
    "UPDATE mail SET header = :header WHERE tenant = :tenant AND run = :run AND key = :key",
    seals={"header": MAIL_HEADER},
)
# The team's run first: who adds a member locks it too. Of child runs, those that can start others.
LOCK_FAMILY = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND root = :root AND (turn IS NOT NULL OR status NOT IN ({_OVER}))
    ORDER BY run {{for_update}}"""
)


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


class OldState(NamedTuple):
    """A state that a member gets back."""

    name: str  # of its thread
    run_id: str
    text: bytes


# --- to a snapshot


def restore(whole: Any, team: str, snap: Snapshot, keys: str | None, *, dry_run: bool) -> Flow[TeamRestore]:
    """Take all members of a team back to a snapshot. Raises UsageError without `keys` if effects ran since."""
    ctx: StoreContext = whole._context
    check_keys(keys)
    tenant, root = yield from find_team(ctx, team)
    past, s = snap.store._context, snap._row.epoch
    family = partial(_family, tenant, root.run)
    then: dict[int, Any] = yield from read_at(past, family)
    now = yield from read(family)
    if not then:
        raise NotFound(f"team {team!r} had no member when snapshot {snap.name!r} was taken")
    changed = _changed(root.run, then, now)
    effects = yield from read(partial(_effects_since, tenant, [one.run for one in changed], s, _ids(changed)))
    members = tuple(name_in(team, one.id) for one in changed if one.kind != "added" and _is_member(one, then, now))
    removed = tuple(name_in(team, one.id) for one in changed if one.kind == "added")
    result = TeamRestore(team, snap.name, members, removed, effects)
    if dry_run:
        return result
    refuse_effects(effects, keys, f"since snapshot {snap.name!r}")
    places = yield from read_at(past, partial(_states_then, tenant, [one for one in changed if one.kind != "added"]))
    undo = yield from SnapshotStore(whole)._snapshot("undo", f"before team {team} went back", None, numbered=True)
    choice = rewind.KeyChoice(keys, ctx.entropy(16))
    chances = [ctx.entropy(SALT_BYTES + 4) for _ in places]
    op = partial(_restore, tenant, root.run, then, places, chances, s, ctx.clock_us(), choice)
    changed = yield from _write(op)
    removed = tuple(name_in(team, one.id) for one in changed if one.kind == "added")
    return TeamRestore(team, snap.name, members, removed, effects, undo)


def _write(op: Any) -> Flow[list[rewind.ChangedRun]]:
    """Write, and retry once if a member was made or removed meanwhile."""
    try:
        changed: list[rewind.ChangedRun] = yield from write(op, solo=True)
    except ConstraintFailed:
        changed = yield from write(op, solo=True)
    return changed


def _changed(root: int, then: Mapping[int, Any], now: Mapping[int, Any]) -> list[rewind.ChangedRun]:
    """Return all runs of the family, then and now, each with what happens to it."""
    return [
        rewind.ChangedRun(run, row[1], _kind(run in then, run in now), row[2], root, was_deleted=False)
        for run, row in sorted({**now, **then}.items())
    ]


def _kind(was_there: bool, is_there: bool) -> str:
    return "changed" if was_there and is_there else "removed" if was_there else "added"


def _is_member(one: rewind.ChangedRun, *families: Mapping[int, Any]) -> bool:
    return any(one.run in family and family[one.run][3] is not None for family in families)


def _family(tenant: int, root: int) -> Program[dict[int, Any]]:
    [rows] = yield Batch(_FAMILY(tenant=tenant, root=root))
    return {row[0]: row for row in rows}


def _states_then(tenant: int, runs: Sequence[rewind.ChangedRun]) -> Program[list[OldState]]:
    """Return the states of runs at a snapshot, of those that had one."""
    places: list[OldState] = []
    for start in range(0, len(runs), _AT_ONCE):
        some = runs[start : start + _AT_ONCE]
        texts = yield from side_by_side([state_at(tenant, run.state, None) for run in some])
        places += [OldState(run.state, run.id, text) for run, text in zip(some, texts, strict=True) if text is not None]
    return places


def state_at(tenant: int, name: str, record: int | None) -> Program[bytes | None]:
    """Return a state's text, at a checkpoint or at the head; None if there is none."""
    row = yield from try_thread(tenant, name)
    if row is None or row.head is None:
        return None
    loaded = yield from read_state(tenant, row.tree, row.head if record is None else record)
    return None if loaded is None else loaded.data


def _restore(
    tenant: int,
    root: int,
    then: Mapping[int, Any],
    places: Sequence[OldState],
    chances: Sequence[bytes],
    s: int,
    now: int,
    keys: rewind.KeyChoice,
) -> Program[list[rewind.ChangedRun]]:
    """Take the family back. It is read under its lock: a member that has joined since the caller looked goes too."""
    yield Batch(LOCK_FAMILY(tenant=tenant, root=root))
    changed = _changed(root, then, (yield from _family(tenant, root)))
    [headers] = yield Batch(_GIVEN_UP(tenant=tenant, root=root, s=s))
    yield from rewind.rewind(tenant, changed, s, now, keys)
    yield from _keep_given_up(tenant, headers, now)
    kept = {place.run_id for place in places}
    for run in changed:
        if run.id not in kept:
            yield from replace_thread(tenant, run.state, None, s, keys)
    yield from set_states(tenant, places, chances, now, "restored from a snapshot")
    return changed


def _keep_given_up(tenant: int, headers: Rows, now: int) -> Program[None]:
    """Keep on messages that they were given up since: their effects were undone then, whatever the team forgets.

    A message that was not sent at the cut is kept withdrawn: it can be sent again. One whose turn had begun keeps the
    ids of that turn's calls and children."""
    for run, mail_key, text, sender in headers:
        about = orjson.loads(text)
        since = {name: about[name] for name in ("given_up", "undone") if name in about}
        if since:
            key = {"tenant": tenant, "run": run, "key": mail_key}
            [then] = yield Batch(_HEADER(**key))
            old, has_begun = then[0] if then else (None, False)
            about = orjson.loads(old or b"{}")
            header = orjson.dumps({**about, **since, **({"given_up": about.get("given_up", 0)} if has_begun else {})})
            absent = {"sender": sender, "value": compress(b"null"), "now": now}
            yield Batch(_SET_HEADER(**key, header=header) if then else _WITHDRAWN(**key, **absent, header=header))


def set_states(tenant: int, places: Sequence[OldState], chances: Sequence[bytes], now: int, note: str) -> Program[None]:
    """Give members their old states back, each as a new head: the history stays."""
    pairs = list(zip(places, chances, strict=True))
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        yield from side_by_side([_set_state(tenant, place, chance, now, note) for place, chance in some])


def _set_state(tenant: int, place: OldState, chance: bytes, now: int, note: str) -> Program[None]:
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


def check_keys(keys: str | None) -> None:
    if keys not in (None, "same", "new"):
        raise UsageError(f'keys={keys!r}: "same" or "new"')


def refuse_effects(effects: Sequence[PastEffect], keys: str | None, when: str) -> None:
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
    return effects_of(rows, ids)


def effects_of(rows: Rows, ids: Mapping[int, str]) -> tuple[PastEffect, ...]:
    """Return the effects of journal rows, each key once, the oldest first."""
    effects: dict[str, PastEffect] = {}
    for run, _, _, body in rows:
        entry = unpack(body)
        extra = entry.extra or {}
        effect = PastEffect(ids[run].partition("/")[2], entry.name, extra["key"], extra.get("turn"), moment(entry.at))
        effects.setdefault(effect.key, effect)
    return tuple(sorted(effects.values(), key=lambda effect: effect.at))


def name_in(team: str, run_id: str) -> str:
    return run_id.removeprefix(f"{team}/")
