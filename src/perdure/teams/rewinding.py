"""Taking one member of a team back to an earlier turn, with all that fall with it, in one transaction.

The family is locked first. Then the recovery line is computed from the messages: it names the members that fall, also
those in the middle of a turn. Messages of undone turns are withdrawn, those that these turns took wait again, and the
runs that they started are removed. What a run outside the team has received cannot be undone: that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import orjson

from perdure.errors import NotFound, UsageError
from perdure.log import gc
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import try_thread
from perdure.runs.calls.children import CHILD_DIGITS
from perdure.runs.calls.state import thread_name
from perdure.runs.execution.turn import turn_incarnation
from perdure.runs.journal.entries import INTENT, unpack
from perdure.runs.journal.mail import IS_ANSWER, MailRow
from perdure.runs.journal.rows import FINISHED, NEVER
from perdure.runs.run_table import RunRow
from perdure.runs.tables import JOURNAL_BODY, MAIL_HEADER, MAIL_VALUE, OF_JOURNAL
from perdure.snapshots import rewind
from perdure.storage.program import Batch, Flow, Program, Sql, read, write
from perdure.teams.channels import refuse_sent_away
from perdure.teams.letters import sent_again
from perdure.teams.members import ELSEWHERE, find_team, member_rows
from perdure.teams.recovery import Fall, RecoveryLine, SentMessage, recovery_line
from perdure.teams.restoring import (
    INTENTS,
    LOCK_FAMILY,
    OldState,
    PastEffect,
    check_keys,
    effects_of,
    name_in,
    refuse_effects,
    set_states,
    state_at,
)
from perdure.threads.context import StoreContext
from perdure.transfers.run_rows import drop_run

_OVER = ", ".join(f"'{status}'" for status in FINISHED)
_LIVE_INTENTS = Sql(INTENTS.format(table="journal"), opens={3: JOURNAL_BODY.at(0, 1, 2)})
# Instead of its turn, -1 for the message that a member handles now, if it handles one.
_MESSAGES = Sql(
    """SELECT m.sender, m.sent_turn, r.id, CASE WHEN m.state = 0 AND m.topic = '' AND m.seq = (SELECT min(n.seq)
        FROM mail n WHERE n.tenant = :tenant AND n.run = m.run AND n.topic = '' AND n.state = 0)
        THEN -1 ELSE m.taken_turn END
    FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.state < 3"""
)
# The messages of undone turns, with the one that may be handled now: the children of a turn are named by its message.
_UNDONE = Sql(
    """SELECT m.seq, m.key, m.sender, m.header, m.value FROM mail m
    WHERE m.tenant = :tenant AND m.run = :run AND m.state <> 3 AND (m.taken_turn > :turn OR m.seq = (SELECT min(n.seq)
        FROM mail n WHERE n.tenant = :tenant AND n.run = :run AND n.topic = '' AND n.state = 0))""",
    opens={3: MAIL_HEADER.at("run", 1), 4: MAIL_VALUE.at("run", 1)},
)
_WITHDRAW = Sql(
    """UPDATE mail SET state = 3, taken_turn = NULL, record = NULL
    WHERE tenant = :tenant AND sender = :sender AND sent_turn > :turn AND (state <> 1 OR run IN {numbers:members})"""
)
_SENT_OUTSIDE = Sql(
    f"""SELECT r.id, m.sent_turn, m.state FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE m.tenant = :tenant AND m.sender = :sender AND m.sent_turn > :turn AND m.state < 2
        AND m.run NOT IN {{numbers:inside}} AND r.function <> '{ELSEWHERE}'"""
)
# A member that has left stays away: what comes back to it is for a person.
_RETURN = Sql(
    f"""UPDATE mail SET taken_turn = NULL, record = NULL, state = CASE WHEN {IS_ANSWER} THEN 3
        WHEN (SELECT r.status FROM run r WHERE r.tenant = :tenant AND r.run = :run) IN ({_OVER}) THEN 2 ELSE 0 END
    WHERE tenant = :tenant AND run = :run AND taken_turn > :turn AND state = 1"""
)
_DEAD = Sql(
    "SELECT key, header FROM mail WHERE tenant = :tenant AND run = :run AND taken_turn > :turn AND state = 2",
    opens={1: MAIL_HEADER.at("run", 0)},
)
_REVIVE = Sql(
    f"""UPDATE mail SET taken_turn = NULL, header = :header, state = CASE
        WHEN (SELECT r.status FROM run r WHERE r.tenant = :tenant AND r.run = :run) IN ({_OVER}) THEN 2 ELSE 0 END
    WHERE tenant = :tenant AND run = :run AND key = :key""",
    seals={"header": MAIL_HEADER},
)
# Answers to calls of undone turns have no receiver.
_FORGET_ANSWERS = Sql(f"UPDATE mail SET state = 3 WHERE tenant = :tenant AND run = :run AND {IS_ANSWER} AND state = 0")
_CHILDREN = Sql(
    f"""SELECT run, id, parent FROM run WHERE tenant = :tenant AND root = :root AND run <> :root AND turn IS NULL
    AND function <> '{ELSEWHERE}' ORDER BY run"""
)
_FORKED = Sql("SELECT id FROM run WHERE tenant = :tenant AND origin IN {numbers:runs} LIMIT 1")
_RECORD = Sql(
    """SELECT record FROM mail WHERE tenant = :tenant AND run = :run AND taken_turn <= :turn AND record IS NOT NULL
    ORDER BY taken_turn DESC LIMIT 1"""
)
# Retention removes it before the messages of the turns that it precedes.
_FIRST_RECORD = Sql(
    """SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND parent IS NULL
    AND body IS NOT NULL ORDER BY id LIMIT 1"""
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
        {f"AND (kind <> {INTENT} OR seq IN {{numbers:undone}})" if table == "journal" else ""}
        {f"AND kind = '{OF_JOURNAL}'" if table == "run_external" else ""}"""
    )
    for table in ("answer", "ask", "journal", "run_blob", "run_external")
]


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


class _Line(NamedTuple):
    """A recovery line, with the numbers of the members' runs."""

    line: RecoveryLine
    runs: dict[str, int]
    ended: dict[int, int]  # the turns that each member has ended
    counts: tuple[int, int]  # messages returned, withdrawn
    effects: tuple[PastEffect, ...]
    undone: dict[int, list[int]]  # their rows in the journals
    children: dict[int, str]  # runs that undone turns started, and the runs that those started

    def back(self) -> dict[int, int]:
        """Return the turns that members go back to, by their runs."""
        return {self.runs[fall.member]: fall.to_turn for fall in self.line.falls}


def rewind_member(
    ctx: StoreContext, team: str, member: str, turn: int, keys: str | None, *, dry_run: bool
) -> Flow[TeamRewind]:
    """Take a member back to a turn, with the members that took its messages since."""
    check_keys(keys)
    tenant, root = yield from find_team(ctx, team)
    plan = yield from read(partial(_plan, tenant, root.run, team, member, turn))
    if not dry_run and plan.line.falls:
        refuse_effects(plan.effects, keys, "in the turns that would be undone")
        choice = rewind.KeyChoice(keys, ctx.entropy(16))
        chances = [ctx.entropy(SALT_BYTES + 4) for _ in plan.runs]
        op = partial(_rewind, tenant, root.run, team, member, turn, chances, ctx.clock_us(), choice)
        plan = yield from write(op, solo=True)
    return TeamRewind(team, tuple(plan.line.falls), *plan.counts, plan.effects)


def _plan(tenant: int, root: int, team: str, member: str, turn: int) -> Program[_Line]:
    rows = {row.run: row for row in (yield from member_rows(tenant, root))}
    runs = {name_in(team, row.id): row.run for row in rows.values()}
    if member not in runs:
        raise NotFound(f"there is no member {member!r} in team {team!r}")
    # A member that handles a message is in a turn that has not ended. It falls like one that has.
    begun = {
        name_in(team, row.id): (row.turn or 0) + 1 for row in rows.values() if row.status == "running" or row.entries
    }
    turns = {name_in(team, row.id): row.turn or 0 for row in rows.values()} | begun
    [messages] = yield Batch(_MESSAGES(tenant=tenant, root=root))
    mail = [_message(team, begun, *row) for row in messages]
    line = recovery_line(turns, mail, {member: turn})
    yield from refuse_sent_away(tenant, root, {f"{team}/{fall.member}": fall.to_turn for fall in line.falls})
    back = {runs[fall.member]: fall.to_turn for fall in line.falls}
    children = yield from _children(tenant, root, {run: (rows[run], to_turn) for run, to_turn in back.items()})
    outside = yield from _sent_outside(tenant, [*rows, *children], {rows[run].id: back[run] for run in back})
    numbers = orjson.dumps([*back, *children]).decode()
    [intents] = yield Batch(_LIVE_INTENTS(tenant=tenant, runs=numbers))
    own = [row for row in intents if row[0] in children or _turn_in(row[3], back[row[0]] + 1) > back[row[0]]]
    undone: dict[int, list[int]] = {}
    for run, seq, _, _ in own:
        undone.setdefault(run, []).append(seq)
    effects = effects_of(own, {run: row.id for run, row in rows.items()} | children)
    counts = len(line.returned(mail)), len(line.withdrawn(mail)) + outside
    ended = {run: row.turn or 0 for run, row in rows.items()}
    return _Line(line, runs, ended, counts, effects, undone, children)


def _message(
    team: str, begun: Mapping[str, int], sender: str | None, sent: int | None, to: str, taken: int | None
) -> SentMessage:
    """Return a message as the recovery line sees it. A run outside is no member, whatever its id."""
    name = name_in(team, to)
    member = name_in(team, sender) if sender is not None and sender.startswith(f"{team}/") else ""
    return SentMessage(member, sent or 0, name, begun.get(name) if taken == -1 else taken)


def _turn_in(body: bytes, default: int) -> int:
    """Return the turn of an intent."""
    return int((unpack(body).extra or {}).get("turn", default))


def _children(tenant: int, root: int, back: Mapping[int, tuple[RunRow, int]]) -> Program[dict[int, str]]:
    """Return the ids of runs that undone turns started, and of those below them. Their ids begin with the message."""
    [runs] = yield Batch(_CHILDREN(tenant=tenant, root=root))
    if not runs:
        return {}
    begins: dict[int, tuple[str, ...]] = {}
    for run, (row, turn) in back.items():
        [mails] = yield Batch(_UNDONE(tenant=tenant, run=run, turn=turn))
        begins[run] = tuple(
            f"{row.id}/{turn_incarnation(row.incarnation, message, given_up).hex()[:CHILD_DIGITS]}:"
            for message in map(MailRow._make, mails)
            for given_up in range(message.about.get("given_up", 0) + 1)
        )
    children: dict[int, str] = {}
    for run, run_id, parent in runs:  # a child's number is above its parent's
        if parent in children or run_id.startswith(begins.get(parent, ())):
            children[run] = run_id
    if children:
        [forks] = yield Batch(_FORKED(tenant=tenant, runs=orjson.dumps([*children]).decode()))
        if forks:
            raise UsageError(f"the fork {forks[0][0]!r} shares the history of a child run that would be undone")
    return children


def _sent_outside(tenant: int, inside: Sequence[int], back: Mapping[str, int]) -> Program[int]:
    """Return how many messages of undone turns wait for runs that do not go back. `back` has the members by their ids.

    Raises UsageError if such a run has taken one."""
    numbers, waiting = orjson.dumps(list(inside)).decode(), 0
    for sender, turn in back.items():
        [sent] = yield Batch(_SENT_OUTSIDE(tenant=tenant, sender=sender, turn=turn, inside=numbers))
        for run_id, sent_turn, state in sent:
            if state == 1:
                raise UsageError(
                    f"run {run_id!r} has received what {sender!r} sent in turn {sent_turn}, which would be undone, and "
                    "it is no member that could go back: it would receive it twice. Nothing has changed; go back to a "
                    "turn after that"
                )
            waiting += 1
    return waiting


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
    """Lock the family, compute the line again, and take back the members beyond it."""
    yield Batch(LOCK_FAMILY(tenant=tenant, root=root))
    plan = yield from _plan(tenant, root, team, member, turn)
    refuse_effects(plan.effects, keys.choice, "while the team was to be rewound")
    back = plan.back()
    names = {run: f"{team}/{name}" for name, run in plan.runs.items()}
    places = yield from _states_before(tenant, names, {run: to for run, to in back.items() if to < plan.ended[run]})
    members = orjson.dumps([*names, *plan.children]).decode()
    for run, to_turn in back.items():
        yield Batch(_WITHDRAW(tenant=tenant, sender=names[run], turn=to_turn, members=members))
    yield from _sent_outside(tenant, [*names, *plan.children], {names[run]: back[run] for run in back})
    for run, to_turn in sorted(back.items()):
        yield from _member_back(tenant, run, to_turn, plan.undone.get(run, []), now)
        if keys.choice == "new":
            yield from rewind.renew(tenant, run, keys.seed)
    for child, child_id in plan.children.items():
        yield Batch(*drop_run(tenant, child))
        thread = yield from try_thread(tenant, thread_name(child_id))
        if thread is not None:
            thread, tree = yield from gc.lock_tree(tenant, thread.name, thread.thread)
            yield from gc.remove_threads(tenant, tree, [thread])
    yield from set_states(tenant, places, chances[: len(places)], now, f"rewound with {member}")
    return plan


def _member_back(tenant: int, run: int, turn: int, undone: list[int], now: int) -> Program[None]:
    """Return the messages of a member's undone turns to its box, drop their journal, and let it begin again."""
    key = {"tenant": tenant, "run": run}
    [[(last, seq)], dead] = yield Batch(_LAST(**key), _DEAD(**key, turn=turn))
    revived = (_REVIVE(**key, key=mail_key, header=sent_again(header)) for mail_key, header in dead)
    yield Batch(
        *revived,
        _RETURN(**key, turn=turn),
        _FORGET_ANSWERS(**key),
        *(drop(**key, undone=orjson.dumps(undone).decode()) for drop in _DROP),
        _BACK(**key, turn=turn, since=max(1, last, seq), now=now),
    )


def _states_before(tenant: int, names: Mapping[int, str], back: Mapping[int, int]) -> Program[list[OldState]]:
    """Return the states that members had after the turns they go back to. Raises UsageError if one is gone."""
    places: list[OldState] = []
    for run, turn in sorted(back.items()):
        name = thread_name(names[run])
        thread = yield from try_thread(tenant, name)
        [records] = yield Batch(_RECORD(tenant=tenant, run=run, turn=turn))
        if not records and thread is not None:  # none of these turns has changed the state
            [records] = yield Batch(_FIRST_RECORD(tenant=tenant, tree=thread.tree, thread=thread.thread))
        text = (yield from state_at(tenant, name, records[0][0])) if records else None
        if text is None:
            raise UsageError(
                f"the state of {names[run]!r} after turn {turn} is not kept any more: retention removed it. "
                "Choose a later turn"
            )
        places.append(OldState(name, names[run], text))
    return places
