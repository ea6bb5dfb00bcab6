"""The store as far as memory goes: `store.memory(…)` on top of threads and runs."""

from __future__ import annotations

from dataclasses import replace

from perdure.memory.domain import MEMORY
from perdure.memory.handle import Memory
from perdure.runs.store import RunStore
from perdure.storage.domains import register
from perdure.storage.program import Flow, Progress
from perdure.threads.models import Problem, Report

register(MEMORY)


class MemoryStore(RunStore):
    """One database, as one tenant sees it: its threads, runs and memory."""

    def memory(self, *labels: str) -> Memory:
        """The memory of a namespace: labels of any characters, `store.memory("users", "alice")`. Does no I/O."""
        return Memory(self._context, labels)

    def _verify(self, progress: Progress | None) -> Flow[Report]:
        report = yield from super()._verify(progress)
        tenant = yield from self._context.tenant()
        if tenant is None:
            return report
        from perdure.memory.verify import verify_memory  # imported late: few programs verify

        versions, found = yield from verify_memory(tenant, self._context.codec)
        problems = [Problem(f"(memory {name})" if name else "(memory)", None, what) for name, what in found]
        return replace(report, versions=versions, problems=(*report.problems, *problems))
