"""What a command is: what it says of itself, the arguments it adds, and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command: what it says of itself, the arguments it adds, and what it does."""

    summary: str
    description: str
    examples: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., int]
    opens: bool = True  # it is given an open store; else it opens one itself, and may make it
    wants_store: bool = True  # False: it needs none at all


def count(text: str) -> int:
    """The type of an argument: a count."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)
