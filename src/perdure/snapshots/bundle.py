"""Bundles: a snapshot, or a part of it, as one file that can be given away.

A bundle is an SQLite store that holds one snapshot and refuses writes. Behind its last page, where SQLite does not
look, stands a line of JSON: what it is, its BLAKE3 hash and, on request, a signature.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from perdure.errors import Damaged, NotFound, UsageError
from perdure.memory.labels import path_of
from perdure.snapshots.diff import matches
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.rows import update
from perdure.snapshots.signature import KeyPath, check, public_key, signed
from perdure.storage.objects import is_object_url, redacted_url
from perdure.storage.program import Batch, Program, Sql, drive, fetch, read, write, write_repair
from perdure.storage.sqlite.foreign import check_foreign
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.transfers.catalogue import BackupRow, place_copy
from perdure.transfers.files import AtomicFile, file_path, local_file, work_folder
from perdure.transfers.memory import NAMESPACES, copy_memory
from perdure.transfers.runs import copy_run, copy_run_values, family_head
from perdure.transfers.transfer import all_of, transfer_some

Place = str | os.PathLike[str]
_CHUNK_BYTES = 1 << 20
_STATEMENT_BYTES_MAX = 1 << 20
_TABLES = Sql("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
_REFUSE = """CREATE TRIGGER bundle_{0}_{1} BEFORE {1} ON {0}
    BEGIN SELECT RAISE(ABORT, 'a bundle takes no writes: work in a sandbox of its snapshot'); END"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as its statement describes it. `key`: the public key that signed it, None if none did."""

    place: str
    snapshot: str
    since: str | None  # the snapshot since which it has what has changed; None: it has all that was chosen
    tenant: str
    taken_at: datetime
    manifest: dict[str, Any]
    bytes: int
    blake3: str
    key: str | None


def export(
    snapshot: Snapshot,
    place: Place,
    *,
    threads: Sequence[str] | None = None,
    runs: Sequence[str] | None = None,
    namespaces: Sequence[Sequence[str]] | None = None,
    since: Snapshot | str | None = None,
    sign: KeyPath | None = None,
) -> Bundle:
    """See `Snapshot.export`."""
    live, source, signer = snapshot._context, snapshot.store._context, public_key(sign)
    tenant = drive(source.driver, source.tenant())
    if tenant is None:
        raise NotFound(f"there is no tenant {source.tenant_name!r} in the snapshot")
    older = snapshot._live.get_snapshot(since) if isinstance(since, str) else since
    chosen = _choose(source, tenant, threads, runs, namespaces)
    if older is not None:
        chosen = _changed(Snapshot(snapshot._live, older._row), snapshot, chosen)
    facts = {
        "snapshot": snapshot.name,
        "since": None if older is None else older.name,
        "tenant": live.tenant_name,
        "taken_at": snapshot._row.taken_at,
        "manifest": dict(snapshot.manifest),
    }
    keys = live.driver.capabilities.keys
    options = {"tenant": live.tenant_name, "keys": None if keys is None else keys.provider, "durability": "normal"}
    with AtomicFile(place) as file:
        with snapshot._live._open(file.part, **options) as target:
            _fill(source, target._context, chosen)
            copy, to = target.snapshot(snapshot.name, note=snapshot.note), target._context.driver
            origin: dict[str, Any] = {"taken_at": snapshot._row.taken_at, "manifest": snapshot._row.manifest}
            drive(to, write(partial(update, copy._row.token, **origin)))
            drive(to, write(_refuse_writes))
        facts["blake3"] = blake3().update_mmap(file.part).hexdigest()
        with open(file.part, "ab") as end:
            end.write(b"\n" + signed(facts, sign))
        bundle = _described(file.place, file.size(), facts | {"key": signer})
        row = BackupRow(live.entropy(16).hex(), "bundle", bundle.place, tenant, live.clock_us(), bundle.bytes)
        place_copy(live.driver, file, row)
    return bundle


def check_bundle(place: Place, key: KeyPath | None = None) -> Bundle:
    """Check a bundle, and with `key` (a public key, PEM) who signed it.

    Raises Damaged if any byte was changed, or if it has more in it than Perdure puts there.
    """
    return _check(place, key)


@contextmanager
def checked_copy(place: Place, key: KeyPath | None = None) -> Iterator[tuple[Path, Bundle]]:
    """Yield a checked copy of a bundle's file: opening a store would change the file."""
    with work_folder(None) as folder:
        yield folder / "bundle.db", _check(place, key, folder / "bundle.db")


# --- what is in it


class _Choice(NamedTuple):
    threads: list[str]
    runs: list[str]  # those that no other run has started: each is copied with those that it started
    namespaces: list[str]  # paths


def _choose(source: StoreContext, tenant: int, threads: Any, runs: Any, namespaces: Any) -> _Choice:
    every_thread, every_run = drive(source.driver, read(partial(all_of, tenant, frozen=True)))
    every_path = [path for _, path in drive(source.driver, fetch(NAMESPACES, tenant=tenant))]
    if threads is None and runs is None and namespaces is None:
        return _Choice(every_thread, every_run, every_path)
    if isinstance(namespaces, str) or any(isinstance(labels, str) for labels in namespaces or ()):
        raise UsageError('export(namespaces=…): a list of namespaces, such as [("users", "alice")]')
    return _Choice(
        _matching("thread", every_thread, threads, matches),
        _matching("run", every_run, runs, matches),
        _matching("namespace", every_path, namespaces, lambda path, labels: path.startswith(path_of(labels))),
    )


def _matching(kind: str, names: list[str], chosen: Any, is_one: Callable[[str, Any], bool]) -> list[str]:
    if isinstance(chosen, str):
        raise UsageError(f"export({kind}s={chosen!r}): a list of names or patterns, such as [{chosen!r}]")
    matching: dict[str, None] = {}
    for each in chosen or ():
        some = [name for name in names if is_one(name, each)]
        if not some:
            raise NotFound(f"the snapshot has no {kind} {each!r}: nothing was copied")
        matching |= dict.fromkeys(some)
    return list(matching)


def _changed(older: Snapshot, snapshot: Snapshot, chosen: _Choice) -> _Choice:
    """Return the part of a choice that has changed since an older snapshot."""
    changes = older.diff(snapshot)
    threads = {change.name for change in changes if change.what == "thread"}
    families = [change.name for change in changes if change.what == "run" and change.kind != "removed"]
    runs = {family_head(snapshot.store._context, id).id for id in families}
    paths = {path_of(change.namespace) for change in changes if change.what == "item"}
    every = zip(chosen, (threads, runs, paths), strict=True)
    return _Choice(*([name for name in names if name in some] for names, some in every))


def _fill(source: StoreContext, target: StoreContext, chosen: _Choice) -> None:
    transfer_some(source, target, chosen.threads, (), "", None, move=False)
    to = drive(target.driver, target.ensure_tenant())
    for id in chosen.runs:
        copy_run_values(source, target, id)
        drive(target.driver, write_repair(partial(copy_run, source, to, id, lambda _rows: None, as_is=True)))
    copy_memory(source, target, {*chosen.namespaces}.__contains__)


def _refuse_writes() -> Program[None]:
    """Add triggers, so that no process can continue a run of a bundle, or change it."""
    [tables] = yield Batch(_TABLES())
    every = product((table for (table,) in tables), ("INSERT", "UPDATE", "DELETE"))
    yield Batch(*(Sql(_REFUSE.format(table, change))() for table, change in every))


# --- the file


def _check(place: Place, key: KeyPath | None, to: Path | None = None) -> Bundle:
    """Check a bundle, or, with `to`, a copy of it that is made there."""
    where = os.fspath(place)
    shown = redacted_url(where) if is_object_url(where) else str(file_path(where))
    with local_file(where) as file:
        if not os.path.lexists(file):
            raise NotFound(f"there is no bundle {shown}")
        if not file.is_file():  # opening a FIFO would wait for its other end
            raise UsageError(f"{shown} is no file")
        path = file if to is None else Path(shutil.copyfile(file, to))
        try:
            seen, statement = _split(path)
            facts = check(statement, key)
            if facts["blake3"] != seen:
                raise Damaged("a byte of it was changed")
            bundle = _described(shown, path.stat().st_size, facts)
        except (Damaged, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Damaged(f"{shown} is no bundle, or not as it was made: {error}") from error
        check_foreign(path, shown)
        return bundle


def _split(path: Path) -> tuple[str, bytes]:
    """Return the hash of the store in a bundle, and its statement, which is the last line."""
    with open(path, "rb") as file:
        start = file.seek(max(0, path.stat().st_size - _STATEMENT_BYTES_MAX))
        tail = file.read()
        end = max(0, tail.rfind(b"\n"))
        left = start + end
        hashed = blake3()
        file.seek(0)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            hashed.update(chunk)
            left -= len(chunk)
    return hashed.hexdigest(), tail[end + 1 :]


def _described(place: str, size: int, facts: dict[str, Any]) -> Bundle:
    return Bundle(place=place, bytes=size, **{**facts, "taken_at": moment(facts["taken_at"])})
