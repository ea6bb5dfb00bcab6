"""The store as far as copies go: threads to files and back, and backups of all of it while it is in use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from perdure.runs.store import RunStore
from perdure.storage.program import Progress
from perdure.threads.keeping import checkpoint_id
from perdure.threads.models import Checkpoint
from perdure.threads.thread import Thread

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.ops.copies.copied import Backup, Exported, Imported, Restored


class CopyStore(RunStore):
    """One database, as one tenant sees it: its threads and runs, and copies of them."""

    def export_thread(
        self,
        thread: Thread | str,
        path: str | os.PathLike[str],
        *,
        branch: Checkpoint | str | None = None,
        progress: Progress | None = None,
    ) -> Exported:
        """Write a thread to one file: the checkpoints of all its branches, its metadata, LangGraph's ids and writes.

        With `branch`, only that checkpoint and those that led to it. `import_thread` takes the file into any store,
        with the same ids and hashes. The file is not encrypted, also if the store is. It gets its name only when it is
        whole and on the disk. `progress`: (done, of how many) checkpoints.
        """
        from perdure.ops.copies.exporting import export
        from perdure.runs.moving.exporting import drive_steps

        name, number = self._named(thread)
        steps = export(self._context, name, number, path, checkpoint_id(branch), progress)
        return drive_steps(self._context.driver, steps)

    async def aexport_thread(
        self,
        thread: Thread | str,
        path: str | os.PathLike[str],
        *,
        branch: Checkpoint | str | None = None,
        progress: Progress | None = None,
    ) -> Exported:
        """`export_thread`, awaited."""
        from perdure.ops.copies.exporting import export
        from perdure.runs.moving.exporting import adrive_steps

        name, number = self._named(thread)
        steps = export(self._context, name, number, path, checkpoint_id(branch), progress)
        return await adrive_steps(self._context.driver, steps)

    def import_thread(
        self, path: str | os.PathLike[str], *, name: str | None = None, progress: Progress | None = None
    ) -> Imported:
        """Take in a thread that was exported, under its own name or another one. All of it, or nothing.

        Every hash is checked on the way. A name that is taken is refused; if that thread is the same, nothing is done,
        and the answer says so. `progress`: (done, of how many) bytes of the file.
        """
        from perdure.ops.copies.importing import import_file
        from perdure.runs.moving.exporting import drive_steps

        return drive_steps(self._context.driver, import_file(self._context, path, name, progress))

    async def aimport_thread(
        self, path: str | os.PathLike[str], *, name: str | None = None, progress: Progress | None = None
    ) -> Imported:
        """`import_thread`, awaited."""
        from perdure.ops.copies.importing import import_file
        from perdure.runs.moving.exporting import adrive_steps

        return await adrive_steps(self._context.driver, import_file(self._context, path, name, progress))

    def backup(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Backup:
        """Copy the whole store, all tenants, to a file while it is in use: as it is at one point of its commit order.

        Of an SQLite store the copy is a store itself; of one on PostgreSQL it is a file that `perdure.restore` reads.
        An earlier backup there is replaced once the new one is whole; anything else that is there is refused. What is
        encrypted stays so. `progress`: (done, of how many) bytes, about.
        """
        from perdure.ops.copies.backup import backup

        return backup(self._context, path, progress)

    async def abackup(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Backup:
        """`backup`, awaited."""
        from asyncio import to_thread

        from perdure.ops.copies.backup import backup

        return await to_thread(backup, self._context, path, progress)

    def try_restore(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Restored:
        """Whether a backup of this store can be restored: into a temporary place, checked, thrown away.

        The place is a folder beside the backup, or a schema of the store's own database. The store remembers when it
        was done, and `perdure doctor` tells. `progress`: (done, of how many) bytes.
        """
        from perdure.ops.copies.restoring import try_restore

        return try_restore(self._context, path, progress)

    async def atry_restore(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Restored:
        """`try_restore`, awaited."""
        from asyncio import to_thread

        from perdure.ops.copies.restoring import try_restore

        return await to_thread(try_restore, self._context, path, progress)
