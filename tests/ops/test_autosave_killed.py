"""`kill -9` in the middle of an autosave: what was durable is there, the next process goes on from it, and counts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import autosaver
import pytest
from striking import SOAK

import perdure
from perdure.testing.processes import ForkServer

KILLS = 12 if SOAK else 2


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("autosaver:work") as started:
        yield started


@pytest.mark.parametrize("mode", autosaver.POLICIES)
def test_killed_anywhere_it_goes_on_from_what_was_durable(url: str, mode: str, fork_server: ForkServer) -> None:
    chance, durable, reached = random.Random(mode), 0, 0
    for _ in range(KILLS):
        child = fork_server.start(url, mode)
        wanted = durable + chance.randint(1, 20)
        for number, unsaved in child.lines():
            durable, reached = max(durable, number - unsaved), number
            if durable >= wanted:
                break
        for number, unsaved in child.kill():
            durable, reached = max(durable, number - unsaved), number
        with perdure.open(url) as store:
            state = store.thread(mode).load(strict=True).state
        assert durable <= state["n"] <= reached + 1
        assert state["log"] == autosaver.log_of(state["n"])
    with perdure.open(url) as store:
        states = [checkpoint.state for checkpoint in store.thread(mode).history()]
        assert all(each["log"] == autosaver.log_of(each["n"]) for each in states)
        assert store.ops.verify().ok
        observed = store.thread(mode).get_autosave()
        assert mode != "adaptive" or (observed is not None and observed.failures == KILLS - 1)  # the last is still open
