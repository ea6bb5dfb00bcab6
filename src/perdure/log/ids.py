"""Record ids: 63 bits, time first, made by the process that saves.

An id is known before the record is written, so that a COMMIT whose answer was lost can be looked up. Along a line of
records ids grow, also when a clock stepped back: a chain of differences is a range of ids. Shown to people as 13
characters (Crockford's base 32, no letters that look alike).
"""

from __future__ import annotations

from perdure.errors import NotFound

_EPOCH_MS = 1_577_836_800_000  # 2020-01-01: 41 bits of milliseconds last until 2089
_RANDOM_BITS = 22
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
ID_MAX = (1 << 63) - 1
ROOM = 1 << 32  # an id so near the end is damaged: none could follow it


def new_id(now_us: int, random: int, after: int) -> int:
    """An id for a record made at `now_us`, greater than `after` (its parent and its base)."""
    milliseconds = max(0, now_us // 1000 - _EPOCH_MS)
    made = ((milliseconds << _RANDOM_BITS) | (random & ((1 << _RANDOM_BITS) - 1))) & ID_MAX
    # A clock that stepped back must not break the order along a line. The random step keeps two writers apart: it is
    # a quarter of a millisecond at most, so that ids do not run ahead of the clock.
    return made if made > after else after + 1 + (random & 0xFFFFF)


def show_id(record: int) -> str:
    """The 13 characters that people see."""
    first, pairs = _ALPHABET[record >> 60 & 31], _PAIRS
    head = f"{first}{pairs[record >> 50 & 1023]}{pairs[record >> 40 & 1023]}{pairs[record >> 30 & 1023]}"
    return f"{head}{pairs[record >> 20 & 1023]}{pairs[record >> 10 & 1023]}{pairs[record & 1023]}"


def parse_id(text: str) -> int:
    """The id behind the 13 characters. Raises NotFound: no such checkpoint can exist."""
    value = 0
    for character in text.lower():
        if (digit := _VALUES.get(character)) is None:
            break
        value = value << 5 | digit
    else:
        if len(text) == 13 and 0 < value <= ID_MAX:
            return value
    raise NotFound(f"{text!r} is not a checkpoint id: those have 13 characters, such as '0d3k9qx2m7w1a'")
