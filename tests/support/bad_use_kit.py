"""What the tests of bad use share."""

from __future__ import annotations

import pytest
from lab import Interrupt, Lab, Once

import perdure


def stuck_reason(run: perdure.Run) -> str:
    """Why a run is stuck: what its result raises, which says how to go on as well."""
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck) as caught:
        run.result()
    said = str(caught.value)
    assert "run the same line again" in said
    assert "perdure run resume" in said
    return said


def changed(lab: Lab, old: list[str], new: list[str]) -> perdure.Run:
    """A run that did its old steps, met by code that has new ones."""
    once = Once()

    @lab.step(name="work")
    def work(name: str) -> str:
        lab.ran.append(name)
        return name

    def steps() -> list[str]:
        return new if once.reached else old

    @lab.durable
    async def agent() -> list[str]:
        found = [await lab(work(name)) for name in steps()]
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    return lab.run(agent, id="r")
