"""Bundles: a snapshot, whole or a part of it, as one file that can be given away.

A bundle is an SQLite store that holds one snapshot and refuses writes. Behind its last page, where SQLite does not
look, stands a line of JSON: what it is, its BLAKE3 hash and, on request, a signature.

A further bundle to the same place starts from the one that is there: what has changed is brought, what the new snapshot
does not have is removed, and the file is rewritten without it. It starts from nothing if it would carry over what it
must not: if something was erased since, the store was restored from a backup, or another key signs. The file is made in
a folder of its own and put in its place when it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from perdure.errors import Damaged, NotFound, ReadOnlyStore, UsageError
from perdure.log.erase import scrub
from perdure.memory.labels import path_of
from perdure.runs.calls.state import thread_name
from perdure.snapshots.diff import matches
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.rows import update
from perdure.snapshots.signature import KeyPath, check, public_key, signed
from perdure.storage.objects import is_object_url, redacted_url
from perdure.storage.program import Batch, Program, Sql, drive, read, write, write_repair
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.transfers.catalogue import BackupRow, add_backup
from perdure.transfers.files import AtomicFile, file_path, local_file, work_folder
from perdure.transfers.memory import copy_memory
from perdure.transfers.runs import copy_run, drop_family, run_state
from perdure.transfers.threads import copy_digest
from perdure.transfers.transfer import all_of, transfer_some

if TYPE_CHECKING:
    from perdure.snapshots.store import SnapshotStore

Place = str | os.PathLike[str]
_CHUNK_BYTES = 1 << 20
_STATEMENT_BYTES_MAX = 1 << 20
_ERASURES = Sql("SELECT count(*) FROM erased WHERE tenant = :tenant")
_TABLES = Sql("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
_REFUSAL = "BEGIN SELECT RAISE(ABORT, 'a bundle takes no writes: work in a sandbox of its snapshot'); END"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as its statement describes it. `key`: the public key that signed it, None if none did."""

    place: str
    snapshot: str
    tenant: str
    taken_at: datetime
    manifest: dict[str, Any]
    erasures: int  # of the tenant, before it was made
    bytes: int
    blake3: str
    key: str | None


# Threads, runs, and which namespaces, by their paths.
_Choice = tuple[dict[str, None], dict[str, None], Callable[[str], bool]]


def transfer(
    snapshot: Snapshot,
    place: Place,
    *,
    threads: Sequence[str] | None = None,
    runs: Sequence[str] | None = None,
    namespaces: Sequence[Sequence[str]] | None = None,
    sign: KeyPath | None = None,
) -> Bundle:
    """Copy what this tenant had at a snapshot into a bundle that can be given away: a file, or an object
    (`s3://bucket/name`). `perdure.ops.open_bundle` opens it, read-only, and refuses it if any byte was changed.

    `threads` and `runs` are ids or patterns (`support-*`), `namespaces` their labels, with all below; without any of
    the three it is everything. If a bundle of this tenant is there already, only what has changed since is brought, and
    it holds the new snapshot alone. `sign` names a private Ed25519 key (PEM). A bundle of an encrypted store is
    encrypted with the same keys. Blocking; from async code call it with `asyncio.to_thread`.
    """
    if not isinstance(snapshot, Snapshot):
        raise UsageError("transfer() takes a snapshot: store.snapshot(name). `store.ops.transfer` copies a store")
    where, signer = _checked_place(place), public_key(sign)
    live, source = snapshot._context, snapshot.store._context
    tenant = drive(source.driver, source.tenant())
    if tenant is None:
        raise NotFound(f"there is no tenant {source.tenant_name!r} in the snapshot")
    chosen = _choose(source, tenant, threads, runs, namespaces)
    facts = {
        "snapshot": snapshot.name,
        "tenant": live.tenant_name,
        "taken_at": snapshot._row.taken_at,
        "manifest": dict(snapshot.manifest),
        "erasures": drive(live.driver, read(partial(_erasures, tenant))),
    }
    keys = live.driver.capabilities.keys
    options = {"tenant": live.tenant_name, "keys": None if keys is None else keys.provider, "durability": "normal"}
    with AtomicFile(where, replace=True) as file:
        reused = _reuse(where, file.part, facts | {"key": signer})
        with snapshot._live._open(file.part, **options) as target:
            to = target._context.driver
            if reused:
                drive(to, write(partial(_refuse_writes, "DROP TRIGGER {}")))
            for old in target.snapshots():
                old.release()
            _fill(source, tenant, target, chosen)
            copy, of = target.snapshot(snapshot.name, note=snapshot.note)._row, snapshot._row
            drive(to, write(partial(update, copy.token, taken_at=of.taken_at, manifest=of.manifest)))
            drive(to, write(partial(_refuse_writes, "CREATE TRIGGER {} BEFORE {} ON {} " + _REFUSAL)))
            if reused:
                drive(to, scrub("sqlite", full=False))
        facts["blake3"] = blake3().update_mmap(file.part).hexdigest()
        with open(file.part, "ab") as end:
            end.write(b"\n" + signed(facts, sign))
        made = _described(where, file.commit(), facts | {"key": signer})
    row = BackupRow(live.entropy(16).hex(), "bundle", made.place, tenant, live.clock_us(), made.bytes)
    with suppress(ReadOnlyStore):  # a standby: the others remember it, because erasing names the copies
        drive(live.driver, write(partial(add_backup, row)))
    return made


def check_bundle(place: Place, key: KeyPath | None = None) -> Bundle:
    """Check a bundle, and with `key` (a public key, PEM) who signed it. Raises Damaged if any byte was changed."""
    return _check(_checked_place(place), key)[0]


@contextmanager
def checked_copy(place: Place, key: KeyPath | None = None) -> Iterator[tuple[Path, Bundle]]:
    """A checked copy of a bundle's file, as long as the context: opening it leaves the bundle alone."""
    with work_folder(None) as folder:
        yield folder / "bundle.db", _check(_checked_place(place), key, folder / "bundle.db")[0]


# --- what is in it


def _choose(
    source: StoreContext,
    tenant: int,
    threads: Sequence[str] | None,
    runs: Sequence[str] | None,
    namespaces: Sequence[Sequence[str]] | None,
) -> _Choice:
    every_thread, every_run = drive(source.driver, read(partial(all_of, tenant, frozen=True)))
    if threads is None and runs is None and namespaces is None:
        return dict.fromkeys(every_thread), dict.fromkeys(every_run), lambda _: True
    if isinstance(namespaces, str) or any(isinstance(labels, str) for labels in namespaces or ()):
        raise UsageError('transfer(namespaces=…): a list of namespaces, such as [("users", "alice")]')
    prefixes = tuple(path_of(labels) for labels in namespaces or ())
    some_threads, some_runs = _matching(every_thread, threads, "thread"), _matching(every_run, runs, "run")
    return some_threads, some_runs, lambda path: path.startswith(prefixes)


def _matching(names: list[str], patterns: Sequence[str] | None, kind: str) -> dict[str, None]:
    if isinstance(patterns, str):
        raise UsageError(f"transfer({kind}s={patterns!r}): a list of names or patterns, such as [{patterns!r}]")
    found: dict[str, None] = {}
    for pattern in patterns or ():
        some = [name for name in names if matches(name, pattern)]
        if not some:
            raise NotFound(f"the snapshot has no {kind} {pattern!r}: nothing was copied")
        found |= dict.fromkeys(some)
    return found


def _fill(source: StoreContext, here: int, target: SnapshotStore, chosen: _Choice) -> None:
    """Let the target hold what is chosen and nothing else; what it has unchanged stays."""
    to, (threads, runs, namespaces) = target._context, chosen
    there = drive(to.driver, to.ensure_tenant())

    def is_same(program: Callable[[int, str], Program[Any]], name: str) -> bool:
        mine, copied = (
            drive(ctx.driver, read(partial(program, tenant, name))) for ctx, tenant in ((source, here), (to, there))
        )
        return mine is not None and bool(mine == copied)

    old_threads, old_runs = drive(to.driver, read(partial(all_of, there, frozen=True)))
    for name in old_threads:
        if name not in threads or not is_same(copy_digest, name):
            target.delete_thread(name, force=True)
    for id in old_runs:
        if id in runs and is_same(run_state, id):
            del runs[id]
            continue
        for gone in drive(to.driver, write(partial(drop_family, there, id))):
            with suppress(NotFound):
                target.delete_thread(thread_name(gone), force=True)
    transfer_some(source, to, [*threads], (), "", None, move=False)
    for id in runs:
        drive(to.driver, write_repair(partial(copy_run, source, there, id, lambda _rows: None, as_is=True)))
    copy_memory(source, to, namespaces, replace=True)


def _erasures(tenant: int) -> Program[int]:
    [[(count,)]] = yield Batch(_ERASURES(tenant=tenant), last=True)
    return int(count)


def _refuse_writes(statement: str) -> Program[None]:
    """Make or drop triggers: no process can continue a run of a bundle, or change it."""
    [tables] = yield Batch(_TABLES())
    every = product(tables, ("INSERT", "UPDATE", "DELETE"))
    yield Batch(*(Sql(statement.format(f"bundle_{table}_{kind}", kind, table))() for (table,), kind in every))


# --- the file


def _checked_place(place: Place) -> str:
    where = os.fspath(place)
    return where if is_object_url(where) else str(file_path(where))


def _reuse(where: str, part: Path, facts: dict[str, Any]) -> bool:
    """Start from the bundle that is there, if there is one and it may be a part of this one."""
    try:
        found, size = _check(where, None, part)
    except NotFound:
        return False
    eras, known = ({id: era for id, (era, *_) in one["stores"].items()} for one in (found.manifest, facts["manifest"]))
    if found.tenant != facts["tenant"] or eras.keys() != known.keys():
        raise UsageError(f"{found.place} is a bundle of another store or tenant: choose another place")
    if (found.key, found.erasures, eras) != (facts["key"], facts["erasures"], known):
        size = 0
    os.truncate(part, size)
    return size > 0


def _check(where: str, key: KeyPath | None, to: Path | None = None) -> tuple[Bundle, int]:
    """Check a bundle, with `to` a copy of it that is made there. What it is, and where its statement begins."""
    shown = _shown(where)
    with local_file(where) as file:
        if not os.path.lexists(file):
            raise NotFound(f"there is no bundle {shown}")
        if not file.is_file():  # opening a FIFO would wait for its other end
            raise UsageError(f"{shown} is no file")
        path = file if to is None else Path(shutil.copyfile(file, to))
        try:
            size, seen, statement = _split(path)
            facts = check(statement, key)
            if facts["blake3"] != seen:
                raise Damaged("a byte of it was changed")
            return _described(where, path.stat().st_size, facts), size
        except (Damaged, KeyError, TypeError) as error:
            raise Damaged(f"{shown} is no bundle, or not as it was made: {error}") from error


def _split(path: Path) -> tuple[int, str, bytes]:
    """The size and the hash of the store in a bundle, and its statement: the last line."""
    with open(path, "rb") as file:
        start = file.seek(max(0, path.stat().st_size - _STATEMENT_BYTES_MAX))
        tail = file.read()
        size = left = start + max(0, tail.rfind(b"\n"))
        hashed = blake3()
        file.seek(0)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            hashed.update(chunk)
            left -= len(chunk)
    return size, hashed.hexdigest(), tail[size - start + 1 :]


def _described(where: str, size: int, facts: dict[str, Any]) -> Bundle:
    return Bundle(place=_shown(where), bytes=size, **{**facts, "taken_at": moment(facts["taken_at"])})


def _shown(where: str) -> str:
    return redacted_url(where) if is_object_url(where) else where
