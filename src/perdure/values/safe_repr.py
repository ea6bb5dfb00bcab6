"""Values of any class in messages. No other module calls `repr` on a value of the user's."""

from __future__ import annotations

from typing import Any


def shown(value: Any, limit: int = 60) -> str:
    """Return a value as one short line. Never raises, although `repr` of a user's class or of a huge int may."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:
        text = f"<int of {value.bit_length()} bits>" if type(value) is int else f"<{type(value).__qualname__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
