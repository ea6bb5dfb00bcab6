"""LangGraph's `prune` and `delete_for_runs`, as calls of the engine's own removals."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.adapters import Flow, LineEngine, line_flows
from perdure.errors import UsageError
from perdure.langgraph.checkpoints import run_key


def prune(engine: LineEngine, threads: Sequence[str], strategy: str) -> Flow[None]:
    """Keep the newest checkpoint of each namespace ("keep_latest"), or nothing ("delete")."""
    if strategy not in ("keep_latest", "delete"):
        raise UsageError(f'strategy={strategy!r}: "keep_latest" or "delete"')
    _check_many(threads, "prune", "thread_ids")
    for thread in threads:
        if strategy == "delete":
            yield from line_flows.delete(engine, str(thread))
        else:
            yield from line_flows.prune(engine, str(thread), 1)


def delete_runs(engine: LineEngine, runs: Sequence[str]) -> Flow[None]:
    """Remove the checkpoints that runs have made, in all threads."""
    _check_many(runs, "delete_for_runs", "run_ids")
    yield from line_flows.delete_runs(engine, [run_key(str(run)) for run in runs])


def _check_many(given: object, method: str, what: str) -> None:
    if isinstance(given, str | bytes):  # its characters would be taken for names
        raise UsageError(f"{method}({given!r}): {what} are a list: [{given!r}]")
