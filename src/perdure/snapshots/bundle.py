"""Bundles: a snapshot, whole or a part of it, as one file that can be given away.

A bundle is a store with a snapshot in it, and beside it a statement (`<name>.sig`) with the file's BLAKE3 hash. Runs
that were not finished are in that snapshot as they were; in the store around it they are fenced, so that no worker can
continue them. A further bundle to the same place brings what has changed since; earlier snapshots stay readable in it.

It is made in a folder of its own. The new statement is placed first and holds the previous one too, then the file: a
kill in between leaves a bundle whose file fits one of the two.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from blake3 import blake3

from perdure.errors import Damaged, NotFound, ReadOnlyStore
from perdure.memory.labels import path_of
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.rows import RunRow
from perdure.snapshots.rows import set_origin
from perdure.snapshots.signature import KeyPath, check, signed
from perdure.storage.files import sync_folder, sync_path
from perdure.storage.objects import is_object_url, redacted_url
from perdure.storage.program import Program, drive, read, write, write_repair
from perdure.threads.context import StoreContext
from perdure.transfers.catalogue import BackupRow, add_backup
from perdure.transfers.files import local_file, store_and_name, work_folder
from perdure.transfers.memory import copy_memory
from perdure.transfers.runs import copy_run, drop_family, find_run, freeze_runs, is_same_run, thaw_runs
from perdure.transfers.threads import thread_digest
from perdure.transfers.transfer import all_of, transfer_some
from perdure.transfers.verify import tenant_names

if TYPE_CHECKING:
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore

_SUFFIX = ".sig"
Place = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as its statement describes it. `key`: the public key that signed it, None if none did."""

    place: str
    snapshot: str
    tenant: str
    taken_at: int  # microseconds since 1970
    manifest: dict[str, Any]
    bytes: int
    blake3: str
    key: str | None


@dataclass(frozen=True, slots=True)
class _Choice:
    threads: list[str]
    runs: list[str]
    namespaces: Callable[[str], bool]  # by path
    whole: bool


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
    (`s3://bucket/name`), with a statement beside it (`<name>.sig`) that shows any change. `perdure.ops.open_bundle`
    opens it, read-only.

    `threads` and `runs` are ids or patterns (`support-*`), `namespaces` their labels, with all below; without any of
    the three it is everything. If a bundle is there already, only what has changed is brought, and the snapshots in it
    stay readable. `sign` names a private Ed25519 key (PEM). An encrypted store's bundle needs its keys. Blocking; from
    async code call it with `asyncio.to_thread`.
    """
    snap = snapshot
    chosen = _choose(snap.store._context, threads, runs, namespaces)
    where = os.fspath(place)
    with work_folder(None if is_object_url(where) else Path(where).absolute()) as folder:
        part = folder / "bundle.db"
        before = _before(where, part)
        keys = snap._context.driver.capabilities.keys
        options = {"tenant": snap._context.tenant_name, "keys": None if keys is None else keys.provider}
        with snap._live._open(part, durability="normal", **options) as target:
            _each_tenant(target, thaw_runs)
            _fill(snap.store._context, target, chosen)
            for old in target.snapshots():
                if old.name == snap.name:
                    old.release()
            target.snapshot(snap.name, note=snap.note)
            origin = partial(set_origin, snap.name, snap._row.taken_at, snap._row.manifest)
            drive(target._context.driver, write(origin))
            _each_tenant(target, partial(freeze_runs, where="a snapshot in this bundle"))
        facts: dict[str, Any] = {
            "snapshot": snap.name,
            "tenant": snap._context.tenant_name,
            "taken_at": snap._row.taken_at,
            "manifest": dict(snap.manifest),
            "bytes": part.stat().st_size,
            "blake3": _hash(part),
        }
        documents = [signed(facts, sign), *before]
        _put(where, part, orjson.dumps(documents))
    made = Bundle(_shown(where), key=documents[0]["key"], **facts)
    _remember(snap._context, made)
    return made


def check_bundle(place: Place, key: KeyPath | None = None) -> Bundle:
    """Check a bundle's file and statement, and with `key` (a public key, PEM) who signed it. Raises Damaged if any byte
    was changed."""
    with checked_copy(place, key) as (_, bundle):
        return bundle


@contextmanager
def checked_copy(place: Place, key: KeyPath | None = None) -> Iterator[tuple[Path, Bundle]]:
    """A copy of a bundle's file that fits its statement, as long as the context: opening it leaves the bundle alone."""
    where = os.fspath(place)
    with work_folder(None) as folder:
        found, _ = _fetch(where, folder / "bundle.db", key)
        yield folder / "bundle.db", found


# --- what is in it


def _choose(
    source: StoreContext,
    threads: Sequence[str] | None,
    runs: Sequence[str] | None,
    namespaces: Sequence[Sequence[str]] | None,
) -> _Choice:
    tenant = drive(source.driver, source.tenant())
    known: tuple[list[str], list[str]] = ([], [])
    if tenant is not None:
        known = drive(source.driver, read(partial(all_of, tenant, frozen=True)))
    whole = threads is None and runs is None and namespaces is None
    prefixes = tuple(path_of(labels) for labels in namespaces or ())
    return _Choice(
        known[0] if whole else _matching(known[0], threads or (), "thread"),
        known[1] if whole else _matching(known[1], runs or (), "run"),
        lambda path: whole or path.startswith(prefixes),
        whole,
    )


def _matching(names: list[str], patterns: Sequence[str], kind: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NotFound(f"the snapshot has no {kind} {pattern!r}: nothing was copied")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _fill(source: StoreContext, target: SnapshotStore, chosen: _Choice) -> None:
    """Bring what has changed. Of a whole snapshot, what it does not have goes."""
    to = target._context
    there = drive(to.driver, to.ensure_tenant())
    here = drive(source.driver, source.tenant())
    if here is None:
        raise NotFound(f"there is no tenant {source.tenant_name!r} in the snapshot")
    old_threads, old_runs = drive(to.driver, read(partial(all_of, there, frozen=True)))
    wanted = set(chosen.threads)
    for name in old_threads:
        if _digest(source, here, name) != _digest(to, there, name) if name in wanted else chosen.whole:
            target.delete_thread(name, force=True)
    same = set()
    for id in old_runs:
        mine = drive(source.driver, read(partial(find_run, here, id)))
        kept: RunRow = drive(to.driver, read(partial(find_run, there, id)))
        if mine is not None and is_same_run(mine, kept):
            same.add(id)
        elif chosen.whole or id in chosen.runs:
            for gone in drive(to.driver, write(partial(drop_family, there, kept))):
                with suppress(NotFound):
                    target.delete_thread(thread_name(gone), force=True)
    transfer_some(source, to, chosen.threads, (), "", None, move=False)
    for id in chosen.runs:
        if id not in same:
            drive(to.driver, write_repair(partial(copy_run, source, there, id, _ignore, as_is=True)))
    copy_memory(source, to, chosen.namespaces, replace=True)


def _digest(ctx: StoreContext, tenant: int, name: str) -> bytes:
    return drive(ctx.driver, read(partial(thread_digest, tenant, name)))  # type: ignore[no-any-return]


def _ignore(_rows: int) -> None:
    """Progress that is not shown."""


def _each_tenant(store: SnapshotStore, change: Callable[[int], Program[None]]) -> None:
    driver = store._context.driver
    for name in drive(driver, read(tenant_names)):
        tenant = drive(driver, store.tenant(name)._context.ensure_tenant())
        drive(driver, write(partial(change, tenant)))


# --- files


def _before(where: str, part: Path) -> list[Any]:
    """The bundle that is at a place already, as the beginning of this one, and its statement."""
    if is_object_url(where):
        objects, name = store_and_name(where)
        if not objects.exists(name):
            return []
    elif not Path(where).exists():
        return []
    return [_fetch(where, part, None)[1]]


def _fetch(where: str, to: Path, key: KeyPath | None) -> tuple[Bundle, Any]:
    """Copy a bundle's file, and check the copy. Its description, and the statement that it fits."""
    try:
        with local_file(where + _SUFFIX) as path:
            text = path.read_bytes()
        with local_file(where) as path:
            shutil.copyfile(path, to)
        os.chmod(to, 0o600)
    except FileNotFoundError as error:
        raise NotFound(f"there is no bundle {_shown(where)}: there is no file {error.filename}") from error
    seen = _hash(to)
    try:
        documents = orjson.loads(text)
        if orjson.dumps(documents) != text or not isinstance(documents, list):
            raise Damaged("the statement was changed after it was made, or is cut off")
        fitting = [document for document in documents if check(document, None)["blake3"] == seen]
        if not fitting:
            raise Damaged("a byte of the file was changed, or it is cut off")
        return Bundle(_shown(where), **check(fitting[0], key)), fitting[0]
    except (Damaged, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{_shown(where)} is not the bundle that was made: {error}") from error


def _put(where: str, part: Path, statement: bytes) -> None:
    beside = part.with_name("statement")
    beside.write_bytes(statement)
    for file, place in ((beside, where + _SUFFIX), (part, where)):
        os.chmod(file, 0o600)
        sync_path(file)
        if is_object_url(place):
            objects, name = store_and_name(place)
            objects.put_file(name, file)
        else:
            os.replace(file, place)
            sync_folder(Path(place).absolute())


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _shown(where: str) -> str:
    return redacted_url(where) if is_object_url(where) else where


def _remember(ctx: StoreContext, made: Bundle) -> None:
    """In the live store: erasing names the copies that it cannot reach."""
    tenant = drive(ctx.driver, ctx.tenant())
    row = BackupRow(ctx.entropy(16).hex(), "bundle", made.place, tenant, ctx.clock_us(), made.bytes)
    with suppress(ReadOnlyStore):  # a bundle of a bundle
        drive(ctx.driver, write(partial(add_backup, row)))
