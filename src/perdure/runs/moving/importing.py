"""Taking a run into a store, from the file that it was exported to: all of it in one transaction, or nothing.

It keeps its id, its incarnation (so its keys) and its history; numbers are this store's own. A file is imported once:
it is marked (`<path>.imported`) before the transaction, so that after a kill in between only the same store may try it
again. A copy of the file has no mark: whoever makes copies must know where the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from perdure.errors import UsageError
from perdure.log.append import Place, append, as_subprogram, base_after, prepare
from perdure.log.cache import Base
from perdure.log.reading import read_live
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import next_number, try_thread
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import blob_hash, blob_statements, refer_statement
from perdure.runs.journal.entries import DIGEST_MASK, entry_digest, unpack
from perdure.runs.journal.rows import RunRow
from perdure.runs.moving.exporting import _store_id
from perdure.runs.moving.packages import Package, RunPart, StatePart, read_package
from perdure.storage.columns import ANSWER, ASK_ANSWER, INPUT, JOURNAL, QUESTION, SIGNAL, TERMS, WAITING
from perdure.storage.files import sync_file, sync_folder
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, Statement, read, write
from perdure.threads.context import Context

_PAGE = 200
_BASES_MAX = 8
_FIELDS = RunRow._fields
_INSERT = Sql(
    f"""INSERT INTO run (tenant, {", ".join(_FIELDS)}, stamp)
    VALUES (:tenant, {", ".join(f":{name}" for name in _FIELDS)}, {{stamp}})""",
    seals={"input": INPUT, "waiting": WAITING},
)
_ROW = Sql(
    "INSERT INTO journal (tenant, run, seq, kind, body, stamp) VALUES (:tenant, :run, :seq, :kind, :body, {stamp})",
    seals={"body": JOURNAL},
)
_ASK = Sql(
    """INSERT INTO ask (tenant, run, path, sort, question, terms, asked_at, deadline, status, answer)
    VALUES (:tenant, :run, :path, :sort, :question, :terms, :asked_at, :deadline, :status, :answer)""",
    seals={"question": QUESTION, "terms": TERMS, "answer": ASK_ANSWER},
)
_ANSWER = Sql(
    "INSERT INTO answer (tenant, run, path, who, value, at) VALUES (:tenant, :run, :path, :who, :value, :at)",
    seals={"value": ANSWER},
)
_SIGNAL = Sql(
    """INSERT INTO signal (tenant, run, topic, seq, key, value, at, received)
    VALUES (:tenant, :run, :topic, :seq, :key, :value, :at, :received)""",
    seals={"value": SIGNAL},
)
# What an export left behind makes room when the run comes back; a fork may still share its history.
_RENAME = Sql("UPDATE run SET id = :id, input = :input WHERE tenant = :tenant AND run = :run", seals={"input": INPUT})


class Import:
    """One import. `claim` and `unclaim` touch files only, the others are flows."""

    def __init__(self, ctx: Context, path: str | Path) -> None:
        self._ctx = ctx
        self.path = Path(path)
        self.package = read_package(self.path)
        self._claim = self.path.with_name(self.path.name + ".imported")
        self._store = ""
        self._is_new = False  # the mark: it was made by this import

    @property
    def id(self) -> str:
        return self.package.runs[0].id

    def look(self) -> Flow[None]:
        self._store = yield from read(_store_id)

    def claim(self) -> None:
        """Mark the file as this store's. Raises UsageError if it is another one's."""
        if self.package.is_finished:
            return  # it runs nowhere
        mine = {"store": self._store, "tenant": self._ctx.tenant_name, "export": self.package.token.hex()}
        try:
            handle = os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if _read_claim(self._claim) != mine:
                raise UsageError(
                    f"{self.path} was imported already, into another store or tenant (see {self._claim.name}); a run "
                    "goes on in one place. If that import failed for good, remove the mark"
                ) from None
            return
        except OSError as error:
            raise UsageError(
                f"{self._claim} cannot be written ({error}): an imported file is marked, so that it is imported once. "
                "Copy it to where you may write"
            ) from error
        self._is_new = True
        with os.fdopen(handle, "wb") as file:
            file.write(orjson.dumps(mine))
            sync_file(file)
        sync_folder(self._claim)

    def unclaim(self) -> None:
        """This store has refused it: another one may take it. Not if it has taken it before."""
        if self._is_new:
            self._claim.unlink(missing_ok=True)

    def write(self) -> Flow[None]:
        ctx = self._ctx
        tenant = yield from ctx.ensure_tenant()
        states = sum(len(run.states) for run in self.package.runs)
        salts = [ctx.entropy(SALT_BYTES) for _ in range(states)]
        yield from write(partial(_write, tenant, self.package, salts, ctx.clock_us()), solo=True)


def _read_claim(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(tenant: int, package: Package, salts: list[bytes], now: int) -> Program[None]:
    numbers: list[int] = []
    fresh = iter(salts)
    for part in package.runs:
        came_back = yield from _make_room(tenant, part)
        number = yield from next_number()
        numbers.append(number)
        yield from _insert(tenant, part, number, numbers)
        yield from _pages(_statements(tenant, part, number, package))
        yield from _insert_states(tenant, part, came_back, fresh, now)


def _make_room(tenant: int, part: RunPart) -> Generator[Batch, list[Rows], bool]:
    """Whether this store had the run before and has exported it. Raises UsageError if it still has it."""
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=part.id))
    if not found:
        return False
    row = RunRow._make(found[0])
    if row.status != "exported" or bytes(row.incarnation) != part.incarnation or row.fence > part.fence:
        raise UsageError(
            f"there is a run {part.id!r} in this store already ({row.status}); nothing was imported. "
            + ("This file is older than what has left this store since" if row.status == "exported" else "")
        )
    name = f"{part.id[:450]}~exported-{row.run}"
    yield Batch(_RENAME(tenant=tenant, run=row.run, id=name, function=row.function, input=row.input))
    return True


def _insert(tenant: int, part: RunPart, number: int, numbers: list[int]) -> Generator[Batch, list[Rows], None]:
    total = sum(entry_digest(number, seq, kind, body) for seq, kind, body in part.journal)
    row = RunRow(
        run=number,
        id=part.id,
        function=part.function,
        version=part.version,
        input=part.input,
        incarnation=part.incarnation,
        parent=None if part.parent is None else numbers[part.parent],
        parent_path=part.parent_path,
        root=numbers[0],
        origin=None,
        origin_since=0,
        origin_seq=part.shared_until,
        origin_entries=0,
        origin_digest=0,
        status=part.status,
        queue=part.queue,
        priority=part.priority,
        owner=None,
        fence=part.fence,
        lease_until=0,
        wake_at=part.wake_at,
        wakeup_pending=0,
        request=part.request,
        waiting=part.waiting,
        entries=len(part.journal),
        digest=total & DIGEST_MASK,
        seq=part.seq,
        since=part.since,
        created_at=part.created_at,
        changed_at=part.changed_at,
        keep_until=part.keep_until,
    )
    yield Batch(_INSERT(tenant=tenant, **row._asdict()))


def _statements(tenant: int, part: RunPart, number: int, package: Package) -> list[Statement]:
    this = {"tenant": tenant, "run": number}
    found = [
        rows.SET_ARGS(**this, incarnation=part.incarnation, args=value)
        if sort == "args"
        else rows.ADD_VALUE(**this, sort=sort, value=value)
        for sort, value in part.values.items()
    ]
    blobs = {blob_hash(blob): blob for blob in package.blobs}
    needed: dict[bytes, None] = {}
    for seq, kind, body in part.journal:
        found.append(_ROW(**this, seq=seq, kind=kind, body=body))
        blob = (unpack(body).more or {}).get("blob")
        if blob is not None:
            needed[blob] = None
    for key in needed:
        found += [blob_statements(tenant, number, blobs[key])[0], refer_statement(tenant, number, key)]
    found += [_ASK(**this, **_fields(ask)) for ask in part.asks]
    found += [_ANSWER(**this, **_fields(answer)) for answer in part.answers]
    found += [_SIGNAL(**this, **_fields(signal)) for signal in part.signals]
    return found


def _fields(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__struct_fields__}


def _pages(statements: list[Statement]) -> Generator[Batch, list[Rows], None]:
    for start in range(0, len(statements), _PAGE):
        yield Batch(*statements[start : start + _PAGE])


# --- its states


def _insert_states(
    tenant: int, part: RunPart, came_back: bool, salts: Any, now: int
) -> Generator[Batch, list[Rows], None]:
    """The checkpoints, with their ids, in a thread of the same name. What a returning run left here is still here."""
    name = thread_name(part.id)
    thread = yield from try_thread(tenant, name, None, lock=True)
    if thread is not None and not came_back and part.states:
        raise UsageError(f"there is a thread {name!r} in this store already; nothing was imported. Delete it first")
    tree = None if thread is None else thread.tree
    bases: dict[int, Base] = {}
    for state in part.states:
        salt = next(salts)
        if tree is not None and (yield from read_live(tenant, tree, state.id)) is not None:
            continue
        base = bases.get(state.parent or 0)
        draft = prepare(
            state.text,
            base,
            salt,
            kind=state.kind,
            note=state.note,
            metadata=state.metadata,
            branching=base is not None,
        )
        done = yield from as_subprogram(append(draft, _place(tenant, name, part.id, state), state.id, state.at or now))
        if done.record is None:
            raise UsageError(f"a state of run {part.id!r} has an id that is taken here; nothing was imported")
        tree = done.tree
        bases[state.id] = base_after(draft, done.record, done.generation)
        while len(bases) > _BASES_MAX:
            del bases[next(iter(bases))]


def _place(tenant: int, name: str, run_id: str, state: StatePart) -> Place:
    return Place(tenant, name, None, {RUN_KEY: run_id}, state.parent, found_nothing=state.parent is None)


def importing(ctx: Context, path: str | Path) -> Generator[Any, Any, str]:
    """All of it: yields flows to drive and plain functions to call, and takes what they give. Gives the run's id."""
    one = yield partial(Import, ctx, path)
    yield one.look()
    yield one.claim
    try:
        yield one.write()
    except UsageError:
        yield one.unclaim
        raise
    return str(one.id)
