"""What the tests of async runs share."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from lab import Lab

import perdure

PATIENCE_S = 30.0


def noting(lab: Lab) -> Any:
    @perdure.step
    async def note(what: Any) -> Any:
        lab.ran.append(what)
        return what

    return note


async def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
