"""Namespaces as text that the database can order: no label reaches into another, whatever its characters are.

Each label ends with the mark \\x01\\x01; inside of a label \\x01 is written \\x01\\x02 and NUL, which PostgreSQL
refuses, \\x01\\x03. So a path is the beginning of another one exactly if its namespace lies above that one: `acme`
never reaches `acme-corp`. Texts are compared by code points (`COLLATE "C"`), never folded: look-alikes are different.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import UsageError
from perdure.threads.checks import NAMESPACE_BYTES_MAX

Labels = tuple[str, ...]
KEY_CHARACTERS_MAX = 512  # with the numbers before it, a key must fit an entry of PostgreSQL's indexes
_END = "\x01\x01"
_LAST = "\U0010ffff" * (NAMESPACE_BYTES_MAX // 4 + 1)  # behind every path


def path_of(labels: Sequence[str]) -> str:
    """The path of a namespace. Raises UsageError for what is no label, or too long."""
    path = "".join([escaped(check_str(label, "a label of a namespace")) + _END for label in labels])
    if len(path) * 4 > NAMESPACE_BYTES_MAX and len(path.encode()) > NAMESPACE_BYTES_MAX:
        raise UsageError(f"the labels of a namespace have at most {NAMESPACE_BYTES_MAX} bytes together: {path[:60]!r}…")
    return path


def labels_of(path: str) -> Labels:
    """The labels that a path was made from."""
    return tuple(unescaped(label) for label in path.split(_END)[:-1])


def below(path: str) -> str:
    """Where the paths of a namespace and of all below it end: they are from `path` to this, without it."""
    return path[:-1] + "\x02" if path else _LAST


def above(path: str) -> list[str]:
    """The paths of a namespace and of all above it, itself first, without the root."""
    labels = path.split(_END)[:-1]
    return ["".join(label + _END for label in labels[:count]) for count in range(len(labels), 0, -1)]


def check_key(key: object) -> str:
    """A key as it is stored. Raises UsageError."""
    text = escaped(check_str(key, "a key"))
    if len(text) > KEY_CHARACTERS_MAX:
        raise UsageError(f"a key has at most {KEY_CHARACTERS_MAX} characters: {text[:60]!r}…")
    return text


def escaped(text: str) -> str:
    return text.replace("\x01", "\x01\x02").replace("\0", "\x01\x03") if "\x01" in text or "\0" in text else text


def unescaped(text: str) -> str:
    return text.replace("\x01\x03", "\0").replace("\x01\x02", "\x01") if "\x01" in text else text


def check_str(text: object, what: str) -> str:
    """A text that can be stored. Raises UsageError."""
    if not isinstance(text, str):
        hint = ': give labels one by one, store.memory("users", "alice")' if isinstance(text, tuple | list) else ""
        raise UsageError(f"{what} is a str, not {type(text).__name__}{hint}")
    if not text:
        raise UsageError(f"{what} has at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid Unicode: {text[:60]!r}") from error
    return str(text)
