"""Processes that are killed at a request to Cosmos DB: the same line goes on, and no finished task runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_run
import pytest
from azure.cosmos import CosmosClient
from checkpoints import config_of, everything, ids_in, numbered_id, put, values_at
from cosmos_run import StruckContainer
from crash_run import TASKS, TOTAL
from soak import SOAK, spread

from perdure.cosmos import CosmosSaver
from perdure.testing.processes import ForkServer


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("cosmos_run:child") as opened:
        yield opened


def test_a_kill_at_any_request_loses_nothing_that_was_stored(
    cosmos_url: str, cosmos_saver: CosmosSaver, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Ten tasks with side effects at once, then their sum. A task whose result is stored does not run again."""
    database = repr(cosmos_saver._lines.context.container).partition("/")[0]

    def run(thread: str, die_at: int = 0, is_after: bool = False) -> list[list[int]]:
        log = str(tmp_path / f"{thread}.log")
        return list(fork_server.start(cosmos_url, database, thread, log, die_at, is_after).lines())

    [[total, requests]] = run("whole")
    assert total == TOTAL
    points = [(at, is_after) for at in range(1, requests + 1) for is_after in (False, True)]
    for at, is_after in points if SOAK else [(requests // 2, True), (requests, False)]:
        thread, log = f"killed at {at} {is_after}", tmp_path / f"killed at {at} {is_after}.log"
        assert run(thread, at, is_after) == [], "not killed"
        rows = [row for row in everything(cosmos_saver) if row[0] == thread]
        stored = {task for row in rows for task, channel, _ in row[-1] if channel == "__return__"}
        ran = log.read_text().split() if log.exists() else []
        assert [total for total, _ in run(thread)] == [TOTAL]
        times = Counter(log.read_text().split())
        assert sorted(times, key=int) == [str(number) for number in range(TASKS)]
        assert sum(times.values()) - TASKS <= len(ran) - len(stored)
        assert at < requests or len(stored) == TASKS  # the last request is the put that waits for all results


OPERATIONS = ["prune", "delete_thread", "put_again", "put", "put_writes", "delete_for_runs", "copy_thread"]


@pytest.mark.parametrize("operation", OPERATIONS if SOAK else OPERATIONS[:2])
def test_an_operation_that_stops_at_any_request_is_finished_by_the_same_call(
    cosmos_client: CosmosClient, operation: str
) -> None:
    """Whatever it has done by then, all that is left can be read, and a put is all or nothing."""
    act, points = crash_run.OPERATIONS[operation], [1]
    outcomes: list[Any] = []
    while points:
        saver, items = StruckContainer.saver(cosmos_client)
        crash_run.prepare(saver)
        outcomes = outcomes or [everything(saver)]
        items.left = points.pop() if len(outcomes) == 2 else 0
        if len(outcomes) == 1:  # the first time it is not struck
            act(saver)
            outcomes.append(everything(saver))
            points = spread(range(1, 1 - items.left), 2)
            continue
        with pytest.raises(StruckContainer.Struck):
            act(saver)
        other = StruckContainer.saver(cosmos_client, items)[0]
        seen = everything(other)
        assert seen in outcomes or operation not in ("put", "put_again")
        act(other)
        assert everything(StruckContainer.saver(cosmos_client, items)[0]) == outcomes[1]


@pytest.mark.parametrize("requests", [1, 3])
def test_a_killed_deletion_neither_goes_back_nor_brings_back(cosmos_client: CosmosClient, requests: int) -> None:
    """Killed when one of two checkpoints to keep was saved anew, or when the start of the old chain was deleted."""
    saver, items = StruckContainer.saver(cosmos_client)
    for number in range(4):
        put(saver, "t", {"n": number}, id=numbered_id(number), run_id="early" if number < 2 else "late")
    items.left = requests + 1
    with pytest.raises(StruckContainer.Struck):
        saver.delete_for_runs(["late"])
    other = StruckContainer.saver(cosmos_client, items)[0]
    assert values_at(other, config_of("t")) == {"n": 1}
    if requests == 3:
        assert ids_in(other, config_of("t")) == [numbered_id(1), numbered_id(0)]
        other.prune(["t"])
        assert ids_in(other, config_of("t")) == [numbered_id(1)]
    assert values_at(other, config_of("t")) == {"n": 1}
