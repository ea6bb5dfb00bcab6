"""Values for people: plain data without secrets, trees with limits, one-line previews, times. Pure functions.

Nothing here makes HTML: templates do, and they escape.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from perdure.views import is_secret, readable, to_json

LEVELS_MAX, CHILDREN_MAX, TEXT_MAX = 24, 100, 2_000  # of a tree
_PLAIN_LEVELS_MAX = 200  # of JSON: its reader recurses too
MASK = "***"
_ATOMS = (str, bool)
# Characters that steer text: controls, direction overrides, zero width. Line ends and tabs stay.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def safe_text(text: str) -> str:
    """Return the text with invisible characters written out."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plain(value: Any, *, reveal: bool = False, level: int = 0) -> Any:
    """Return a value of the store as data that JSON can hold, with values under secret keys masked."""
    if value is None or type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping) and str(value.get("<type>")).startswith("perdure.crdt."):
        value = readable(value)  # without its writers and numbers
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value) if not one.name.startswith("_")}
    if not isinstance(value, Mapping | list | tuple | deque):
        return readable(value)
    if level == _PLAIN_LEVELS_MAX:
        return f"(deeper than {_PLAIN_LEVELS_MAX} levels)"
    if not isinstance(value, Mapping):
        return [plain(item, reveal=reveal, level=level + 1) for item in value]
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if isinstance(key, str) else str(readable(key))
        if name in result or (name is not key and name in value):
            name = f"{name} ({type(key).__name__})"  # 1 and "1" are two keys
        hidden = not reveal and item is not None and is_secret(name, item)
        result[name] = MASK if hidden else plain(item, reveal=reveal, level=level + 1)
    return result


def pick(one: Any, names: str) -> dict[str, Any]:
    """Return some attributes of an object of the library by name: `pick(info, "id status")`."""
    return {name: getattr(one, name) for name in names.split()}


@dataclass
class TreeNode:
    """One line of a tree. `more`: how many children, or characters, are left out."""

    key: str
    kind: str  # object, array, string, number, boolean, null, masked
    text: str
    path: tuple[str | int, ...] = ()
    children: list[TreeNode] = field(default_factory=list)
    size: int = 0
    more: int = 0
    is_open: bool = False
    mark: str = ""  # added, changed: in comparison with another value

    @property
    def is_cut(self) -> bool:
        """Whether something of it is not shown."""
        return self.more > 0 or any(child.is_cut for child in self.children)


_KINDS = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}


def tree(
    value: Any,
    key: str = "",
    *,
    open_to: int = 1,
    marks: Mapping[tuple[str | int, ...], str] | None = None,
    path: tuple[str | int, ...] = (),
) -> TreeNode:
    """Return plain data as lines. `open_to` levels are open, and so is everything that leads to a mark."""
    kind, mark = _KINDS.get(type(value), "number"), (marks or {}).get(path, "")
    if not isinstance(value, dict | list):
        text = value if isinstance(value, str) else to_json(value)
        kind = "masked" if value == MASK else kind
        return TreeNode(key, kind, safe_text(text[:TEXT_MAX]), path, more=max(0, len(text) - TEXT_MAX), mark=mark)
    size, node = len(value), TreeNode(key, kind, brief(value, 60), path, size=len(value), mark=mark)
    if len(path) == LEVELS_MAX:
        node.more = size
        return node
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for (name, item), _ in zip(pairs, range(CHILDREN_MAX), strict=False):
        node.children.append(tree(item, str(name), open_to=open_to, marks=marks, path=(*path, name)))
    node.more = size - len(node.children)
    node.is_open = len(path) < open_to or any(child.mark or (marks and child.is_open) for child in node.children)
    return node


def brief(value: Any, width: int = 120) -> str:
    """Return plain data in one line of at most `width` characters."""
    text = value if isinstance(value, str) else to_json(_sample(value, width))
    text = safe_text(" ".join(text[: 4 * width].split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def parted(pair: Sequence[Any], width: int = 400) -> list[tuple[str, str, str]]:
    """Return two values in one line each, as (same, different, same): what a person must look at is in the middle."""
    before, after = (brief(value, width) for value in pair)
    most, start, end = min(len(before), len(after)), 0, 0
    while start < most and before[start] == after[start]:
        start += 1
    while end < most - start and before[-1 - end] == after[-1 - end]:
        end += 1
    return [(text[:start], text[start : len(text) - end], text[len(text) - end :]) for text in (before, after)]


def _sample(value: Any, width: int, level: int = 0) -> Any:
    """Return the beginning of plain data: enough for a line."""
    if isinstance(value, str):
        return value[:width]
    if not isinstance(value, dict | list):
        return value
    if level == 6:
        return "…"
    if isinstance(value, list):
        return [_sample(item, width, level + 1) for item in value[:20]]
    return {key: _sample(value[key], width, level + 1) for key, _ in zip(value, range(20), strict=False)}


def ago(at: datetime | None) -> str:
    """Return a time relative to now: `5 min ago`, `in 2 h`; after 30 days, the date."""
    if at is None:
        return ""
    seconds = (datetime.now(UTC) - at).total_seconds()
    past, distance = seconds >= -1, abs(seconds)
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86_400, "h", 3600), (30 * 86_400, "d", 86_400)):
        if distance < limit:
            text = f"{distance // size:.0f} {unit}"
            return "just now" if past and distance < 3 else f"{text} ago" if past else f"in {text}"
    return at.astimezone().strftime("%Y-%m-%d")


def exact(at: datetime) -> str:
    """Return a time to the second, in the time zone of the server, with its name."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def lasted(seconds: float | None) -> str:
    """Return a duration: `894 ms`, `3.2 s`, `7 h 48 min`, `30 d`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    for limit, large, small, size in ((3600, "min", "s", 60), (86_400, "h", "min", 3600), (10**12, "d", "h", 86_400)):
        if seconds < limit:
            left = int(seconds % size * {"s": 1, "min": 1 / 60, "h": 1 / 3600}[small])
            return f"{seconds // size:.0f} {large}" + (f" {left} {small}" if left else "")
    return "ages"
