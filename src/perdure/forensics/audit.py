"""The history of a run or a thread as a chain of hashes, and its signed head: whether history was rewritten since.

Each hash covers the one before it and the entry as it is stored, nothing of the store around it: a copy in another
store has the same chain. A head names every entry with a hash of its own, so that a check can say which one differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from blake3 import blake3

from perdure.errors import Damaged, JournalDamaged
from perdure.runs.engine import flows
from perdure.runs.journal.entries import KIND_NAMES, unpack
from perdure.runs.journal.journal import ROWS, SEQ_MAX
from perdure.runs.journal.rows import value_of
from perdure.runs.run_table import RunRow
from perdure.snapshots.signature import KeyPath, check, signed
from perdure.storage.program import Batch, Program, Rows, drive, read
from perdure.threads.models import moment
from perdure.transfers.run_rows import read_run

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.handle import Snapshot

_Link = tuple[str, str, str, datetime, bytes]  # place, kind, name, when, what is hashed
_OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A link of the chain. `hash` covers the hash before it and this entry, `digest` this entry alone."""

    place: str  # the number in the journal, "arguments", "outcome"; the checkpoint's id
    kind: str
    name: str
    at: datetime
    hash: str
    digest: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The chain of a run or a thread, oldest entry first. `problem` is the damage that the store itself reports."""

    kind: str  # run, thread
    name: str
    origin: str  # tells a run from a later one of its id
    closed: bool  # nothing can be written before the last entry: parallel branches of a running run may
    entries: tuple[AuditEntry, ...]
    problem: str | None = None

    def head(self, sign_with: KeyPath | None = None) -> bytes:
        """Return the hashes of the chain for a later `check`, signed if a private Ed25519 key (PEM) is named."""
        known = {name: getattr(self, name) for name in ("kind", "name", "origin", "closed")}
        links = [[entry.place, entry.digest] for entry in self.entries]
        last = self.entries[-1].hash if self.entries else ""
        return signed({**known, "entries": links, "hash": last}, sign_with)

    def check(self, head: bytes, key: KeyPath | None = None) -> list[str]:
        """Return a line for each entry that was rewritten since a head was written.

        Raises Damaged if the head itself was changed, or if another key than `key` (a public key, PEM) signed it.
        """
        try:
            known = check(head, key)
            kind, name, origin, then = (known[part] for part in ("kind", "name", "origin", "entries"))
        except (Damaged, KeyError) as error:
            raise Damaged(f"the head cannot be trusted: {error}") from error
        if (kind, name, origin) != (self.kind, self.name, self.origin):
            return [f"the head is of another {kind}: {name}"]
        now = {entry.place: entry for entry in self.entries}
        problems = [] if self.problem is None else [self.problem]
        for place, digest in then:
            if place not in now:
                problems.append(f"entry {place} was removed")
            elif now[place].digest != digest:
                problems.append(f"entry {place} was changed: {now[place].kind} {now[place].name}")
        if known["closed"]:
            old = {place for place, _ in then}
            last = max((at for at, one in enumerate(self.entries) if one.place in old - {_OUTCOME}), default=0)
            added = [entry for entry in self.entries[:last] if entry.place not in old]
            problems += [f"entry {entry.place} was added: {entry.kind} {entry.name}" for entry in added]
        return problems


def audit_run(store: Store | Snapshot, id: str) -> Audit:
    """Return the arguments, the journal and the outcome of a run as a chain of hashes."""
    ctx = getattr(store, "store", store)._context
    tenant, row = drive(ctx.driver, flows.locate(ctx, id))
    problems: list[str] = []

    def attempt(program: Callable[[], Program[Any]]) -> Any:
        try:
            return drive(ctx.driver, read(program))
        except (Damaged, JournalDamaged) as error:  # the rest is shown all the same
            problems.append(str(error))
            return b""

    part = attempt(partial(read_run, tenant, row))
    rows = part.journal if part else attempt(partial(_journal, tenant, row))
    arguments, outcome = (attempt(partial(value_of, tenant, row.run, kind)) for kind in ("args", _OUTCOME))
    links = [("arguments", "arguments", row.function, moment(row.created_at), arguments or b""), *map(_link, rows)]
    if outcome is not None:
        links.append((_OUTCOME, _OUTCOME, row.status, moment(row.changed_at), outcome))
    origin, problem = bytes(row.incarnation).hex(), problems[0] if problems else None
    return Audit("run", id, origin, row.status != "running", _chain(f"run {id} {origin}", links), problem)


def audit_thread(store: Store | Snapshot, name: str) -> Audit:
    """Return the checkpoints of a thread as a chain of hashes."""
    thread = store.thread(name)
    links = [(point.id, point.kind, point.note or "", point.at, point._record.hash) for point in thread.history()]
    problems = thread.verify().problems if links else ()
    problem = f"checkpoint {problems[0].checkpoint}: {problems[0].what}" if problems else None
    return Audit("thread", name, "", True, _chain(f"thread {name}", links[::-1]), problem)


def _journal(tenant: int, row: RunRow) -> Program[Rows]:
    [rows] = yield Batch(ROWS(tenant=tenant, run=row.run, since=row.since, last=SEQ_MAX), last=True)
    return rows


def _link(row: Any) -> _Link:
    seq, kind, body = row
    try:
        entry = unpack(body)
        name, at = f"{entry.path} {entry.name}", moment(entry.at)
    except (JournalDamaged, TypeError):
        name, at, body = "(cannot be read)", moment(0), repr(body).encode()
    return str(seq), KIND_NAMES.get(kind, str(kind)), name, at, orjson.dumps([seq, kind]) + body


def _chain(origin: str, links: Iterable[_Link]) -> tuple[AuditEntry, ...]:
    entries: list[AuditEntry] = []
    before = blake3(origin.encode()).digest()
    for place, kind, name, at, body in links:
        digest = blake3(body).digest()
        before = blake3(before + digest).digest()
        entries.append(AuditEntry(place, kind, name, at, before.hex(), digest.hex()))
    return tuple(entries)
