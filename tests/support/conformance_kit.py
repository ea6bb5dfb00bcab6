"""Runs LangGraph's conformance suite on a saver: all eight capabilities, all 81 tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.conformance import validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.checkpoint.conformance.initializer import RegisteredCheckpointer
from langgraph.checkpoint.conformance.report import ProgressCallbacks

TESTS = 81


class Blocking(BaseCheckpointSaver[int]):
    """The async methods, which alone the suite calls, as calls of the blocking ones, on the event loop's thread."""

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self.saver.get_tuple(config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        for found in self.saver.list(config, filter=filter, before=before, limit=limit):
            yield found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self.saver.put(config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self.saver.put_writes(config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        self.saver.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        self.saver.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.saver.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self.saver.prune(thread_ids, strategy=strategy)


async def conform(name: str, fresh: Callable[[], AsyncGenerator[BaseCheckpointSaver[int], None]]) -> None:
    """Run the suite on savers that see nothing of the capability before. All of its tests must run and pass."""
    results: dict[tuple[str, str], str | None] = {}

    def on_test(capability: str, name: str, passed: bool, error: str | None) -> None:
        results[capability, name] = None if passed else error or "failed without a message"

    progress = ProgressCallbacks(on_test_result=on_test)
    report = await validate(RegisteredCheckpointer(name, fresh), progress=progress)
    assert {name for name, result in report.results.items() if result.detected} == {one.value for one in Capability}
    assert len(report.results) == 8
    failures = [f"{capability}.{name}:\n{error}" for (capability, name), error in results.items() if error]
    assert not failures, "\n".join(failures)
    assert len(results) == TESTS
    assert sum(result.tests_passed for result in report.results.values()) == TESTS
    assert sum(result.tests_failed + result.tests_skipped for result in report.results.values()) == 0
