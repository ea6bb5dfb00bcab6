"""The store as far as object stores go: what is there, moving cold data out and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from perdure.runs.store import RunStore
from perdure.storage.program import Flow, Progress
from perdure.threads.models import Problem, Report

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.ops.far.objects import Moved, ObjectsInfo


class FarStore(RunStore):
    """One database, as one tenant sees it, and what of it is in an object store."""

    def objects(self) -> ObjectsInfo:
        """What this tenant has in the object store (`open(objects=…)`): where, how many objects, how many bytes."""
        return self._run(self._objects())

    async def aobjects(self) -> ObjectsInfo:
        """`objects`, awaited."""
        return await self._arun(self._objects())

    def move_out(self, *, cold_s: float | None = None, progress: Progress | None = None) -> Moved:
        """Move packs and large results that nobody has written to for `cold_s` seconds (default: what `Objects` says)
        to the object store, and remove there what nothing needs any more. `compact` does it too. Safe to repeat."""
        return self._run(self._move_out(cold_s, progress))

    async def amove_out(self, *, cold_s: float | None = None, progress: Progress | None = None) -> Moved:
        """`move_out`, awaited."""
        return await self._arun(self._move_out(cold_s, progress))

    def bring_back(self, *, progress: Progress | None = None) -> Moved:
        """Bring everything that was moved out back into the database: before the object store is given up."""
        return self._run(self._bring_back(progress))

    async def abring_back(self, *, progress: Progress | None = None) -> Moved:
        """`bring_back`, awaited."""
        return await self._arun(self._bring_back(progress))

    def _objects(self) -> Flow[ObjectsInfo]:
        from perdure.ops.far.objects import info

        return info(self._context)

    def _move_out(self, cold_s: float | None, progress: Progress | None) -> Flow[Moved]:
        from perdure.ops.far.objects import move_out

        return move_out(self._context, cold_s, progress)

    def _bring_back(self, progress: Progress | None) -> Flow[Moved]:
        from perdure.ops.far.objects import bring_back

        return bring_back(self._context, progress)

    def _verify(self, progress: Progress | None) -> Flow[Report]:
        report = yield from super()._verify(progress)
        if getattr(self._context.driver, "objects", None) is None:
            return report
        from perdure.ops.far.missing import look_for

        tenant = yield from self._context.tenant()
        lost = (yield from look_for(self._context, tenant)).lost if tenant is not None else []
        return replace(report, problems=(*report.problems, *(Problem("(store)", None, one.what) for one in lost)))
