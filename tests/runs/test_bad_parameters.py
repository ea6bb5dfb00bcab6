"""Parameters of durable functions that starting a run would take for itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import perdure


def test_every_option_of_starting_a_run_is_refused_as_a_parameter_at_decoration() -> None:
    options = {
        parameter.name
        for starting in (perdure.Store.run, perdure.Store.start, perdure.spawn)
        for parameter in inspect.signature(starting).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert options >= {"id", "queue", "delay_s"}
    for option in sorted(options):
        for parameters in (f"{option}=1", f"n, *, {option}"):
            fn: Any = eval(f"lambda {parameters}: 0")
            with pytest.raises(perdure.errors.UsageError, match=r"takes for itself.*Rename it, such as"):
                perdure.durable(name="takes")(fn)


def test_a_parameter_that_has_no_name_for_callers_is_fine(sync_lab: Any) -> None:
    @perdure.durable
    def positional(id: str, /) -> str:
        return id

    assert sync_lab.run(positional, "a", id="run").result() == "a"


@pytest.mark.parametrize("priority", ["high", 1.5, 2**63, None])
def test_a_priority_that_is_no_number_is_refused_and_stops_no_worker(sync_lab: Any, priority: Any) -> None:
    """SQLite stores any value in any column; a worker that sorts runs by it would stop."""

    @perdure.durable(name="prioritised")
    def child() -> str:
        return "done"

    @perdure.durable(name="spawns")
    def parent() -> None:
        perdure.spawn(child, priority=priority)

    store: perdure.Store = sync_lab.store
    for start in (store.run, store.start):
        with pytest.raises(perdure.UsageError, match="priority"):
            start(child, priority=priority)
    good = store.start(child)
    perdure.Worker(store, [child]).run(until_idle=True)
    assert good.result() == "done"
    assert store.run(parent).status == ("done" if priority is None else "stuck")
