"""How many tokens a text has at most, without a tokenizer: the same number on every machine."""

from __future__ import annotations

import re

# One token per three letters or digits, per letter of a long run (a hash, base64), per byte of what is not ASCII, and
# per other sign or short run of spaces. A space before a word counts nothing.
_PIECE = re.compile(
    r"([A-Za-z0-9]{17,})|[A-Za-z]{1,3}|[0-9]{1,3}| (?=[A-Za-z])()| {1,4}|\n{1,4}|([^\x00-\x7f]+)|.", re.S
)


def estimate(text: str) -> int:
    """Return an upper estimate of the tokens that `o200k_base` needs, by words and punctuation.

    It is about 1.6 times their number in English, code and JSON, and three per sign in Chinese. Short words of random
    letters can need more than it says; longer ones do not.
    """
    return sum(map(_cost, _PIECE.finditer(text)))


def cut(text: str, most: int) -> str:
    """Return the beginning of a text that has at most `most` tokens by `estimate`, or the whole."""
    left = most
    for piece in _PIECE.finditer(text):
        cost = _cost(piece)
        if cost > left:
            is_run = piece.lastindex in (1, 3)  # a run of signs can be cut anywhere, a word only before it
            part = piece[0].encode("utf-8", "surrogatepass")[:left] if is_run else b""
            return (text[: piece.start()] + part.decode("utf-8", "ignore")).rstrip(" ")
        left -= cost
    return text


def _cost(piece: re.Match[str]) -> int:
    kind = piece.lastindex
    if kind is None:
        return 1
    return 0 if kind == 2 else len(piece[kind].encode("utf-8", "surrogatepass"))
