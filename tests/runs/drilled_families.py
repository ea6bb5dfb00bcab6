"""An agent for the drill that has children and begins anew: right, and hard to tell apart from one that is not."""

from __future__ import annotations

import random

import holdfast as hf


@hf.step
def draw() -> float:
    return random.random()  # another one at the same place in every child and every life


@hf.durable(name="drilled_families.child")
def child() -> float:
    hf.sleep(60)
    hf.ask("Shall it go on?")
    return draw()


@hf.durable(name="drilled_families.parent")
def parent(turn: int = 0, total: float = 0.0) -> float:
    total += draw()
    if turn == 0:
        hf.continue_as_new(1, total + hf.spawn(child, id="named").result())
    return total
