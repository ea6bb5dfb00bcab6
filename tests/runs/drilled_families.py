"""An agent for the drill that has children and begins anew: right, and hard to tell apart from one that is not."""

from __future__ import annotations

import random

import perdure


@perdure.step
def draw() -> float:
    return random.random()  # another one at the same place in every child and every life


@perdure.durable(name="drilled_families.child")
def child() -> float:
    perdure.sleep(60)
    perdure.ask("Shall it go on?")
    return draw()


@perdure.durable(name="drilled_families.parent")
def parent(turn: int = 0, total: float = 0.0) -> float:
    total += draw()
    if turn == 0:
        perdure.continue_as_new(1, total + perdure.spawn(child, id="named").result())
    return total
