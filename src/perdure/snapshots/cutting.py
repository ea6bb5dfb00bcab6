"""What a thread or a run was at an instant: what was recorded later is cut off its copy.

Records of threads and entries of journals never change and have times, so what is left is exact. What a run's row was
is derived from its journal, because later changes overwrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from perdure.errors import HistoryGone
from perdure.log.ancestors import find_before, sample_line
from perdure.log.ids import first_id
from perdure.log.labels import MAIN
from perdure.log.reading import read_live
from perdure.log.thread_table import MINUTE_US, ThreadRow
from perdure.runs.calls.messages import NAME as RECEIVE
from perdure.runs.journal.entries import DONE, Entry, unpack
from perdure.runs.journal.rows import NEVER, is_swept
from perdure.runs.journal.standing import UNDO
from perdure.runs.tables import ANSWER, ASK, MAIL, RUN_VALUE, TAKEN, WAITING_MAIL
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.models import moment
from perdure.transfers.run_rows import COPIED, RunPart

_LABELLED = Sql(
    """SELECT max(CASE WHEN record < :cut THEN record ELSE 0 END) FROM label
    WHERE tenant = :tenant AND thread = :thread AND space = :space HAVING count(*) > 0"""
)
_RECORD = Sql("SELECT hash, at FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_OF_THREAD = "tenant = :tenant AND thread = :thread"
_CUT = (
    # Of a task's writes it is not known when they came: those of the newest checkpoint of its namespace are left out.
    Sql(f"DELETE FROM label WHERE {_OF_THREAD} AND record >= :cut"),
    Sql(
        f"""DELETE FROM write WHERE {_OF_THREAD} AND NOT EXISTS (SELECT 1 FROM label l WHERE l.tenant = write.tenant
            AND l.thread = write.thread AND l.space = write.space AND l.id > write.id)"""
    ),
    Sql(f"DELETE FROM pin WHERE {_OF_THREAD} AND (at > :at OR record >= :cut)"),
    Sql(
        f"""UPDATE space SET head = (SELECT max(l.record) FROM label l
            WHERE l.tenant = space.tenant AND l.thread = space.thread AND l.space = space.space) WHERE {_OF_THREAD}"""
    ),
    Sql(
        f"""UPDATE thread SET head = :head, head_hash = :head_hash, updated_at = :updated_at, active = :active
        WHERE {_OF_THREAD}"""
    ),
    Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id >= :cut"),
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


def cut_thread(tenant: int, row: ThreadRow, at: int) -> Program[None]:
    """Cut a copy of a thread, in a store that holds nothing else of its tree."""
    head, cut = (yield from head_at(tenant, row, at)), first_after(at)
    key = {"tenant": tenant, "thread": row.thread}
    facts: dict[str, Any] = {"head": head, "head_hash": None, "updated_at": row.created_at}
    if head is not None:
        [[(facts["head_hash"], facts["updated_at"])]] = yield Batch(_RECORD(tenant=tenant, tree=row.tree, id=head))
    facts |= {"tree": row.tree, "cut": cut, "at": at, "active": facts["updated_at"] // MINUTE_US}
    yield Batch(*(sql(**key, **facts) for sql in _CUT))


# --- runs


def cut_family(parts: Sequence[RunPart], at: int) -> list[RunPart]:
    """Cut a run and those that it started. Raises HistoryGone if one of them was overwritten since."""
    return [_cut_run(part, at) for part in parts if part.row.created_at <= at]


def later_entries(part: RunPart, at: int) -> list[tuple[int, Entry]]:
    """Return the kinds and entries that a run has written after an instant."""
    entries = [(kind, unpack(body)) for _, kind, body in part.journal]
    return [(kind, entry) for kind, entry in entries if entry.at > at]


def _cut_run(part: RunPart, at: int) -> RunPart:
    row, later = part.row, later_entries(part, at)
    journal = [one for one in part.journal if unpack(one[2]).at <= at]
    tables = {copy.table.name: some for copy, some in zip(COPIED, part.copied, strict=True)}
    has_changed = row.changed_at > at
    why = ""
    if has_changed and is_swept(row):
        why = "retention has removed its journal"
    elif has_changed and row.since and not journal:
        why = "it has begun a new round since"
    elif later and ((later[0][1].extra or {}).get("retried") or later[0][1].path.startswith(UNDO)):
        why = "it was retried or undone since"
    elif row.turn is not None and (has_changed or later or any(mail[-1] > at for mail in tables["mail"])):
        why = "it is a member of a team and has taken messages since"
    if why:
        raise HistoryGone(f"how run {row.id!r} was at {moment(at)} is not on record: {why}. A snapshot would have it")
    tables["ask"], tables["answer"] = _cut_questions(tables["ask"], tables["answer"], journal, at)
    tables["mail"] = _cut_mail(tables["mail"], journal, at)
    if has_changed:
        kind = RUN_VALUE.names.index("kind")
        tables["run_value"] = [value for value in tables["run_value"] if value[kind] != "outcome"]
        asks = any(ask[ASK.names.index("status")] == "open" for ask in tables["ask"])
        row = row._replace(
            status="waiting" if asks else "queued", wake_at=NEVER, request=None, waiting=None, keep_until=None
        )
    return part._replace(row=row, journal=journal, copied=[tables[copy.table.name] for copy in COPIED])


def _cut_questions(asks: Any, answers: Any, journal: Any, at: int) -> tuple[list[Any], list[Any]]:
    """Open the questions again that were open then, and drop later ones and later answers."""
    path, asked_at, status, answer = (ASK.names.index(name) for name in ("path", "asked_at", "status", "answer"))
    earlier = [one for one in answers if one[ANSWER.names.index("at")] <= at]
    ended = {unpack(body).path for _, kind, body in journal if kind == DONE}
    answered = {one[path] for one in earlier} - {one[path] for one in answers if one not in earlier}
    kept = []
    for one in map(list, asks):
        if one[asked_at] <= at:
            if one[path] not in ended | answered:
                one[status], one[answer] = "open", None
            kept.append(one)
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
            kept.append(one)
    return kept
