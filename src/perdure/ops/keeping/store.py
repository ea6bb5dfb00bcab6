"""The store as far as keeping goes: retention, compaction, erasing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from perdure.runs.handle import Run
from perdure.runs.store import RunStore
from perdure.storage.program import Flow, Progress, read, write
from perdure.threads.checks import check_name
from perdure.threads.keeping import Erased, Retention, Ttl, fields_from, retention_of
from perdure.threads.thread import Thread

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.log.retaining import Fields
    from perdure.ops.keeping.compaction import Compacted
    from perdure.runs.keeping.retention import Upkeep


class KeepStore(RunStore):
    """One database, as one tenant sees it: what stays in it, and for how long."""

    def set_retention(self, *, ttl: Ttl = None, keep_last: int | None = None) -> Retention:
        """How long threads stay that nobody writes to (`ttl`: seconds or a timedelta), and how many of their newest
        checkpoints (`keep_last`). None: for good. Kept in the store, for this tenant; a thread's own
        `set_retention` goes before it. `compact` acts on it, which workers do daily."""
        return self._run(self._set_retention(fields_from(ttl, keep_last)))

    async def aset_retention(self, *, ttl: Ttl = None, keep_last: int | None = None) -> Retention:
        """`set_retention`, awaited."""
        return await self._arun(self._set_retention(fields_from(ttl, keep_last)))

    def retention(self) -> Retention:
        """What holds for threads that have nothing of their own."""
        return self._run(self._retention())

    async def aretention(self) -> Retention:
        """`retention`, awaited."""
        return await self._arun(self._retention())

    def compact(self, *, dry_run: bool = False, vacuum: bool = False, progress: Progress | None = None) -> Compacted:
        """Remove what retention says (threads that have expired, checkpoints beyond `keep_last`, journals of finished
        runs), compress and pack what stays. What a pin, a fork, a graph or an unfinished run needs stays.

        `dry_run` says what would go and writes nothing. `vacuum` gives the free space back to the file system: SQLite
        rewrites the file, and others wait meanwhile. `progress`: (done, of how many) threads.
        """
        return self._run(self._compact(dry_run, vacuum, progress))

    async def acompact(
        self, *, dry_run: bool = False, vacuum: bool = False, progress: Progress | None = None
    ) -> Compacted:
        """`compact`, awaited."""
        return await self._arun(self._compact(dry_run, vacuum, progress))

    def erase(
        self, thread: Thread | str, *, forks: bool = False, full: bool = False, progress: Progress | None = None
    ) -> Erased:
        """Erase a thread for good: its states, notes, metadata and pending writes, from the store's own files too. Pins
        do not hold it. If it has forks, which hold its history, it raises and lists them; with `forks` they go too.

        SQLite rewrites its file and cuts off its log, and others wait meanwhile. PostgreSQL vacuums; `full` makes it
        rewrite the tables, which nobody can use meanwhile. `may_remain` of the answer names what may still hold it.
        """
        return self._run(self._erase(thread, forks, full, progress))

    async def aerase(
        self, thread: Thread | str, *, forks: bool = False, full: bool = False, progress: Progress | None = None
    ) -> Erased:
        """`erase`, awaited."""
        return await self._arun(self._erase(thread, forks, full, progress))

    def erase_run(self, run: str | Run, *, full: bool = False) -> Erased:
        """Erase a finished run for good, as `erase` does a thread: arguments, journal, result, questions, answers,
        messages, states. Raises UsageError if it is not finished, or a fork or an unfinished parent needs it."""
        return self._run(self._erase_run(run, full))

    async def aerase_run(self, run: str | Run, *, full: bool = False) -> Erased:
        """`erase_run`, awaited."""
        return await self._arun(self._erase_run(run, full))

    # --- the same, as flows

    def _set_retention(self, fields: Fields) -> Flow[Retention]:
        from perdure.log import retaining

        tenant = yield from self._context.ensure_tenant()
        yield from write(partial(retaining.write_policy, tenant, fields))
        return retention_of(fields, {})

    def _retention(self) -> Flow[Retention]:
        from perdure.log import retaining

        tenant = yield from self._context.tenant()
        fields = (yield from read(partial(retaining.read_policy, tenant))) if tenant is not None else {}
        return retention_of(fields, {})

    def _compact(self, dry_run: bool, vacuum: bool, progress: Progress | None) -> Flow[Compacted]:
        from perdure.ops.keeping.compaction import compact

        return compact(self._context, self._keep_us, dry_run=dry_run, vacuum=vacuum, progress=progress)

    def _days_work(self, tenant: int) -> Flow[Upkeep]:
        from perdure.ops.keeping.compaction import days_work

        return days_work(self._context, tenant, self._keep_us)

    def _erase(self, thread: Thread | str, forks: bool, full: bool, progress: Progress | None) -> Flow[Erased]:
        from perdure.ops.keeping.erasing import erase_thread

        name, number = self._named(thread)
        return erase_thread(self._context, name, number, forks=forks, full=full, progress=progress)

    def _erase_run(self, run: str | Run, full: bool) -> Flow[Erased]:
        from perdure.ops.keeping.erasing import erase_run

        return erase_run(self._context, run.id if isinstance(run, Run) else check_name(run, "run"), full=full)
