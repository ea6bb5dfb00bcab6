"""Checks of a caller's arguments: names, notes, metadata, counts, paths. They run before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import Any

import orjson

from perdure.errors import Unstorable, UsageError

NAME_CHARACTERS_MAX = 512
NOTE_CHARACTERS_MAX = 10_000
NAMESPACE_BYTES_MAX = 2000  # it must fit an entry of PostgreSQL's indexes
METADATA_BYTES_MAX = 64 * 1024
COUNT_MAX = 2**62


def check_name(name: object, kind: str = "thread") -> str:
    """Return a name that both databases can store: text, not empty, no NUL, no lone surrogates. Raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"a {kind}'s name is a str, not {type(name).__name__}")
    if not name or len(name) > NAME_CHARACTERS_MAX:
        raise UsageError(f"a {kind}'s name has 1 to {NAME_CHARACTERS_MAX} characters; this one has {len(name)}")
    check_text(name, f"a {kind}'s name")
    return str(name)


def check_namespace(namespace: str) -> str:
    """Return the namespace of a line, which may be empty. Raises UsageError."""
    check_text(namespace, "a namespace")
    if len(namespace) * 4 > NAMESPACE_BYTES_MAX and len(namespace.encode()) > NAMESPACE_BYTES_MAX:
        raise UsageError(f"a namespace has at most {NAMESPACE_BYTES_MAX} bytes: {namespace[:60]!r}…")
    return namespace


def check_note(note: object) -> str | None:
    if note is None:
        return None
    if not isinstance(note, str):
        raise UsageError(f"a note is a str, not {type(note).__name__}")
    if len(note) > NOTE_CHARACTERS_MAX:
        raise UsageError(
            f"a note has at most {NOTE_CHARACTERS_MAX} characters, this one {len(note)}: put it in the state"
        )
    check_text(note, "a note")
    return str(note)


def check_text(text: str, subject: str) -> None:
    """Raise UsageError for text that a database cannot store: with a NUL or lone surrogates."""
    if "\0" in text:
        raise UsageError(f"{subject} cannot contain a NUL character: {text[:60]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{subject} is not valid Unicode: {text[:60]!r}") from error


def check_metadata(metadata: object) -> dict[str, Any] | None:
    """Return metadata as a dict of plain JSON. Raises UsageError or Unstorable.

    It must be small and need no class, because it is searched and shown in lists.
    """
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a mapping, not {type(metadata).__name__}")
    plain = dict(metadata)
    for key in plain:
        check_name(key, "metadata key")
    try:
        text = orjson.dumps(plain, option=orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS)
    except (TypeError, ValueError) as error:
        raise Unstorable(
            f"metadata must be plain JSON ({error}): put other values into the state", path="metadata"
        ) from error
    _check_plain(plain, "metadata")
    if len(text) > METADATA_BYTES_MAX:
        raise UsageError(f"metadata takes {len(text)} bytes, at most {METADATA_BYTES_MAX}: put it into the state")
    return plain


def _check_plain(value: object, path: str) -> None:
    """Raise Unstorable for values that the encoder changes silently: nan to null, a datetime or an Enum to text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            _check_plain(inner, f"{path}[{position}]")
    elif not (value is None or type(value) in (str, bool, int) or (type(value) is float and isfinite(value))):
        raise Unstorable(
            f"{path} is {value!r}: metadata must be plain JSON; put other values into the state", path=path
        )


def microseconds(time: object, option: str) -> int:
    """Return a time in microseconds since 1970. A naive one is local time, as everywhere in Python."""
    if not isinstance(time, datetime):
        raise UsageError(f"{option}= wants a datetime, not {type(time).__name__}")
    return int(time.astimezone().timestamp() * 1_000_000)


def parse_cursor(cursor: object) -> tuple[int, int]:
    """Return the time and the number in a cursor of a list. Raises UsageError."""
    try:
        at, number = str(cursor).split(".")
        return min(int(at), COUNT_MAX), min(int(number), COUNT_MAX)
    except ValueError:
        raise UsageError(f"before={cursor!r}: the `cursor` of the last run or thread of a page") from None


def check_limit(limit: int | None) -> int | None:
    if limit is not None and (not isinstance(limit, int) or not 0 <= limit <= COUNT_MAX):
        raise UsageError(f"limit={limit!r}: a count of 0 or more, or None for all")
    return limit


def check_keep(keep: object) -> int:
    if not isinstance(keep, int) or not 1 <= keep <= COUNT_MAX:
        raise UsageError(f"prune(keep={keep!r}): a count of 1 or more; to remove all, delete the thread")
    return keep


def check_step(step: object) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= COUNT_MAX:
        raise UsageError(f"at_step({step!r}): the `step` of a checkpoint, a number of 0 or more")
    return step


def check_points(points: object) -> int:
    if not isinstance(points, int) or not 2 <= points <= 10_000:
        raise UsageError(f"sizes(points={points!r}): a count from 2 to 10,000")
    return points


def check_paths(paths: object) -> list[tuple[Any, ...]]:
    """Return paths into a state as tuples. Each is passed as a key, or as a sequence of keys and positions."""
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        raise UsageError(f'update(remove=…) takes a list of paths, such as remove=["draft"], not {paths!r}')
    checked = [(path,) if isinstance(path, str) else path for path in paths]
    for path in checked:
        if not isinstance(path, Sequence):
            raise UsageError(f"update(remove=…): {path!r} is no path; a key, or a list of keys and positions")
    return [tuple(path) for path in checked]
