"""The parts that make a text large, by path and size.

This is computed only on request, or when a state exceeds a limit: parts are encoded again to measure them. Only paths
and sizes leave this module, no values. Keys in a path may be personal data, so each is cut to 40 characters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import orjson

KEY_CHARACTERS_MAX: Final = 40
_NEARLY_ALL: Final = 0.9  # a part that takes this share of its parent is shown instead of the parent
_MOST: Final = 0.5
_SEQUENCES: Final = frozenset({"^tuple", "^set", "^frozenset"})
_PAIRS: Final = frozenset({"^dict", "^odict"})
Inner = tuple[int, str, Any]  # the size of a part, the end of its path, its parsed text


class SizedPart(NamedTuple):
    """A part of a state, `state["messages"][17].content`, and how many bytes of the text it takes."""

    path: str
    bytes: int


def largest(text: bytes, count: int) -> list[SizedPart]:
    """Return the largest parts, largest first. A size includes the parts inside, so sizes do not add up."""
    heap: list[tuple[int, int, str, Any]] = [(-len(text), 0, "state", orjson.loads(text))]
    parts: list[SizedPart] = []
    number = 0
    while heap and len(parts) < count:
        negative, _, path, node = heapq.heappop(heap)
        # Smaller parts of one value than its `count` largest cannot be among the `count` largest of all.
        inner = heapq.nlargest(count, _parts(node), key=_size)
        if not inner or (path != "state" and inner[0][0] < _NEARLY_ALL * -negative):
            parts.append(SizedPart(path, -negative))
        for size, label, part in inner:
            number += 1
            heapq.heappush(heap, (-size, number, path + label, part))
    return parts


def culprit(text: bytes) -> SizedPart:
    """Return the smallest part that takes at least half of the text, or the largest part of the state."""
    path, size, node = "state", len(text), orjson.loads(text)
    while True:
        inner = max(_parts(node), key=_size, default=None)
        if inner is None or (inner[0] < _MOST * len(text) and path != "state"):
            return SizedPart(path, size)
        size, path, node = inner[0], path + inner[1], inner[2]


def _size(part: Inner) -> int:
    return part[0]


def _parts(node: Any) -> Iterable[Inner]:
    """Return the parts of a parsed value. A tagged value has the parts of the object that it stands for."""
    if type(node) is list:
        return _items(node)
    if type(node) is not dict:
        return ()
    if len(node) == 1:
        [(tag, content)] = node.items()
        if tag.startswith("^"):
            return _tagged(tag, content)
    return ((len(orjson.dumps(value)), f"[{_shown(key)}]", value) for key, value in node.items())


def _items(items: list[Any]) -> Iterable[Inner]:
    return ((len(orjson.dumps(value)), f"[{at}]", value) for at, value in enumerate(items))


def _tagged(tag: str, content: Any) -> Iterable[Inner]:
    """Return the parts of a tagged value: fields of an object, items, values under keys that are not text."""
    if tag == "^obj":
        body = content[2]
        return _fields(body) if type(body) is dict else _parts(body)
    if tag.startswith("^msg."):
        return _fields(content)
    if tag in _SEQUENCES:
        return _items(content)
    if tag in _PAIRS:
        return ((len(orjson.dumps(value)), f"[{_shown(key)}]", value) for key, value in content)
    return ()


def _fields(body: dict[str, Any]) -> Iterable[Inner]:
    return ((len(orjson.dumps(value)), f".{_cut(name)}", value) for name, value in body.items() if name[:1] != "^")


def _shown(key: Any) -> str:
    """Return a key as it is written in code; "…" for one that is neither text nor number."""
    if type(key) is str:
        return orjson.dumps(_cut(key)).decode()
    return str(key) if type(key) in (int, float, bool, type(None)) else "…"


def _cut(key: str) -> str:
    return key if len(key) <= KEY_CHARACTERS_MAX else key[: KEY_CHARACTERS_MAX - 1] + "…"
