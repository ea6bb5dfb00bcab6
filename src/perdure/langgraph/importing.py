"""Taking over what LangGraph's stock savers have stored: `import_langgraph`.

Every checkpoint keeps its id, parent, namespace, versions, metadata and time, and every pending write its task, path
and index. The source is only read. Checkpoints go in by the same flows as a saver's own, many in one transaction, a
checkpoint never without its writes. So an import that was killed left whole checkpoints: run again, it passes over
those that are there and goes on.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.errors import NotFound, PerdureError, UnknownType, UsageError
from perdure.langgraph.importing_checks import Checking
from perdure.langgraph.importing_meeting import Meeting, packed, pages
from perdure.langgraph.importing_rows import Item, Reading
from perdure.langgraph.importing_sources import Source, Stored, open_source
from perdure.langgraph.importing_values import unloadable
from perdure.langgraph.importing_writing import Writing
from perdure.langgraph.saver import PerdureSaver
from perdure.log.label_ids import pack_id
from perdure.ops.store import Store
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, drive, read
from perdure.storage.urls import sqlite_path
from perdure.threads.checks import check_name

_LOOK_ON_MAX = 2000  # so many more checkpoints are searched for types, once one was met that is not trusted
_DIFFERENCES_MAX = 100

_SIZE = Sql(
    sqlite="SELECT page_count * page_size FROM pragma_page_count, pragma_page_size",
    postgres="""SELECT CAST(coalesce(sum(pg_total_relation_size(oid)), 0) AS bigint) FROM pg_class
        WHERE relnamespace = to_regnamespace(current_schema()) AND relkind = 'r'""",
)

Target = PerdureSaver | Store | str


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has done. `skipped` checkpoints were there already. `differences`: what verifying has found."""

    threads: int
    checkpoints: int
    writes: int
    skipped: int
    differences: tuple[str, ...] = ()
    source_bytes: int = 0  # what the source takes on its disk, all of it
    store_bytes: int = 0  # what the store takes now

    @property
    def ok(self) -> bool:
        return not self.differences


def import_langgraph(
    source: str | os.PathLike[str],
    saver_or_store: Target,
    *,
    trust: Sequence[str] = (),
    threads: Sequence[str] | None = None,
    serde: SerializerProtocol | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Take over the threads of a stock saver's database: SQLite (a path) or PostgreSQL (`postgresql://…`).

    `trust` names module prefixes whose data classes may be loaded and kept, beside those that the saver trusts and
    those that are registered; what else is met ends the import with an error that names it, and is never executed.
    `threads` takes only those. `serde` reads values that LangGraph's own serializer did not write: encrypted ones, for
    example (then give the EncryptedSerializer). `verify` reads everything back and compares it: look at `.differences`.
    `progress` is called with (done, of how many) checkpoints, each of which counts twice with `verify`.

    It may be run again, after a failure or when the source has grown. A saver's `ttl` and `keep_last` do not apply
    until it writes or reads itself, and times are the original ones.
    """
    opened = open_source(source)
    try:
        saver, owned = _saver(saver_or_store, opened, trust)
        try:
            return _Import(opened, saver, trust, threads, serde, progress).run(verify)
        finally:
            if owned:
                saver.close()
    finally:
        opened.close()


async def aimport_langgraph(
    source: str | os.PathLike[str],
    saver_or_store: Target,
    *,
    trust: Sequence[str] = (),
    threads: Sequence[str] | None = None,
    serde: SerializerProtocol | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """`import_langgraph`, awaited: it works in a thread of its own, reading the source there too, and the loop stays
    free. `progress` is called on the loop. A task that is cancelled ends it after the checkpoints at hand."""
    loop = asyncio.get_running_loop()
    stopped = threading.Event()

    def report(done: int, total: int) -> None:
        if stopped.is_set():
            raise asyncio.CancelledError
        if progress is not None:
            loop.call_soon_threadsafe(progress, done, total)

    options: dict[str, Any] = {"trust": trust, "threads": threads, "serde": serde, "verify": verify, "progress": report}
    work = asyncio.ensure_future(asyncio.to_thread(import_langgraph, source, saver_or_store, **options))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at: the cancellation is what counts
        raise


def _saver(target: Target, source: Source, trust: Sequence[str]) -> tuple[PerdureSaver, bool]:
    """The saver to import into, and whether it was opened here."""
    if isinstance(target, PerdureSaver):
        saver, owned = target, False
    elif isinstance(target, Store):
        saver, owned = PerdureSaver(target), False
    else:
        _check_apart(source, target)
        saver, owned = PerdureSaver(target, trust=trust), True
    path = getattr(saver.store._context.driver, "path", None)
    if isinstance(path, str) and source.is_file(path):
        raise _same()
    return saver, owned


def check_source(source: str | os.PathLike[str], store: str) -> None:
    """Raise if there is nothing to import at the source, or if the store would be the same file. Opens no store."""
    opened = open_source(source)
    try:
        _check_apart(opened, store)
    finally:
        opened.close()


def _check_apart(source: Source, store: str) -> None:
    if "://" not in store.removeprefix("sqlite://") and source.is_file(sqlite_path(store)):
        raise _same()


def _same() -> UsageError:
    return UsageError("the source and the store are the same file: name another file for the store; it is made new")


class _Import:
    """One import: what it reads from and writes to, and how far it is."""

    def __init__(
        self,
        source: Source,
        saver: PerdureSaver,
        trust: Sequence[str],
        threads: Sequence[str] | None,
        serde: SerializerProtocol | None,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._saver = saver
        self._reading = Reading(saver, trust, serde)
        self._writing = Writing(saver)
        self._checking = Checking(saver, self._reading)
        self._meeting = Meeting(source, saver, self._checking)
        self._only = _named(source, threads)
        self._progress = progress
        self._done = self._total = 0
        self._skipped = self._threads = 0
        self._met: set[str] = set()  # threads of which something was there already
        self._refused: dict[str, str] = {}  # threads that were left as they are, and why

    def run(self, verify: bool) -> Imported:
        self._total = self._source.count(self._only) * (2 if verify else 1)
        for thread in self._names():
            self._take(thread)
            self._threads += 1
        self._flush()
        differences = [f"thread {thread!r} was left as it is: {why}" for thread, why in self._refused.items()]
        if verify:
            differences += self._verified()
        self._report(self._total - self._done)
        return Imported(
            self._threads,
            self._writing.checkpoints,
            self._writing.writes,
            self._skipped,
            tuple(differences),
            self._source.size_bytes(),
            drive(self._saver.store._context.driver, _size()),
        )

    def _names(self) -> Iterator[str]:
        return iter(self._only) if self._only is not None else self._source.threads()

    def _report(self, done: int) -> None:
        self._done += done
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def _flush(self) -> None:
        if done := self._writing.flush():
            self._report(done)

    # --- copying

    def _take(self, thread: str) -> None:
        met = self._meeting.look(check_name(thread))
        if met is None:
            for space in self._source.spaces(thread):
                for ids in pages(self._source, thread, space):
                    self._put(thread, space, ids)
            return
        self._met.add(thread)
        self._skipped += met.checkpoints
        self._report(met.checkpoints)
        if met.refused is not None:
            self._refused[thread] = met.refused
        elif met.has_more:
            for space in self._source.spaces(thread):
                for ids in pages(self._source, thread, space):
                    self._add(thread, space, ids)
            self._flush()

    def _put(self, thread: str, space: str, ids: Sequence[str]) -> None:
        for stored in self._source.checkpoints(thread, space, ids):
            try:
                item = self._reading.item(thread, space, stored)
            except UnknownType as error:
                self._flush()
                raise self._all_unknown(error, thread, space, stored.id) from error
            if self._writing.add(item):
                self._flush()

    def _add(self, thread: str, space: str, ids: list[str]) -> None:
        """What the store lacks of a page: checkpoints, and writes on those that are there."""
        present = self._meeting.present(thread, space, ids)
        here = [id_ for id_ in ids if pack_id(id_) in present.ids]
        if here:
            keys = packed(self._source, thread, space, here)
            lacking = [id_ for id_ in here if keys.get(pack_id(id_), set()) - present.writes.get(pack_id(id_), set())]
            # A run may have gone on at the newest, and replaced writes.
            for stored in self._source.checkpoints(thread, space, list(dict.fromkeys([*lacking, here[-1]]))):
                if writes := self._checking.lacking(thread, space, stored):
                    self._writing.add(Item(thread, space, pack_id(stored.id), writes))
                    self._flush()
        self._put(thread, space, [id_ for id_ in ids if pack_id(id_) not in present.ids])

    def _all_unknown(self, error: UnknownType, thread: str, space: str, id_: str) -> UnknownType:
        """The same error with the types of the checkpoints that follow, so that all can be trusted at once."""
        problems = dict(self._reading.unknown)
        for name, inner, stored in islice(self._following(thread, space), _LOOK_ON_MAX):
            try:
                self._reading.item(name, inner, stored)
            except UnknownType:
                problems |= self._reading.unknown
            except PerdureError:
                pass  # said when its turn comes
        said = unloadable(problems)
        return UnknownType(f"thread {thread!r}, checkpoint {id_}: {said}", type_name=error.type_name)

    def _following(self, thread: str, space: str) -> Iterator[tuple[str, str, Stored]]:
        places = ((name, inner) for name in self._names() for inner in self._source.spaces(name))
        for name, inner in dropwhile(lambda place: place != (thread, space), places):
            for ids in pages(self._source, name, inner):
                for stored in self._source.checkpoints(name, inner, ids):
                    yield name, inner, stored

    # --- verifying

    def _verified(self) -> list[str]:
        found: list[str] = []
        count = 0
        for thread in self._names():
            if thread in self._refused:
                continue
            for difference in self._differences(thread):
                count += 1
                if count <= _DIFFERENCES_MAX:
                    found.append(difference)
        if count > _DIFFERENCES_MAX:
            found.append(f"… and {count - _DIFFERENCES_MAX:,} more")
        return found

    def _differences(self, thread: str) -> Iterator[str]:
        lenient = thread in self._met
        for space in self._source.spaces(thread):
            newest: str | None = None
            for ids in pages(self._source, thread, space, backwards=True):
                if newest is None:
                    newest = ids[0]
                    yield from self._checking.newest(thread, space, newest, set(ids))
                for stored in self._source.checkpoints(thread, space, ids):
                    yield from self._checking.checkpoint(thread, space, stored, lenient=lenient)
                self._report(len(ids))
        for problem in self._saver.store.thread(thread).verify().problems:
            yield f"thread {thread!r}: {problem}"


def _named(source: Source, threads: Sequence[str] | None) -> list[str] | None:
    """The threads that were asked for; each must be there."""
    if threads is None:
        return None
    if isinstance(threads, str):
        raise UsageError(f"threads is a list of thread ids, such as threads=[{threads!r}], not a str")
    names = list(dict.fromkeys(str(thread) for thread in threads))
    for name in names:
        if next(source.spaces(name), None) is None:
            raise NotFound(f"the source has no thread {name!r}")
    return names


def _size() -> Flow[int]:
    def program() -> Program[int]:
        [[(found,)]] = yield Batch(_SIZE(), last=True)
        return int(found)

    return (yield from read(program))
