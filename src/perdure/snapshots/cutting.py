"""What a thread or a run was at an instant: what was recorded later is cut off, from a copy or in place.

Records of threads and entries of journals never change and have times, so what is left is exact. What a run's row was
is derived from its journal, because later changes overwrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.errors import HistoryGone, JournalDamaged, UsageError
from perdure.log.ancestors import find_before, sample_line
from perdure.log.ids import first_id
from perdure.log.labels import MAIN
from perdure.log.reading import read_live
from perdure.log.removals import known_from
from perdure.log.thread_table import MINUTE_US, ThreadRow
from perdure.runs.calls.messages import NAME as RECEIVE
from perdure.runs.history.state_history import checkpoint_at
from perdure.runs.journal.entries import DIGEST_MASK, DONE, INTENT, Entry, Recorded, entry_digest, unpack
from perdure.runs.journal.journal import ROWS, SEQ_MAX
from perdure.runs.journal.rows import (
    BY_NUMBER,
    COLUMNS,
    FINISHED,
    NEVER,
    RUN_ENCRYPTED,
    TASK,
    WAITS,
    is_swept,
    look_up,
    look_up_all,
)
from perdure.runs.journal.standing import UNDO
from perdure.runs.run_table import TEAM, RunRow
from perdure.runs.tables import ANSWER, ASK, MAIL, RUN_VALUE, TAKEN, WAITING_MAIL
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.models import moment
from perdure.transfers.run_rows import COPIED, RunPart, encode, read_run

_LABELLED = Sql(
    """SELECT max(CASE WHEN record < :cut THEN record ELSE 0 END) FROM label
    WHERE tenant = :tenant AND thread = :thread AND space = :space HAVING count(*) > 0"""
)
_RECORD = Sql("SELECT hash, at FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_OF_THREAD = "tenant = :tenant AND thread = :thread"
_SET_BACK = (
    # Of a task's writes it is not known when they came: those of the newest checkpoint of its namespace are left out.
    Sql(f"DELETE FROM label WHERE {_OF_THREAD} AND record >= :cut"),
    Sql(
        f"""DELETE FROM write WHERE {_OF_THREAD} AND NOT EXISTS (SELECT 1 FROM label l WHERE l.tenant = write.tenant
            AND l.thread = write.thread AND l.space = write.space AND l.id > write.id)"""
    ),
    Sql(
        f"""UPDATE space SET head = (SELECT max(l.record) FROM label l
            WHERE l.tenant = space.tenant AND l.thread = space.thread AND l.space = space.space) WHERE {_OF_THREAD}"""
    ),
    Sql(
        f"""UPDATE thread SET head = :head, head_hash = :head_hash, updated_at = :updated_at, active = :active,
            asked_at = NULL, asked_id = NULL WHERE {_OF_THREAD}"""
    ),
)
# A subgraph's checkpoints, and interrupts that a task raises, come beside the head of a thread t and leave it.
BESIDE = """(t.asked_at > :at OR EXISTS (
    SELECT 1 FROM space s WHERE s.tenant = t.tenant AND s.thread = t.thread AND s.head >= :cut))"""
_BESIDE = Sql(f"SELECT 1 FROM thread t WHERE {_OF_THREAD} AND {BESIDE}")
_CUT = (
    Sql(f"DELETE FROM pin WHERE {_OF_THREAD} AND (at > :at OR record >= :cut)"),
    Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id >= :cut"),
)
# The runs that may have been different: what happened since has changed their rows, or came from outside.
_LATER = Sql(
    f"""SELECT {COLUMNS} FROM run r WHERE tenant = :tenant AND function NOT LIKE '{TASK}%' AND (status = 'running'
        OR changed_at > :at
        OR EXISTS (SELECT 1 FROM answer a WHERE a.tenant = r.tenant AND a.run = r.run AND a.at > :at)
        OR EXISTS (SELECT 1 FROM mail m WHERE m.tenant = r.tenant AND m.run = r.run AND m.at > :at)) ORDER BY run""",
    opens=RUN_ENCRYPTED,
)
_FORKED = Sql("SELECT id FROM run WHERE tenant = :tenant AND origin = :run AND origin_seq >= :seq ORDER BY id LIMIT 1")
_DROP_ENTRIES = Sql("DELETE FROM journal WHERE tenant = :tenant AND run = :run AND seq IN {numbers:later}")
_DROP_OUTCOME = Sql("DELETE FROM run_value WHERE tenant = :tenant AND run = :run AND kind = 'outcome'")
_SET_RUN = Sql(
    """UPDATE run SET status = :status, wake_at = :wake_at, request = :request, waiting = :waiting,
        keep_until = :keep_until, entries = :entries, digest = :digest, seq = :seq
    WHERE tenant = :tenant AND run = :run""",
    seals=WAITS,
)
_REPLACED = ("ask", "answer", "mail")  # tables whose rows have changed since, or came later
_NAMES = {"thread": "threads were", "run": "runs were", "memory_item": "versions of items were"}


def check_complete(tenant: int, table: str, at: int, here: str) -> Program[None]:
    """Raise HistoryGone unless every row of a table that was there at an instant is still `here`."""
    known = (yield from known_from(tenant))[table]
    if known > at:
        raise HistoryGone(
            f"{_NAMES[table]} removed since {moment(at):%Y-%m-%d %H:%M:%S%z}, so that instant cannot be shown: "
            f"{here} is complete from {moment(known):%Y-%m-%d %H:%M:%S%z} on. Snapshots keep what is removed later"
        )


def first_after(at: int) -> int:
    """Return the smallest id that a record which is made after an instant can have. Ids have milliseconds."""
    return first_id(at - at % 1000 + 1000)


def head_at(tenant: int, row: ThreadRow, at: int) -> Program[int | None]:
    """Return the head that a thread had at an instant; None if it had no checkpoint. Raises HistoryGone."""
    if row.head is None:
        return None
    cut = first_after(at)
    before = yield from find_before(tenant, row.tree, row.head, cut)
    is_whole = before is not None and (before.parent is None if before.id >= cut else before.body is not None)
    if before is None or not is_whole:
        newest = yield from read_live(tenant, row.tree, row.head)
        left = (yield from sample_line(tenant, row.tree, newest, 2)) if newest is not None else []
        known = f": its history begins at {moment(left[0].at)}" if left else ""
        raise HistoryGone(f"the checkpoint that thread {row.name!r} had at {moment(at)} was removed{known}")
    [labelled] = yield Batch(_LABELLED(tenant=tenant, thread=row.thread, space=MAIN, cut=cut))
    if labelled:  # checkpoints of an adapter need not follow the newest one
        return labelled[0][0] or None
    return before.id if before.id < cut else None


def has_changed_beside(tenant: int, thread: int, at: int) -> Program[bool]:
    """Return whether a subgraph made checkpoints, or a task raised an interrupt, after an instant."""
    return bool((yield Batch(_BESIDE(tenant=tenant, thread=thread, at=at, cut=first_after(at))))[0])


def cut_thread(tenant: int, row: ThreadRow, at: int) -> Program[None]:
    """Cut a copy of a thread, in a store that holds nothing else of its tree."""
    head = yield from head_at(tenant, row, at)
    yield from set_back(tenant, row, head, at)
    yield Batch(*(sql(tenant=tenant, thread=row.thread, tree=row.tree, at=at, cut=first_after(at)) for sql in _CUT))


def set_back(tenant: int, row: ThreadRow, head: int | None, at: int) -> Program[None]:
    """Let a thread end in an older checkpoint. Later ones stay beside it, without their labels."""
    facts: dict[str, Any] = {"head": head, "head_hash": None, "updated_at": row.created_at}
    if head is not None:
        [[(facts["head_hash"], facts["updated_at"])]] = yield Batch(_RECORD(tenant=tenant, tree=row.tree, id=head))
    facts |= {"cut": first_after(at), "active": facts["updated_at"] // MINUTE_US}
    yield Batch(*(sql(tenant=tenant, thread=row.thread, **facts) for sql in _SET_BACK))


# --- runs


def cut_family(parts: Sequence[RunPart], at: int) -> list[RunPart]:
    """Cut a run and those that it started. Raises HistoryGone if one of them was overwritten since."""
    return [_cut_run(part, at) for part in parts if part.row.created_at <= at]


def later_entries(part: RunPart, at: int) -> list[tuple[int, Entry]]:
    """Return the kinds and entries that a run has written after an instant."""
    entries = [(kind, unpack(body)) for _, kind, body in part.journal]
    return [(kind, entry) for kind, entry in entries if entry.at > at]


class RunThen(NamedTuple):
    """What is known of a run at an instant."""

    run: int
    parent: int | None
    content: bytes | None  # what is compared; None: there was no such run
    had_effects: bool  # since, or it may have had
    had_undone: bool  # effects since, that is
    cut: int | None  # the first of its own entries that came later


def runs_then(tenant: int, at: int, ids: Sequence[str]) -> Program[dict[str, RunThen]]:
    """Return the runs that may have changed since an instant, by id, and those of `ids`. Raises HistoryGone."""
    [later] = yield Batch(_LATER(tenant=tenant, at=at))
    rows = {row.id: row for row in map(RunRow._make, later)}
    rows |= yield from look_up_all(tenant, ids)
    then: dict[str, RunThen] = {}
    for id, row in rows.items():
        part = yield from read_run(tenant, row)
        intents = [entry for kind, entry in later_entries(part, at) if kind == INTENT]
        content, lost = None, row.since > 0 and row.created_at > at  # what it did in earlier rounds is not known
        if row.created_at <= at:
            content = _content(_cut_run(part, at))
        undone = any(entry.path.startswith(UNDO) for entry in intents)
        own = [seq for seq, _, body in part.journal if seq > row.origin_seq and unpack(body).at > at]
        then[id] = RunThen(row.run, row.parent, content, lost or bool(intents), undone, min(own, default=None))
    return then


def run_now(tenant: int, id: str) -> Program[bytes | None]:
    """Return what is compared of a run; None if there is none."""
    row = yield from look_up(tenant, id)
    if row is None:
        return None
    try:
        return _content((yield from read_run(tenant, row)))
    except JournalDamaged:
        return b""


def _content(part: RunPart) -> bytes:
    """Return the hash of what is compared: where a run has been, whichever process has it."""
    moving = part.row.status in ("queued", "running", "waiting")
    copied = [[tuple(one) for one in some] for some in part.copied]
    return blake3(
        encode([part.row.run, "open" if moving else part.row.status, part.row.request, part.journal, copied])
    ).digest()


def refuse_forks(tenant: int, run: int, id: str, cut: int) -> Program[None]:
    """Raise UsageError if a fork shares an entry of a run from `cut` on."""
    if shared := (yield Batch(_FORKED(tenant=tenant, run=run, seq=cut)))[0]:
        raise UsageError(f"run {id!r} was not rewound: its fork {shared[0][0]!r} shares what came later")


def cut_in_place(tenant: int, run: int, at: int) -> Program[tuple[bool, int | None]]:
    """Cut a run that is locked. Return whether it had effects since, and the checkpoint of the state that it had.

    Raises HistoryGone, and UsageError if a fork shares what came later.
    """
    key = {"tenant": tenant, "run": run}
    [[values]] = yield Batch(BY_NUMBER(**key))
    part = yield from read_run(tenant, RunRow._make(values))
    then = _cut_run(part, at)
    if then is part:
        return False, _checkpoint(then)
    [own] = yield Batch(ROWS(**key, since=then.row.since, last=SEQ_MAX))  # without those that a fork shares
    later = {seq: kind for seq, kind, body in own if unpack(body).at > at}
    if later:
        yield from refuse_forks(tenant, run, then.row.id, min(later))
    kept = [one for one in own if one[0] not in later]
    facts = {name: getattr(then.row, name) for name in ("status", "wake_at", "request", "waiting", "keep_until")}
    facts |= {"entries": len(kept), "seq": max([then.row.since, then.row.origin_seq, *(one[0] for one in kept)])}
    digest = sum(entry_digest(run, *one) for one in kept) & DIGEST_MASK
    statements = [_DROP_ENTRIES(**key, later=orjson.dumps([*later]).decode()), _SET_RUN(**key, **facts, digest=digest)]
    if part.row.status in FINISHED and part.row.status != then.row.status:
        statements.append(_DROP_OUTCOME(**key))
    for copy, old, new in zip(COPIED, part.copied, then.copied, strict=True):
        if copy.table.name in _REPLACED and old != new:
            statements += [copy.drop(tenant=tenant, number=run), *copy.inserts(tenant, new)]
    yield Batch(*statements)
    return INTENT in later.values(), _checkpoint(then)


def _checkpoint(part: RunPart) -> int | None:
    entries = [Recorded(part.row.run, seq, kind, unpack(body)) for seq, kind, body in part.journal]
    return checkpoint_at(part.row, entries, None)


def _cut_run(part: RunPart, at: int) -> RunPart:
    """Return a run as it was: the same object if nothing has happened since. Raises HistoryGone."""
    row, later = part.row, later_entries(part, at)
    tables = {copy.table.name: some for copy, some in zip(COPIED, part.copied, strict=True)}
    has_changed = row.changed_at > at
    if not (has_changed or later or any(one[-1] > at for name in ("answer", "mail") for one in tables[name])):
        return part
    journal = [one for one in part.journal if unpack(one[2]).at <= at]
    why = ""
    if row.status == "exported" and has_changed:
        why = "it was moved to another store since"
    elif has_changed and is_swept(row):
        why = "retention has removed its journal"
    elif has_changed and row.since and not journal:
        why = "it has begun a new round since"
    elif row.reopened_at > at:
        why = "it was retried, undone or rewound since"
    elif row.turn is not None or row.function == TEAM:
        why = "it is a member of a team and has taken messages since"
    if why:
        raise HistoryGone(f"how run {row.id!r} was at {moment(at)} is not on record: {why}. A snapshot would have it")
    tables["ask"], tables["answer"] = _cut_questions(part, journal, at)
    tables["mail"] = _cut_mail(tables["mail"], journal, at)
    if has_changed and row.status in FINISHED:
        kind = RUN_VALUE.names.index("kind")
        tables["run_value"] = [value for value in tables["run_value"] if value[kind] != "outcome"]
    if has_changed:
        asks = any(ask[ASK.names.index("status")] == "open" for ask in tables["ask"])
        row = row._replace(
            status="waiting" if asks else "queued", wake_at=NEVER, request=None, waiting=None, keep_until=None
        )
    return part._replace(row=row, journal=journal, copied=[tables[copy.table.name] for copy in COPIED])


def _cut_questions(part: RunPart, journal: Any, at: int) -> tuple[list[Any], list[Any]]:
    """Open the questions again that were open then, and drop later ones and later answers."""
    path, asked_at, status, answer = (ASK.names.index(name) for name in ("path", "asked_at", "status", "answer"))
    asks, answers = (some for copy, some in zip(COPIED, part.copied, strict=True) if copy.table in (ASK, ANSWER))
    earlier = [one for one in answers if one[ANSWER.names.index("at")] <= at]
    ended = {unpack(body).path for _, kind, body in journal if kind == DONE}
    answered = {one[path] for one in earlier} - {one[path] for one in answers if one not in earlier}
    kept = []
    for one in map(list, asks):
        if one[asked_at] <= at:
            was_closed = one[status] == "closed" and part.row.changed_at <= at  # a run closes them when it ends
            if one[path] not in ended | answered and not was_closed:
                one[status], one[answer] = "open", None
            kept.append(tuple(one))
    return kept, earlier


def _cut_mail(mail: Any, journal: Any, at: int) -> list[Any]:
    """Drop later messages. Those that were received later wait again: a run receives those of a topic in order."""
    topic, state, sent = (MAIL.names.index(name) for name in ("topic", "state", "at"))
    entries = [unpack(body) for _, kind, body in journal if kind == DONE]
    received = Counter(
        (entry.extra or {}).get("topic") for entry in entries if entry.name == RECEIVE and entry.value is not None
    )
    kept = []
    for one in map(list, mail):
        if one[sent] <= at:
            if one[state] == TAKEN:
                received[one[topic]] -= 1
                one[state] = TAKEN if received[one[topic]] >= 0 else WAITING_MAIL
            kept.append(tuple(one))
    return kept
