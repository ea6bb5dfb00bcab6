"""The history of a run or a thread as a chain of hashes, and its signed head: whether history was rewritten since.

Each hash covers the one before it and the entry as it is stored, nothing of the store around it: a copy in another
store has the same chain. A head names every entry with a hash of its own, so that a check can say which one differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from blake3 import blake3

from perdure.errors import Damaged, JournalDamaged
from perdure.runs.engine import flows
from perdure.runs.journal.entries import KIND_NAMES, unpack
from perdure.runs.journal.journal import ROWS, SEQ_MAX, read_whole
from perdure.runs.journal.rows import RunRow
from perdure.snapshots.signature import KeyPath, check, signed
from perdure.storage.program import Batch, Program, Rows, drive, read
from perdure.threads.models import moment

if TYPE_CHECKING:
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore

_Link = tuple[str, str, str, datetime, bytes]  # place, kind, name, when, what is hashed


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A link of the chain. `hash` covers the hash before it and this entry, `digest` this entry alone."""

    place: str  # the number in the journal, or the checkpoint's id
    kind: str
    name: str
    at: datetime
    hash: str
    digest: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The chain of a run or a thread, oldest entry first. `problem`: why the store itself says that it is damaged."""

    kind: str  # run, thread
    name: str
    origin: str  # tells a run from a later one of its id
    closed: bool  # nothing can be written before the last entry: parallel branches of a running run may
    entries: tuple[AuditEntry, ...]
    problem: str | None = None

    def head(self, sign_with: KeyPath | None = None) -> bytes:
        """What a later `check` needs, as a file: the chain's hashes, signed with a private Ed25519 key (PEM) or not."""
        known = {name: getattr(self, name) for name in ("kind", "name", "origin", "closed")}
        links = [[entry.place, entry.digest] for entry in self.entries]
        last = self.entries[-1].hash if self.entries else ""
        return signed({**known, "entries": links, "hash": last}, sign_with)

    def check(self, head: bytes, key: KeyPath | None = None) -> list[str]:
        """What was rewritten since that head was made: nothing, or a line for each entry. Raises Damaged if the head
        itself was changed, or, with `key` (a public key, PEM), another key signed it."""
        try:
            known = check(head, key)
        except Damaged as error:
            raise Damaged(f"the head cannot be trusted: {error}") from error
        if (known["kind"], known["name"], known["origin"]) != (self.kind, self.name, self.origin):
            return [f"the head is of another {known['kind']}: {known['name']}"]
        now = {entry.place: entry for entry in self.entries}
        then = dict(known["entries"])
        found = []
        for place, digest in then.items():
            if place not in now:
                found.append(f"entry {place} was removed")
            elif now[place].digest != digest:
                found.append(f"entry {place} was changed: {now[place].kind} {now[place].name}")
        if known["closed"]:
            end = max((at for at, entry in enumerate(self.entries, 1) if entry.place in then), default=0)
            added = [entry for entry in self.entries[:end] if entry.place not in then]
            found += [f"entry {entry.place} was added: {entry.kind} {entry.name}" for entry in added]
        return found


def audit_run(store: SnapshotStore | Snapshot, id: str) -> Audit:
    """The journal of a run, of a store or a snapshot, as a chain of hashes."""
    ctx = _store(store)._context
    tenant, row = drive(ctx.driver, flows.locate(ctx, id))
    rows, problem = drive(ctx.driver, read(partial(_journal, tenant, row)))
    origin = bytes(row.incarnation).hex()
    return Audit("run", id, origin, row.status != "running", _chain(f"run {id} {origin}", map(_link, rows)), problem)


def audit_thread(store: SnapshotStore | Snapshot, name: str) -> Audit:
    """The checkpoints of a thread, of a store or a snapshot, as a chain of hashes."""
    points = list(_store(store).thread(name).history())[::-1]
    links = ((point.id, point.kind, point.note or "", point.at, point._record.hash) for point in points)
    return Audit("thread", name, "", True, _chain(f"thread {name}", links))


def _store(source: Any) -> Any:
    return getattr(source, "store", source)


def _journal(tenant: int, row: RunRow) -> Program[tuple[Rows, str | None]]:
    """The rows of a journal, and what is wrong with it: they are shown all the same."""
    try:
        return (yield from read_whole(tenant, row)).rows, None
    except JournalDamaged as error:
        [rows] = yield Batch(ROWS(tenant=tenant, run=row.run, since=row.since, last=SEQ_MAX), last=True)
        return rows, str(error)


def _link(row: Any) -> _Link:
    seq, kind, body = row
    try:
        entry = unpack(body)
        name, at = f"{entry.path} {entry.name}", moment(entry.at)
    except (JournalDamaged, TypeError):
        name, at, body = "(cannot be read)", moment(0), repr(body).encode()
    return str(seq), KIND_NAMES.get(kind, str(kind)), name, at, orjson.dumps([seq, kind]) + body


def _chain(origin: str, links: Iterable[_Link]) -> tuple[AuditEntry, ...]:
    made: list[AuditEntry] = []
    before = blake3(origin.encode()).digest()
    for place, kind, name, at, body in links:
        digest = blake3(body).digest()
        before = blake3(before + digest).digest()
        made.append(AuditEntry(place, kind, name, at, before.hex(), digest.hex()))
    return tuple(made)
