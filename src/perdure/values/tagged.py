"""Encode values that JSON cannot hold as they are, with tags.

A tag is an object with exactly one key, which starts with "^": `{"^tuple":[1,2]}`. A dict that looks like a tag is
itself written with one (`^dict`), so the two cannot be confused. Values are *lowered* into a tree that JSON can hold;
plain parts become finished text on the way, at the speed of `plain`. `revive` reads the tags.

Nothing is lost silently: a value that cannot be kept exactly raises Unstorable, with its path and the fix. Shared
references are the exception: a list that occurs twice comes back as two equal lists.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import msgspec
import orjson

from perdure.values import arrays
from perdure.values.builtin_types import WHOLE_MAX, WRITERS
from perdure.values.class_adapters import CannotTake
from perdure.values.limits import DEPTH_MAX, NODES_MAX, SIZE_MAX
from perdure.values.model_tags import EXTRA, ModelShape, text_of
from perdure.values.plain import (
    ATOMS,
    CONTAINERS,
    OPTIONS,
    PLAIN,
    TooMany,
    has_caret_key,
    is_plain,
    is_plain_dict,
    plain_text,
)
from perdure.values.registry import Codec, RegisteredClass, default_name
from perdure.values.unstorable import Trail, refuse, refuse_type, unstorable

# How many values are searched for the place where a value holds itself.
_HUNT_MAX: Final = 100_000

# How many models are written at once: enough to be fast, and few enough that one that is not plain costs little.
_BATCH: Final = 128


def lower_to_text(value: object, codec: Codec) -> bytes:
    """Return the text of any storable value."""
    try:
        text = orjson.dumps(_lowered(value, codec), option=OPTIONS)
    except RecursionError:
        refuse("it is nested too deeply for this thread's stack; flatten it", None)
    if len(text) > SIZE_MAX:
        refuse(f"its text has {len(text):,} bytes, and the limit is {SIZE_MAX:,}; keep large data elsewhere", None)
    return text


def _lowered(value: object, codec: Codec) -> Any:
    try:
        return Lowering(codec).lower(value, 0, None)
    except TooMany:
        # Usually the value holds itself. Lowering it value by value soon finds the place and its path.
        Lowering(codec, hunting=True).lower(value, 0, None)
        raise AssertionError("the second pass over a value with too many parts found fewer") from None


class Lowering:
    """One pass over one value. `depth` is the number of levels of text around the value at hand."""

    def __init__(self, codec: Codec, *, hunting: bool = False) -> None:
        self.codec = codec
        self.hunting = hunting  # this pass only searches for a value that holds itself; its result is not used
        self.nodes_max = _HUNT_MAX if hunting else NODES_MAX
        self.active: set[int] = set()  # the containers around the value at hand, to find one that holds itself
        self.nodes = 0
        self.size_bytes = 0

    def lower(self, value: Any, depth: int, trail: Trail) -> Any:
        """Return the value as a tree that the fast encoder can write."""
        self.count_nodes(1, trail)
        handler = WRITERS.get(type(value))
        if handler is not None:
            return handler(self, value, depth, trail)
        return self._other(value, depth, trail)

    def whole(self, value: Any, depth: int) -> orjson.Fragment | None:
        """Return the finished text of a plain value, or None if a part of it needs a tag."""
        text = None if self.hunting else plain_text(value, DEPTH_MAX - depth)
        if text is None:
            return None
        self.count_bytes(text)
        return orjson.Fragment(text)

    def count_nodes(self, count: int, trail: Trail) -> None:
        self.nodes += count
        if self.nodes > self.nodes_max:
            refuse(f"it holds more than {NODES_MAX:,} values; keep large data in numpy arrays", trail)

    def count_bytes(self, text: bytes) -> None:
        self.size_bytes += len(text)
        if self.size_bytes > SIZE_MAX:
            refuse(f"its text is larger than {SIZE_MAX:,} bytes; keep large data elsewhere", None)

    def enter(self, value: object, depth: int, trail: Trail) -> None:
        if id(value) in self.active:
            refuse("it refers to itself; break the circle, or keep ids instead of references", trail)
        if depth > DEPTH_MAX:
            refuse(f"it is nested more than {DEPTH_MAX} levels deep; flatten it", trail)
        self.active.add(id(value))

    def leave(self, value: object) -> None:
        self.active.discard(id(value))

    def items(self, value: Any, values: list[Any], depth: int, trail: Trail) -> Any:
        """Return a JSON array of the values of the container `value`."""
        kinds = set(map(type, values))
        text = None
        if kinds <= PLAIN:
            if depth <= WHOLE_MAX or kinds <= ATOMS:
                text = self.whole(values, depth)
        elif not self.hunting and kinds.isdisjoint(WRITERS):
            entries = {kind: self.codec.entry_of(kind) for kind in kinds}
            shapes = {kind: entry.shape for kind, entry in entries.items() if entry and entry.shape}
            if len(shapes) == len(kinds):
                text = self.models(value, values, shapes, depth, trail)
            elif depth <= WHOLE_MAX and not shapes:
                text = self.objects(values, entries, depth)
        if text is not None:
            return text
        self.enter(value, depth + 1, trail)
        lowered = [self.lower(item, depth + 1, (trail, "item", at)) for at, item in enumerate(values)]
        self.leave(value)
        return lowered

    def models(
        self, value: Any, values: list[Any], shapes: dict[type, ModelShape], depth: int, trail: Trail
    ) -> orjson.Fragment:
        """Return the finished text of a list of models that have tags of their own.

        A model with a value that is not plain slows down those around it, not the whole list.
        """
        self.enter(value, depth + 1, trail)
        room = DEPTH_MAX - depth - 4
        texts: list[bytes] = []
        for start in range(0, len(values), _BATCH):
            batch = values[start : start + _BATCH]
            try:
                text = text_of(batch, shapes, room) if room >= 0 else None
            except TooMany:
                raise
            except Exception:
                text = None  # a model is broken: lowering one by one names it
            if text is None:
                lowered = [self.lower(item, depth + 1, (trail, "item", at)) for at, item in enumerate(batch, start)]
                text = orjson.dumps(lowered, option=OPTIONS)
            else:
                self.count_nodes(len(batch), trail)
                self.count_bytes(text)
            texts.append(text[1:-1])
        self.leave(value)
        return orjson.Fragment(b"".join((b"[", b",".join(texts), b"]")))

    def objects(
        self, values: list[Any], entries: dict[type, RegisteredClass | None], depth: int
    ) -> orjson.Fragment | None:
        """Return the finished text of a list of objects whose fields are plain, or None.

        All their fields are checked at once, which is several times faster than each object by itself. After None the
        caller lowers them one by one, which finds the reason and its path.
        """
        lowered: list[Any] = []
        for item in values:
            entry = entries.get(type(item))
            if entry is None:
                return None
            try:
                body, extras = entry.adapter.take(item)
            except Exception:
                return None
            content = [entry.name, entry.version, body]
            lowered.append({"^obj": content if extras is None else [*content, extras]})
        walked = list(chain.from_iterable(one["^obj"][2:] for one in lowered))
        room = DEPTH_MAX - depth - 4
        if room < 0 or not is_plain(walked, room) or has_caret_key(walked, room):
            return None
        try:
            text = orjson.dumps(lowered, option=OPTIONS)
        except TypeError:
            return None
        self.count_bytes(text)
        return orjson.Fragment(text)

    def pairs(self, value: Any, depth: int, trail: Trail) -> list[Any]:
        """Return a JSON array of [key, value], for dicts that cannot be JSON objects."""
        self.enter(value, depth + 2, trail)
        lowered = [
            [
                self.lower(key, depth + 2, (trail, "key", key)),
                self.lower(item, depth + 2, (trail, "item", key)),
            ]
            for key, item in list(value.items())
        ]
        self.leave(value)
        return lowered

    def _other(self, value: Any, depth: int, trail: Trail) -> Any:
        entry = self.codec.entry_of(type(value))
        if entry is not None:
            return self._model(value, entry, depth, trail) or self._object(value, entry, depth, trail)
        if arrays.is_numpy(value):
            try:
                tag, content = arrays.dump(value)
            except arrays.Unfit as problem:
                refuse(str(problem), trail)
            return {tag: content}
        if value is msgspec.UNSET:
            return {"^unset": None}
        return refuse_type(type(value), trail)

    def _model(self, value: Any, entry: RegisteredClass, depth: int, trail: Trail) -> Any:
        """Return a model under its own tag; None if its class has no tag, or its fields are not those of its class."""
        shape = entry.shape
        try:
            body = None if shape is None else shape.take(value)
        except Exception:
            body = None  # the general path names the problem
        if shape is None or body is None:
            return None
        self.enter(value, depth + 2, trail)
        lowered: dict[str, Any] = {}
        for name, item in body.items():
            if name == EXTRA and is_plain_dict(item):
                lowered[name] = {
                    key: self.lower(part, depth + 3, (trail, "attribute", key)) for key, part in item.items()
                }
            else:
                text = self.whole(item, depth + 2) if type(item) in CONTAINERS and item else None
                lowered[name] = text or self.lower(item, depth + 2, (trail, "attribute", name))
        self.leave(value)
        return {shape.tag: lowered}

    def _object(self, value: Any, entry: RegisteredClass, depth: int, trail: Trail) -> Any:
        self.enter(value, depth + 3, trail)
        try:
            body, extras = entry.adapter.take(value)
        except CannotTake as problem:
            refuse(f"{default_name(type(value))}: {problem}", trail)
        except Exception as problem:
            raise unstorable(f"{default_name(type(value))} could not be taken apart: {problem!r}", trail) from problem
        if type(body) is dict and is_plain_dict(body):
            lowered = self.whole(body, depth + 2) or {
                name: self.lower(item, depth + 3, (trail, "attribute", name)) for name, item in body.items()
            }
        else:
            lowered = self.lower(body, depth + 2, trail)
        content = [entry.name, entry.version, lowered]
        if extras is not None:
            content.append(
                {name: self.lower(item, depth + 3, (trail, "attribute", name)) for name, item in extras.items()}
            )
        self.leave(value)
        return {"^obj": content}
