"""Sizes and counts as text for people, the same in every message."""

from __future__ import annotations


def size(count: float) -> str:
    """Return a number of bytes as text, in powers of 1000: `270 B`, `1.2 KB`, `35 MB`."""
    amount = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 999.5:
            if unit == "B":
                return f"{int(count)} B"
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun: `1 run`, `2,000 runs`."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
