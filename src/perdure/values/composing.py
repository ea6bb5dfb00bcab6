"""Several differences as one: what a load that passes over all of them has to do. Pure.

The splices of a difference count in the text before it. To put two together, the second is walked over what the first
one makes of the text: what it keeps of that is kept or inserted, what it drops of an insertion never was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perdure.values.delta import Splices

_Op = tuple[int, int, bytes]  # keep so many bytes, drop so many, insert these
_END = 1 << 62  # longer than any text: behind the last change all is kept


def compose(differences: Iterable[Splices]) -> Splices | None:
    """One difference that does what these do, one after the other. None if it cannot be said without the text: a patch
    refers to what is there."""
    ops: list[_Op] = []
    for flat in differences:
        second = _ops(flat)
        if second is None:
            return None
        ops = _then(ops, second) if ops else second
    return [part for op in ops for part in op]


def _ops(flat: Splices) -> list[_Op] | None:
    parts: Iterator[Any] = iter(flat)
    ops = list(zip(parts, parts, parts, strict=True))
    return None if any(drop < 0 for _, drop, _ in ops) else ops


def _then(first: list[_Op], second: list[_Op]) -> list[_Op]:
    made = _Made()
    changes = iter(first)
    kept, dropped, text = next(changes)
    at = 0  # how much of `text` is used
    for skip, drop, insert in second:
        for wanted, keeping in ((skip, True), (drop, False)):
            left = wanted
            while left:
                if kept:
                    size = min(left, kept)
                    kept -= size
                    if keeping:
                        made.keep(size)
                    else:
                        made.dropped += size
                elif at < len(text):
                    size = min(left, len(text) - at)
                    if keeping:
                        made.texts.append(text[at : at + size])
                    at += size
                else:
                    made.dropped += dropped
                    kept, dropped, text = next(changes, (_END, 0, b""))
                    at = size = 0
                left -= size
        if insert:
            made.texts.append(insert)
    for op in ((kept, dropped, text[at:]), *changes):
        made.rest(*op)
    return made.ops()


class _Made:
    """A difference as it grows: what changes at one place becomes one splice."""

    __slots__ = ("_ops", "_skip", "dropped", "texts")

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        self._skip = 0
        self.dropped = 0
        self.texts: list[bytes] = []

    def keep(self, size: int) -> None:
        if size and (self.dropped or self.texts):
            self._ops.append((self._skip, self.dropped, b"".join(self.texts)))
            self._skip, self.dropped, self.texts = 0, 0, []
        self._skip += size

    def rest(self, skip: int, drop: int, insert: bytes) -> None:
        """What the first difference changes behind the second's place."""
        self.keep(skip)
        self.dropped += drop
        if insert:
            self.texts.append(insert)

    def ops(self) -> list[_Op]:
        self.keep(_END)
        return self._ops
