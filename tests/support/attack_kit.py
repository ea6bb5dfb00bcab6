"""What the tests of findings share."""

from __future__ import annotations

from typing import Any

import holdfast as hf


@hf.durable
def asks_once() -> Any:
    return hf.ask("Go on?")
