"""What a run writes with a journal entry is one transaction: if the answer to its COMMIT is lost, it is looked for by
what was computed, and neither written twice nor reported as what another writer did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driver_proxy import LateDriver, LostDriver

import perdure
from perdure.log.cache import BaseCache
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point
from perdure.storage.urls import open_driver
from perdure.threads.context import StoreContext
from perdure.values.registry import Codec


@perdure.durable(name="with_entries.child")
def child() -> int:
    return 1


WRITES: dict[str, Callable[[perdure.Store], Any]] = {
    "put": lambda store: store.memory("a").put("new", [1], expect=0),
    "overwrite": lambda store: store.memory("a").put("old", [2], expect=1),
    "update": lambda store: store.memory("a").update("old", lambda value: [*value, 3]),
    "delete": lambda store: store.memory("a").delete("old"),
    "save": lambda store: store.thread("old").save([2]).step,
    "first save": lambda store: store.thread("new").save([1], expect=False).step,
    "merge": lambda store: store.thread("dict").update({"b": 2}).step,
    "send": lambda store: perdure.send("receiver", 1),
    "spawn": lambda store: perdure.spawn(child, id="child", queue="none").id,
}


def written(store: perdure.Store) -> list[Any]:
    """Everything that the writes change."""
    memory = store.memory("a")
    kept = [[(one.version, one.value, one.gone) for one in memory.history(key)] for key in ("new", "old")]
    states = [[one.state for one in store.thread(name).history()] for name in ("old", "dict")]
    return [kept, states, [info.name for info in store.threads()], len(store.runs())]


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("make", [LateDriver, LostDriver])
def test_a_write_whose_commit_was_not_acknowledged_is_made_once(
    make: type[LateDriver] | type[LostDriver], name: str
) -> None:
    found = []
    for is_struck in (False, True):
        driver = make(open_driver(":memory:", durability="normal", timeout_s=5, create=True))
        store = perdure.Store(StoreContext(driver, Codec(), BaseCache(1000), "default"))
        store.memory("a").put("old", [1])
        store.thread("old").save([1])
        store.thread("dict").save({"a": 1})
        store.start(child, id="receiver")

        @perdure.durable(name="with_entries.agent")
        def agent(store: perdure.Store = store) -> Any:
            return WRITES[name](store)

        def strike(point: Point, driver: Any = driver) -> None:
            driver.armed = driver.armed or (point.kind in ("done", "spawn") and point.when == "before")

        hooks.hook = strike if is_struck else None
        try:
            run = store.run(agent, id="agent")
        finally:
            hooks.hook = None
        result = run.result()
        assert [step.status for step in run.steps()] == ["done"]
        assert store.replay(run).result == result
        assert store.ops.verify().ok
        found.append((getattr(result, "value", result), written(store)))
        store.close()
    assert found[0] == found[1]
