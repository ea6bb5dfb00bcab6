"""Encoding of namespaces as paths that the database can order, whatever characters their labels contain.

Each label ends with the mark \\x01\\x01; \\x01 and NUL (which PostgreSQL refuses) inside of it are escaped. So a path
is a prefix of another one exactly if its namespace lies above that one: `acme` is no prefix of `acme-corp`. Texts are
compared by code points (`COLLATE "C"`) and never folded: look-alikes are different.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import UsageError
from perdure.threads.checks import NAMESPACE_BYTES_MAX

Labels = tuple[str, ...]
KEY_CHARACTERS_MAX = 512  # with the numbers before it, a key must fit an entry of PostgreSQL's indexes
_END = "\x01\x01"
_LAST = "\U0010ffff" * (NAMESPACE_BYTES_MAX // 4 + 1)  # sorts after every path


def path_of(labels: Sequence[str]) -> str:
    """Return the path of a namespace. Raises UsageError if a label is invalid, or if the path is too long."""
    path = "".join([escaped(check_str(label, "a label of a namespace")) + _END for label in labels])
    if len(path) * 4 > NAMESPACE_BYTES_MAX and len(path.encode()) > NAMESPACE_BYTES_MAX:
        raise UsageError(f"the labels of a namespace have at most {NAMESPACE_BYTES_MAX} bytes together: {path[:60]!r}…")
    return path


def labels_of(path: str) -> Labels:
    return tuple(unescaped(label) for label in path.split(_END)[:-1])


def subject_of(path: str) -> str:
    """Return a namespace as `store.ops.actions()` names it: `memory users/alice`."""
    return f"memory {'/'.join(path.split(_END)[:-1])}"


def below(path: str) -> str:
    """Return the exclusive upper bound of the paths of a namespace and of all below it. They start at `path`."""
    return path[:-1] + "\x02" if path else _LAST


def above(path: str) -> list[str]:
    """Return the paths of a namespace and of all above it without the root, its own first."""
    labels = path.split(_END)[:-1]
    return ["".join(label + _END for label in labels[:count]) for count in range(len(labels), 0, -1)]


def check_key(key: object) -> str:
    """Return a key as it is stored. Raises UsageError."""
    text = escaped(check_str(key, "a key"))
    if len(text) > KEY_CHARACTERS_MAX:
        raise UsageError(f"a key has at most {KEY_CHARACTERS_MAX} characters: {text[:60]!r}…")
    return text


def escaped(text: str) -> str:
    return text.replace("\x01", "\x01\x02").replace("\0", "\x01\x03") if "\x01" in text or "\0" in text else text


def unescaped(text: str) -> str:
    return text.replace("\x01\x03", "\0").replace("\x01\x02", "\x01") if "\x01" in text else text


def check_str(text: object, subject: str) -> str:
    """Return a text that can be stored. Raises UsageError."""
    if not isinstance(text, str):
        hint = ': give labels one by one, store.memory("users", "alice")' if isinstance(text, tuple | list) else ""
        raise UsageError(f"{subject} is a str, not {type(text).__name__}{hint}")
    if not text:
        raise UsageError(f"{subject} has at least one character")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{subject} is not valid Unicode: {text[:60]!r}") from error
    return str(text)
