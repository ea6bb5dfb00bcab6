"""Read tags: turn parsed JSON back into the values that `tagged` wrote.

The text is not trusted. Every tag's content must have exactly the right shape. Nothing in it is called or imported:
classes come from the `Codec`. No size that the text claims allocates memory. `codec.decode` turns any other error into
Undecodable. A string that holds the text of a tag stays a string.

In raw form an object becomes a dict, `{"<type>": "app.Plan", "title": …}`, with "<version>" if it is not 1, and with
"<value>" if `dump` did not return a dict. A set or dict with such members becomes `{"<type>": "set", "items": […]}`,
because dicts cannot be hashed. Built-in types stay as they are. No code of any class runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain, compress
from typing import Any, Final

from perdure.errors import Undecodable, UnknownType
from perdure.values import arrays, model_tags
from perdure.values.builtin_types import READERS, Reader, need, text_of_tag
from perdure.values.limits import DEPTH_MAX
from perdure.values.plain import CONTAINERS, may_be_tagged
from perdure.values.registry import Codec


class Reviver:
    """One pass over one parsed text; it changes the parsed tree in place."""

    def __init__(self, codec: Codec, *, raw: bool) -> None:
        self.codec = codec
        self.raw = raw

    def revive(self, node: Any, depth: int = 0) -> Any:
        """Return the value of a parsed node."""
        kind = type(node)
        if kind not in CONTAINERS:
            return node
        if depth > DEPTH_MAX:
            raise Undecodable(f"stored text is nested more than {DEPTH_MAX} levels deep")
        if kind is list:
            return self._list(node, depth)
        if len(node) == 1:
            [(key, content)] = node.items()
            if key.startswith("^"):
                return self._tag(key, content, depth)
        self.values(node, depth + 1)
        return node

    def _list(self, node: list[Any], depth: int) -> list[Any]:
        kinds = set(map(type, node))
        if kinds.isdisjoint(CONTAINERS):
            return node
        if kinds == {dict}:
            sizes = set(map(len, node))
            if (1 not in sizes and _flat(node)) or (sizes == {1} and self._models(node, depth)):
                return node
        for at, item in enumerate(node):
            if type(item) in CONTAINERS:
                node[at] = self.revive(item, depth + 1)
        return node

    def _models(self, node: list[Any], depth: int) -> bool:
        """Read a list of nothing but models with tags of their own, all at once. Return False for any other list."""
        tags: list[str] = list(chain.from_iterable(node))
        kinds = set(tags)
        if self.raw or depth + 3 > DEPTH_MAX or not model_tags.are_tags(kinds):
            return False
        shapes = {tag: self.codec.entry_tagged(tag).shape for tag in kinds}
        known = {tag: shape for tag, shape in shapes.items() if shape is not None}
        bodies: list[Any] = list(chain.from_iterable(map(dict.values, node)))
        if len(known) < len(kinds) or set(map(type, bodies)) != {dict}:
            return False
        if _may_be_tagged(bodies, depth + 3):
            for body in bodies:
                self.values(body, depth + 3)
        node.clear()
        node.extend(model_tags.make_all(tags, bodies, known))
        return True

    def values(self, node: dict[str, Any], depth: int) -> None:
        """Read the tags in the values of a dict that is not a tag itself."""
        for key, item in node.items():
            if type(item) in CONTAINERS:
                node[key] = self.revive(item, depth)  # only values change, so the iteration stays valid

    def _tag(self, tag: str, content: Any, depth: int) -> Any:
        reader = _READERS.get(tag)
        if reader is None:
            if model_tags.name_of(tag) is None:
                raise Undecodable(f"stored text has the tag {tag[:50]!r}, which this version of Perdure does not know")
            reader = partial(_model, tag)
        try:
            return reader(self, content, depth + 1)
        except (Undecodable, UnknownType, RecursionError, MemoryError):
            raise
        except Exception as problem:
            raise Undecodable(f"stored text has a malformed {tag}: {problem!r}"[:500]) from problem

    def array(self, content: Any, depth: int) -> list[Any]:
        need(type(content) is list)
        return self._list(content, depth) if depth <= DEPTH_MAX else self.revive(content, depth)

    def pairs(self, content: Any, depth: int) -> list[tuple[Any, Any]]:
        need(type(content) is list and all(type(pair) is list and len(pair) == 2 for pair in content))
        return [(self.revive(key, depth + 1), self.revive(item, depth + 1)) for key, item in content]

    def mapping(self, name: str, target: Any, pairs: list[tuple[Any, Any]]) -> Any:
        """Fill an empty mapping with pairs and return it."""
        try:
            set_item = (OrderedDict if type(target) is OrderedDict else dict).__setitem__
            for key, item in pairs:
                set_item(target, key, item)
        except TypeError:
            if self.raw:
                return {"<type>": name, "items": [list(pair) for pair in pairs]}
            raise
        need(len(target) == len(pairs))
        return target


def _flat(node: list[dict[str, Any]]) -> bool:
    """Return whether these dicts hold no containers, as most lists of messages do."""
    return CONTAINERS.isdisjoint(map(type, chain.from_iterable(map(dict.values, node))))


def _may_be_tagged(bodies: list[dict[str, Any]], depth: int) -> bool:
    """Return whether a value in these dicts may hold a tag. `depth` is the depth of the values."""
    held = list(chain.from_iterable(map(dict.values, bodies)))
    if CONTAINERS.isdisjoint(map(type, held)):
        return False
    return may_be_tagged(list(compress(held, map(CONTAINERS.__contains__, map(type, held)))), DEPTH_MAX - depth)


def _numpy(tag: str) -> Callable[[Reviver, Any, int], Any]:
    def read(run: Reviver, content: Any, depth: int) -> Any:
        try:
            return arrays.load(tag, content)
        except UnknownType:
            if run.raw:
                return {"<type>": "numpy", "<value>": content}
            raise

    return read


def _object(run: Reviver, content: Any, depth: int) -> Any:
    need(type(content) is list and len(content) in (3, 4))
    name, version = text_of_tag(content[0]), content[1]
    need(type(version) is int and version >= 1)
    entry = None if run.raw else run.codec.entry_named(name)
    body = run.revive(content[2], depth + 1)
    extras = run.revive(content[3], depth + 1) if len(content) == 4 else None
    need(extras is None or type(extras) is dict)
    if entry is None:
        return _readable(name, version, body, extras)
    return entry.rebuild(version, body, extras)


def _model(tag: str, run: Reviver, content: Any, depth: int) -> Any:
    need(type(content) is dict)
    entry = None if run.raw else run.codec.entry_tagged(tag)
    run.values(content, depth + 1)
    if entry is not None and entry.shape is not None:
        return entry.shape.reader((*content,))(content)
    extras = {name[1:]: content.pop(name) for name in (model_tags.SET, model_tags.EXTRA) if name in content}
    if entry is None:
        return _readable(model_tags.name_of(tag) or tag, 1, content, extras)
    return entry.rebuild(1, content, extras)


def _readable(name: str, version: int, body: Any, extras: dict[str, Any] | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"<type>": name}
    if version != 1:
        shown["<version>"] = version
    if type(body) is not dict:
        return shown | {"<value>": body}
    extra = (extras or {}).get("extra")
    return shown | body | (extra if type(extra) is dict else {})


_READERS: Final[dict[str, Reader]] = {
    **READERS,
    "^obj": _object,
    "^ndarray": _numpy("^ndarray"),
    "^npscalar": _numpy("^npscalar"),
    "^npstr": _numpy("^npstr"),
    "^npbytes": _numpy("^npbytes"),
}
