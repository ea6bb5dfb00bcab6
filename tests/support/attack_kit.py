"""What the tests of findings share."""

from __future__ import annotations

from typing import Any

import perdure


@perdure.durable
def asks_once() -> Any:
    return perdure.ask("Go on?")
