"""The handle of a run shows what it last saw."""

from __future__ import annotations

from typing import Any

from lab import Lab

import perdure


def test_the_status_is_what_was_last_seen_until_it_is_refreshed(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Which?"))

    run, other = lab.run(agent, id="r"), lab.store.get_run("r")
    lab.store.answer("r", "LH400")
    assert lab.run(agent, id="r").status == "done"
    assert (run.status, other.status) == ("waiting", "waiting")
    assert run.refresh().status == run.status == "done"
    assert other.result() == "LH400"
    assert other.status == "done"


def test_calls_that_control_a_run_update_its_handle(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Which?"))

    run = lab.run(agent, id="r")
    for call, status in ((run.pause, "paused"), (run.resume, "queued"), (run.cancel, "cancelled")):
        assert call() == run.status == status
    fork = lab.store.fork("r", id="fork")
    assert (fork.status, lab.store.fork("r", id="fork").status) == ("queued", "queued")
