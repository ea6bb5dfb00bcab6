"""A value in a message, of whatever class: the one place where Perdure calls `repr` on what it was given."""

from __future__ import annotations

from typing import Any


def shown(value: Any, limit: int = 60) -> str:
    """A value in one short line. Never raises: a class of the user's may, and so does an int of 4,300 digits."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:
        text = f"<int of {value.bit_length()} bits>" if type(value) is int else f"<{type(value).__qualname__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
