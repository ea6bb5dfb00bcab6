"""LangChain's messages: most of the bytes of most states, so they have tags of their own.

    {"^msg.human":{"content":"hi","id":"1"}}

The tag names the class. Its content holds, in the order of the class, the fields that were set or are not at
their default. Two more keys come last where they are needed: `^set`, the names of the fields that were set,
unless they are just those in the text; and `^extra`, the values beside the fields.

Messages are written and read many at once, and by functions that are made for one class and one set of
fields, because what Python does per message is most of the time: a check in one expression that all other
fields are at their defaults, and an object whose slots are filled one after the other. Nothing is remembered
about a message, only about the sets of fields that messages have; who remembers messages gets private copies
(`MessageShape.snapshot`) and copies of those (`MessageShape.copier`).

What is unusual is left to the slow way in `tagged`: a value that is not plain, a message whose fields are not
those of its class in their order. Like everywhere else, neither `__init__` nor a validator runs.

LangChain is not imported here. Its classes come from the registry, like all others; a subclass of a message
is another class, and is written like any pydantic model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from itertools import chain
from typing import Any, Final

import orjson

from perdure.errors import Undecodable
from perdure.values.class_adapters import ClassAdapter, ModelAdapter, model_default
from perdure.values.limits import DEPTH_MAX
from perdure.values.plain import ATOMS, CONTAINERS, OPTIONS, TooMany, has_caret_key, is_plain

_CLASSES: Final = {
    "human": "human.HumanMessage",
    "ai": "ai.AIMessage",
    "system": "system.SystemMessage",
    "tool": "tool.ToolMessage",
    "function": "function.FunctionMessage",
    "chat": "chat.ChatMessage",
    "remove": "modifier.RemoveMessage",
    "human_chunk": "human.HumanMessageChunk",
    "ai_chunk": "ai.AIMessageChunk",
    "system_chunk": "system.SystemMessageChunk",
    "tool_chunk": "tool.ToolMessageChunk",
    "function_chunk": "function.FunctionMessageChunk",
    "chat_chunk": "chat.ChatMessageChunk",
}
# The name of each tag's class, and the other way round.
NAMES: Final = {f"^msg.{short}": f"langchain_core.messages.{path}" for short, path in _CLASSES.items()}
_TAGS: Final = {name: tag for tag, name in NAMES.items()}

# Keys in a tag's content that are no fields; a field cannot begin with a caret.
SET: Final = "^set"
EXTRA: Final = "^extra"

# So many functions are made per class. Programs set the same few fields over and over; a text that is meant to
# fill the memory has others each time, and goes the slow way after these.
_FUNCTIONS_MAX: Final = 64

# From a message's fields to the tag, its values that are no strings added to the list; None if a default has changed.
Writer = Callable[[dict[str, Any], list[Any]], dict[str, Any] | None]
# From a tag's content to the message.
Reader = Callable[[dict[str, Any]], Any]
# From a message's fields to another message with the same, which shares with it what cannot be changed.
Copier = Callable[[dict[str, Any]], Any]


class MessageShape:
    """What is known of one class of messages: its fields in order, their defaults, how to write and read it."""

    def __init__(self, tag: str, adapter: ModelAdapter) -> None:
        self.tag = tag
        self.cls = adapter.cls
        self.fields = adapter.fields
        self.required = adapter.required
        self.order = list(adapter.fields)
        self.defaults = {name: _default(field) for name, field in adapter.fields.items() if _has_simple_default(field)}
        # These have a default that is better not left out, or none.
        self.kept = self.fields.keys() - self.defaults.keys()
        self.no_extra: dict[str, Any] | None = {} if adapter.allows_extra else None
        self.readers: dict[tuple[str, ...], Reader] = {}
        self.last: tuple[frozenset[str], Writer | None] = frozenset(), None
        self._writers: dict[frozenset[str], Writer] = {}
        self._copiers: dict[tuple[Any, ...], Copier] = {}
        self._blank = type("Fields", (), {})

    def snapshot(self, message: Any) -> Any:
        """A private copy of a message whose values are plain; None if it is no usual one."""
        names, extra = message.__pydantic_fields_set__, message.__pydantic_extra__
        # A dict that shares its keys with all others of the class: its copies take half the memory.
        holder = self._blank()
        for name, value in message.__dict__.items():
            setattr(holder, name, value)
        fields = vars(holder)
        if [*fields] != self.order or extra != self.no_extra or not names <= self.fields.keys():
            return None
        try:
            for name, value in fields.items():
                if type(value) not in ATOMS:
                    fields[name] = fresh(value)
        except (TypeError, RuntimeError):  # something else, too deep, or changed meanwhile
            return None
        return self._fill(fields, {*names}, extra)

    def copier(self, fields: dict[str, Any], names: set[str]) -> Copier:
        """What makes copies of a message with such fields: of which some hold a list or a dict, and these were set."""
        held = [(name, value) for name, value in fields.items() if type(value) in CONTAINERS]
        key = frozenset(names), tuple([(name, "fresh" if value else repr(value)) for name, value in held])
        found = self._copiers.get(key)
        if found is None and len(self._copiers) < _FUNCTIONS_MAX:
            found = self._copiers[key] = _copier(self, *key)
        return found or (lambda given: self.snapshot(self._fill(given, names, self.no_extra)))

    def _fill(self, fields: dict[str, Any], names: set[str], extra: dict[str, Any] | None) -> Any:
        made = object.__new__(self.cls)
        for fill, value in zip(_slots(), (fields, names, copy(extra), None), strict=True):
            fill(made, value)
        return made

    def writer(self, names: set[str]) -> Writer | None:
        """What writes a message with these fields set; None if that takes more than its fields."""
        key = frozenset(names)
        found = self._writers.get(key)
        if found is None and self.kept <= key <= self.fields.keys() and len(self._writers) < _FUNCTIONS_MAX:
            found = self._writers[key] = _writer(self, key)
        self.last = key, found
        return found

    def take(self, message: Any) -> dict[str, Any] | None:
        """The content of the tag, its values as they are; None if this is no message as its class makes them."""
        fields, names, extra = message.__dict__, message.__pydantic_fields_set__, message.__pydantic_extra__
        if [*fields] != self.order or not all(type(name) is str for name in chain(names, extra or ())):
            return None
        body = {name: value for name, value in fields.items() if name in names or not self._is_default(name, value)}
        if names != body.keys() | (extra or {}).keys():
            body[SET] = sorted(names)
        if extra != self.no_extra:
            body[EXTRA] = None if extra is None else dict(extra)
        return body

    def _is_default(self, name: str, value: Any) -> bool:
        return name in self.defaults and type(value) is type(self.defaults[name]) and value == self.defaults[name]

    def reader(self, stored: tuple[str, ...]) -> Reader:
        """What makes a message from a content with these keys, in this order."""
        found = self.readers.get(stored)
        if found is None:
            if not self.kept <= set(stored) <= self.fields.keys() or len(self.readers) >= _FUNCTIONS_MAX:
                return self.make
            found = self.readers[stored] = _reader(self, stored)
        return found

    def make(self, body: dict[str, Any]) -> Any:
        """The message of any content whose own tags are read. Undecodable if there is none."""
        names, extra = body.pop(SET, None), body.pop(EXTRA, None if self.no_extra is None else {})
        for name in body:
            if name not in self.fields:
                self._refuse(f"has the field {name[:50]!r}, which the class does not have here")
        for name in self.required:
            if name not in body:
                self._refuse(f"lacks the field {name!r}, which has no default")
        if extra is not None and (type(extra) is not dict or not all(type(name) is str for name in extra)):
            self._refuse("has extra values that have no names")
        if extra and self.no_extra is None:
            self._refuse("has extra values, which the class does not allow here")
        if names is None:
            names = [*body, *(extra or ())]
        elif type(names) is not list or not all(type(name) is str for name in names):
            self._refuse("does not say which fields were set")
        fields: dict[str, Any] = {}
        for name, field in self.fields.items():
            if name in body:
                fields[name] = body[name]
            elif name in self.defaults:
                fields[name] = copy(self.defaults[name])
            else:
                fields[name] = model_default(field, fields)
        return self._fill(fields, set(names), extra)

    def _refuse(self, problem: str) -> None:
        raise Undecodable(
            f"a stored {NAMES[self.tag]} {problem}; if it was saved with another version of LangChain: "
            f"pip install -U langchain-core; raw=True reads the value without its class"
        )


def shape_of(name: str, version: int, adapter: ClassAdapter) -> MessageShape | None:
    """The shape of a class in the registry; None if it is no message, or its owner keeps it in a way of their own."""
    tag = _TAGS.get(name)
    if tag is None or version != 1 or type(adapter) is not ModelAdapter or adapter.cls.__private_attributes__:
        return None
    # Another class that is registered under this name is not LangChain's.
    return MessageShape(tag, adapter) if f"{adapter.cls.__module__}.{adapter.cls.__qualname__}" == name else None


def text_of(
    values: Sequence[Any], shapes: dict[type, MessageShape], room: int, still: Callable[[Any], Any]
) -> bytes | None:
    """The text of a list of messages; None if a part of one needs another tag, or cannot be stored at all.

    `room` is how deeply a list of all their values may be nested; `still` gives what no other thread changes.
    Raises TooMany, and whatever a message raises that is none as its class makes them.
    """
    lowered: list[dict[str, Any]] = []
    walked: list[Any] = []
    if not _lower(values, shapes, lowered, walked):
        return None
    copied = still(lowered)
    if copied is not lowered:
        lowered = copied
        walked = [part for one in lowered for body in one.values() for part in body.values()]
    if walked and not is_plain(walked, room):
        return None
    try:
        text = orjson.dumps(lowered, option=OPTIONS)
    except TypeError:
        return None  # an integer beyond 64 bit, a lone surrogate
    # With one caret per message, no key has one. Counting is a fraction of looking at the keys.
    return None if walked and text.count(b"^") != len(lowered) and has_caret_key(walked, room) else text


def message_texts(values: Sequence[Any], shapes: dict[type, MessageShape]) -> list[bytes] | None:
    """The texts of messages that no other thread changes, as they stand in a list that is a channel's value."""
    lowered: list[dict[str, Any]] = []
    walked: list[Any] = []
    room = DEPTH_MAX - 4
    try:
        if not _lower(values, shapes, lowered, walked) or (walked and not is_plain(walked, room)):
            return None
        texts = [orjson.dumps(one, option=OPTIONS) for one in lowered]
    except (TypeError, TooMany):
        return None
    usual = not walked or sum([text.count(b"^") for text in texts]) == len(lowered)
    return texts if usual or not has_caret_key(walked, room) else None


def _lower(
    values: Sequence[Any], shapes: dict[type, MessageShape], lowered: list[dict[str, Any]], walked: list[Any]
) -> bool:
    """Add the tags of messages, and their values that are no strings. False: one is none as its class makes them."""
    for message in values:
        shape = shapes[type(message)]
        names, write = shape.last
        if message.__pydantic_fields_set__ != names:
            write = shape.writer(message.__pydantic_fields_set__)
        fields = message.__dict__
        tagged = None
        if write is not None and [*fields] == shape.order and message.__pydantic_extra__ == shape.no_extra:
            tagged = write(fields, walked)
        if tagged is None:
            body = shape.take(message)
            if body is None:
                return False
            walked.extend(body.values())
            tagged = {shape.tag: body}
        lowered.append(tagged)
    return True


def fresh(value: Any, room: int = DEPTH_MAX) -> Any:
    """A copy of a list or dict, with the same values where these cannot be changed. TypeError if one is not plain."""
    kind = type(value)
    if kind is list and room:
        return [item if type(item) in ATOMS else fresh(item, room - 1) for item in value]
    if kind is dict and room:
        return {key: item if type(item) in ATOMS else fresh(item, room - 1) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} is not copied")


def make_all(tags: list[str], bodies: list[dict[str, Any]], shapes: dict[str, MessageShape]) -> list[Any]:
    """The messages of many tags and their contents, whose own tags are read. Empties `bodies`.

    A content is let go as soon as its message is made: the next message then takes its memory, which is a
    quarter faster than other memory, and the garbage collector sees fewer objects.
    """
    readers = {tag: shape.readers for tag, shape in shapes.items()}
    made: list[Any] = []
    bodies.reverse()
    for tag in tags:
        body = bodies.pop()
        read = readers[tag].get((*body,)) or shapes[tag].reader((*body,))
        made.append(read(body))
    return made


def _has_simple_default(field: Any) -> bool:
    """Whether the field's default is None, text, or an empty dict or list: then its type and value say it all."""
    if field.is_required() or field.default_factory not in (None, dict, list):
        return False
    default = _default(field)
    return default is None or type(default) is str or (type(default) in (dict, list) and not default)


def _default(field: Any) -> Any:
    return model_default(field, {})


@cache
def _slots() -> tuple[Callable[[Any, Any], None], ...]:
    """What fills the four slots of a pydantic model, past its own `__setattr__`."""
    slots = vars(sys.modules["pydantic.main"].BaseModel)
    names = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
    return tuple(slots[name].__set__ for name in names)


# The functions below write functions, as `dataclasses` does. The names in them are those of a class's fields, and
# the values its defaults; nothing of a stored text or of a message gets into one.


def _writer(shape: MessageShape, names: frozenset[str]) -> Writer:
    """What writes messages in which exactly these fields were set."""
    places = {name: f"v{at}" for at, name in enumerate(shape.order)}
    stored = {name: place for name, place in places.items() if name in names}
    body = ", ".join(f"{name!r}: {place}" for name, place in stored.items())
    made: Writer = _compiled(
        [
            "def function(fields, walked):",
            f"    {', '.join(places.values())}, = fields.values()",
            *(f"    if {_differs(places[n], shape.defaults[n])}: return None" for n in shape.order if n not in names),
            *(f"    if type({place}) is not str: walked.append({place})" for place in stored.values()),
            f"    return {{{shape.tag!r}: {{{body}}}}}",
        ]
    )
    return made


def _differs(place: str, default: Any) -> str:
    if default is None:
        return f"{place} is not None"
    if type(default) is str:
        return f"type({place}) is not str or {place} != {default!r}"
    return f"type({place}) is not {type(default).__name__} or {place}"


def _reader(shape: MessageShape, stored: tuple[str, ...]) -> Reader:
    """What reads contents with exactly these fields, in this order."""
    places = {name: f"v{at}" for at, name in enumerate(stored)}
    fields = ", ".join(f"{name!r}: {places.get(name) or repr(shape.defaults[name])}" for name in shape.order)
    made: Reader = _compiled(
        [
            "def function(body, new=new, cls=cls, fill=fill, fill_set=fill_set, fill_extra=fill_extra, end=end):",
            f"    {', '.join(places.values())}, = body.values()",
            "    made = new(cls)",
            f"    fill(made, {{{fields}}})",
            f"    fill_set(made, {{{', '.join(map(repr, stored))}}})",
            f"    fill_extra(made, {shape.no_extra!r})",
            "    end(made, None)",
            "    return made",
        ],
        cls=shape.cls,
    )
    return made


def _copier(shape: MessageShape, names: frozenset[str], held: tuple[tuple[str, str], ...]) -> Copier:
    """What copies messages in which these fields were set, and these hold a list or a dict: empty, or to be copied."""
    made: Copier = _compiled(
        [
            "def function(own, new=new, cls=cls, fill=fill, fill_set=fill_set, fill_extra=fill_extra, end=end):",
            "    fields = own.copy()",
            *(f"    fields[{n!r}] = {f'fresh(own[{n!r}])' if empty == 'fresh' else empty}" for n, empty in held),
            "    made = new(cls)",
            "    fill(made, fields)",
            f"    fill_set(made, {{{', '.join(map(repr, sorted(names)))}}})" if names else "    fill_set(made, set())",
            f"    fill_extra(made, {shape.no_extra!r})",
            "    end(made, None)",
            "    return made",
        ],
        cls=shape.cls,
    )
    return made


def _compiled(lines: list[str], *, cls: Any = None) -> Any:
    """A function from its source, as `dataclasses` makes them. The source holds names and defaults of a class's fields
    (with `!r`), and nothing that was stored. Closures that do the same take twice as long to write a message."""
    known: dict[str, Any] = {"new": object.__new__, "cls": cls, "fresh": fresh}
    known |= zip(("fill", "fill_set", "fill_extra", "end"), _slots(), strict=True)
    exec("\n".join(lines), known)
    return known["function"]
