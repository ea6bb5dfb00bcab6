"""Short tags for pydantic models of other packages, which are most of the bytes of many states.

    {"^msg.human":{"content":"hi","id":"1"}}

No package is named here: an adapter declares its tags (`add_models`), and `late` imports that adapter for the first
such value. Models that are unusual take the slow path in `tagged`. Neither `__init__` nor a validator ever runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import chain
from typing import Any, Final

import orjson

from perdure.errors import Undecodable, UsageError
from perdure.late import import_registrar
from perdure.values.class_adapters import ClassAdapter, ModelAdapter, model_default
from perdure.values.limits import DEPTH_MAX
from perdure.values.plain import ATOMS, CONTAINERS, OPTIONS, TooMany, has_caret_key, is_plain

# The class name of each tag, the tag of each class name, and the package to install for each trusted module prefix.
_names: Final[dict[str, str]] = {}
_tags: Final[dict[str, str]] = {}
_packages: Final[dict[str, str]] = {}

# Keys in a tag's content beside the fields. A field's name cannot begin with a caret.
SET: Final = "^set"
EXTRA: Final = "^extra"

# The most functions that are made per class. Programs set the same few fields over and over. A text that is meant to
# fill the memory has other fields each time, and takes the slow path after these.
_FUNCTIONS_MAX: Final = 64

# From a model's fields to its tag. Adds the values that are no strings to the list. None: a default has changed.
Writer = Callable[[dict[str, Any], list[Any]], dict[str, Any] | None]
# From a tag's content to the model.
Reader = Callable[[dict[str, Any]], Any]
# From a model's fields to another model with equal fields. The two share immutable values alone.
Copier = Callable[[dict[str, Any]], Any]


def add_models(prefix: str, package: str, tags: Mapping[str, str]) -> None:
    """Trust the classes under a module prefix, and write some of them under tags of their own.

    `tags` maps a tag ("^msg.human") to a class below the prefix ("human.HumanMessage"). `package` is what users
    install to get the classes. May be called again with the same tags.
    """
    names = {tag: f"{prefix}{cls}" for tag, cls in tags.items()}
    for tag, name in names.items():
        if not tag.startswith("^") or _names.get(tag, name) != name or _tags.get(name, tag) != tag:
            raise UsageError(f"the tag {tag!r} cannot stand for {name}: a tag begins with ^ and stands for one class")
    _names.update(names)
    _tags.update({name: tag for tag, name in names.items()})
    _packages[prefix] = package


def trusted_prefixes() -> tuple[str, ...]:
    """Return the module prefixes that adapters have declared with `add_models`."""
    return tuple(_packages)


def name_of(tag: str) -> str | None:
    """Return the name of a tag's class; None if no adapter has declared the tag."""
    name = _names.get(tag)
    return _names.get(tag) if name is None and import_registrar(tag) else name


def tag_of(name: str) -> str | None:
    """Return the tag of a class by its name; None if no adapter has declared one."""
    tag = _tags.get(name)
    return _tags.get(name) if tag is None and import_registrar(name) else tag


def are_tags(tags: set[str]) -> bool:
    """Return whether adapters have declared all of these tags. Looks for an adapter once, not per tag."""
    return tags <= _names.keys() or (name_of(next(iter(tags))) is not None and tags <= _names.keys())


def package_of(name: str) -> str:
    """Return the package to install for a class that has a tag."""
    return next((package for prefix, package in _packages.items() if name.startswith(prefix)), "")


class ModelShape:
    """One class with a tag: its fields in order, their defaults, and the functions that write, read and copy it.

    The content of a tag holds, in the order of the class, the fields that were set or are not at their default. `^set`
    follows if other fields were set than those in the text, and `^extra` if there are values beside the fields.
    Most of the time goes into what Python does per model, so functions are made for each set of fields. Nothing is
    remembered about a single value.
    """

    def __init__(self, tag: str, adapter: ModelAdapter) -> None:
        self.tag = tag
        self.cls = adapter.cls
        self.fields = adapter.fields
        self.required = adapter.required
        self.order = list(adapter.fields)
        self.defaults = {name: _default(field) for name, field in adapter.fields.items() if _has_simple_default(field)}
        # Fields without a default, or with one that may change: their values are always written.
        self.kept = self.fields.keys() - self.defaults.keys()
        self.no_extra: dict[str, Any] | None = {} if adapter.allows_extra else None
        self.readers: dict[tuple[str, ...], Reader] = {}
        self.last: tuple[frozenset[str], Writer | None] = frozenset(), None
        self._writers: dict[frozenset[str], Writer] = {}
        self._copiers: dict[tuple[Any, ...], Copier] = {}
        self._blank = type("Fields", (), {})

    def snapshot(self, value: Any) -> Any:
        """Return a private copy of a model whose values are plain; None for any other."""
        names, extra = value.__pydantic_fields_set__, value.__pydantic_extra__
        # A dict that shares its keys with all others of the class: its copies take half the memory.
        holder = self._blank()
        for name, part in value.__dict__.items():
            setattr(holder, name, part)
        fields = vars(holder)
        if [*fields] != self.order or extra != self.no_extra or not names <= self.fields.keys():
            return None
        try:
            for name, part in fields.items():
                if type(part) not in ATOMS:
                    fields[name] = fresh(part)
        except (TypeError, RuntimeError):  # not plain, too deep, or changed meanwhile
            return None
        return self._fill(fields, {*names}, extra)

    def copier(self, fields: dict[str, Any], names: set[str]) -> Copier:
        """Return a function that copies models with such fields. `names` are the fields that were set."""
        held = [(name, value) for name, value in fields.items() if type(value) in CONTAINERS]
        key = frozenset(names), tuple([(name, "fresh" if value else repr(value)) for name, value in held])
        copier = self._copiers.get(key)
        if copier is None and len(self._copiers) < _FUNCTIONS_MAX:
            copier = self._copiers[key] = _copier(self, *key)
        return copier or (lambda own: self.snapshot(self._fill(own, names, self.no_extra)))

    def _fill(self, fields: dict[str, Any], names: set[str], extra: dict[str, Any] | None) -> Any:
        model = object.__new__(self.cls)
        for fill, value in zip(_slots(), (fields, names, copy(extra), None), strict=True):
            fill(model, value)
        return model

    def writer(self, names: set[str]) -> Writer | None:
        """Return a function that writes models in which these fields were set; None if `^set` would be needed."""
        key = frozenset(names)
        writer = self._writers.get(key)
        if writer is None and self.kept <= key <= self.fields.keys() and len(self._writers) < _FUNCTIONS_MAX:
            writer = self._writers[key] = _writer(self, key)
        self.last = key, writer
        return writer

    def take(self, value: Any) -> dict[str, Any] | None:
        """Return the content of the tag, with values as they are; None if its fields are not those of its class."""
        fields, names, extra = value.__dict__, value.__pydantic_fields_set__, value.__pydantic_extra__
        if [*fields] != self.order or not all(type(name) is str for name in chain(names, extra or ())):
            return None
        body = {name: part for name, part in fields.items() if name in names or not self._is_default(name, part)}
        if names != body.keys() | (extra or {}).keys():
            body[SET] = sorted(names)
        if extra != self.no_extra:
            body[EXTRA] = None if extra is None else dict(extra)
        return body

    def _is_default(self, name: str, value: Any) -> bool:
        return name in self.defaults and type(value) is type(self.defaults[name]) and value == self.defaults[name]

    def reader(self, stored: tuple[str, ...]) -> Reader:
        """Return a function that makes a model from a content with these keys, in this order."""
        reader = self.readers.get(stored)
        if reader is None:
            if not self.kept <= set(stored) <= self.fields.keys() or len(self.readers) >= _FUNCTIONS_MAX:
                return self.make
            reader = self.readers[stored] = _reader(self, stored)
        return reader

    def make(self, body: dict[str, Any]) -> Any:
        """Make the model of any content whose own tags were read. Raises Undecodable if the class does not fit."""
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
        name = _names[self.tag]
        package = package_of(name)
        raise Undecodable(
            f"a stored {name} {problem}; if it was saved with another version of {package}: "
            f"pip install -U {package}; raw=True reads the value without its class"
        )


def shape_of(name: str, version: int, adapter: ClassAdapter) -> ModelShape | None:
    """Return the shape of a class in the registry; None without a tag, or if its owner registered it in another way."""
    tag = tag_of(name)
    if tag is None or version != 1 or type(adapter) is not ModelAdapter or adapter.cls.__private_attributes__:
        return None
    # Another class may be registered under this name. The tag is not for it.
    return ModelShape(tag, adapter) if f"{adapter.cls.__module__}.{adapter.cls.__qualname__}" == name else None


def text_of(values: Sequence[Any], shapes: dict[type, ModelShape], room: int) -> bytes | None:
    """Return the text of a list of models; None if a part of one needs another tag, or cannot be stored at all.

    `room` is how deeply a list of all their values may be nested.
    Raises TooMany, and whatever a model raises that lacks the attributes of its class.
    """
    lowered: list[dict[str, Any]] = []
    walked: list[Any] = []
    if not _lower(values, shapes, lowered, walked):
        return None
    if walked and not is_plain(walked, room):
        return None
    try:
        text = orjson.dumps(lowered, option=OPTIONS)
    except TypeError:
        return None  # an integer beyond 64 bit, a lone surrogate
    # With one caret per model, no key has one. Counting is a fraction of looking at the keys.
    return None if walked and text.count(b"^") != len(lowered) and has_caret_key(walked, room) else text


def model_texts(values: Sequence[Any], shapes: dict[type, ModelShape]) -> list[bytes] | None:
    """Return the texts of models that no other thread changes, one by one; None if one of them is unusual.

    The texts fit into a list that is a value of a state.
    """
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
    values: Sequence[Any], shapes: dict[type, ModelShape], lowered: list[dict[str, Any]], walked: list[Any]
) -> bool:
    """Add the tags of models, and their values that are no strings. Return False if a model has unusual fields."""
    for value in values:
        shape = shapes[type(value)]
        names, write = shape.last
        if value.__pydantic_fields_set__ != names:
            write = shape.writer(value.__pydantic_fields_set__)
        fields = value.__dict__
        tagged = None
        if write is not None and [*fields] == shape.order and value.__pydantic_extra__ == shape.no_extra:
            tagged = write(fields, walked)
        if tagged is None:
            body = shape.take(value)
            if body is None:
                return False
            walked.extend(body.values())
            tagged = {shape.tag: body}
        lowered.append(tagged)
    return True


def fresh(value: Any, room: int = DEPTH_MAX) -> Any:
    """Copy a list or dict; immutable values are shared. Raises TypeError if a value is not plain."""
    kind = type(value)
    if kind is list and room:
        return [item if type(item) in ATOMS else fresh(item, room - 1) for item in value]
    if kind is dict and room:
        return {key: item if type(item) in ATOMS else fresh(item, room - 1) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} is not copied")


def make_all(tags: list[str], bodies: list[dict[str, Any]], shapes: dict[str, ModelShape]) -> list[Any]:
    """Make the models of many tags from their contents, whose own tags were read. Empties `bodies`.

    A content is dropped as soon as its model is made. The next model then takes its memory, which is a quarter
    faster than other memory, and the garbage collector sees fewer objects.
    """
    readers = {tag: shape.readers for tag, shape in shapes.items()}
    models: list[Any] = []
    bodies.reverse()
    for tag in tags:
        body = bodies.pop()
        read = readers[tag].get((*body,)) or shapes[tag].reader((*body,))
        models.append(read(body))
    return models


def _has_simple_default(field: Any) -> bool:
    """Return whether the field's default is None, text, or an empty dict or list: cheap to compare, and constant."""
    if field.is_required() or field.default_factory not in (None, dict, list):
        return False
    default = _default(field)
    return default is None or type(default) is str or (type(default) in (dict, list) and not default)


def _default(field: Any) -> Any:
    return model_default(field, {})


@cache
def _slots() -> tuple[Callable[[Any, Any], None], ...]:
    """Return the functions that fill the four slots of a pydantic model, past its own `__setattr__`."""
    slots = vars(sys.modules["pydantic.main"].BaseModel)
    names = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
    return tuple(slots[name].__set__ for name in names)


# The functions below write functions, as `dataclasses` does. Their source holds the names and defaults of a class's
# fields, and nothing of a stored text or of a value.


def _writer(shape: ModelShape, names: frozenset[str]) -> Writer:
    """Make a function that writes models in which exactly these fields were set."""
    places = {name: f"v{at}" for at, name in enumerate(shape.order)}
    stored = {name: place for name, place in places.items() if name in names}
    body = ", ".join(f"{name!r}: {place}" for name, place in stored.items())
    writer: Writer = _compiled(
        [
            "def function(fields, walked):",
            f"    {', '.join(places.values())}, = fields.values()",
            *(f"    if {_differs(places[n], shape.defaults[n])}: return None" for n in shape.order if n not in names),
            *(f"    if type({place}) is not str: walked.append({place})" for place in stored.values()),
            f"    return {{{shape.tag!r}: {{{body}}}}}",
        ]
    )
    return writer


def _differs(place: str, default: Any) -> str:
    if default is None:
        return f"{place} is not None"
    if type(default) is str:
        return f"type({place}) is not str or {place} != {default!r}"
    return f"type({place}) is not {type(default).__name__} or {place}"


def _reader(shape: ModelShape, stored: tuple[str, ...]) -> Reader:
    """Make a function that reads contents with exactly these fields, in this order."""
    places = {name: f"v{at}" for at, name in enumerate(stored)}
    fields = ", ".join(f"{name!r}: {places.get(name) or repr(shape.defaults[name])}" for name in shape.order)
    reader: Reader = _compiled(
        [
            "def function(body, new=new, cls=cls, fill=fill, fill_set=fill_set, fill_extra=fill_extra, end=end):",
            f"    {', '.join(places.values())}, = body.values()",
            "    model = new(cls)",
            f"    fill(model, {{{fields}}})",
            f"    fill_set(model, {{{', '.join(map(repr, stored))}}})",
            f"    fill_extra(model, {shape.no_extra!r})",
            "    end(model, None)",
            "    return model",
        ],
        cls=shape.cls,
    )
    return reader


def _copier(shape: ModelShape, names: frozenset[str], held: tuple[tuple[str, str], ...]) -> Copier:
    """Make a function that copies models in which these fields were set. `held` are fields with a list or a dict."""
    was_set = f"{{{', '.join(map(repr, sorted(names)))}}}" if names else "set()"
    copier: Copier = _compiled(
        [
            "def function(own, new=new, cls=cls, fill=fill, fill_set=fill_set, fill_extra=fill_extra, end=end):",
            "    fields = own.copy()",
            *(f"    fields[{n!r}] = {f'fresh(own[{n!r}])' if empty == 'fresh' else empty}" for n, empty in held),
            "    model = new(cls)",
            "    fill(model, fields)",
            f"    fill_set(model, {was_set})",
            f"    fill_extra(model, {shape.no_extra!r})",
            "    end(model, None)",
            "    return model",
        ],
        cls=shape.cls,
    )
    return copier


def _compiled(lines: list[str], *, cls: Any = None) -> Any:
    """Make a function from its source. Names and defaults of a class's fields stand in it with `!r`.

    Closures that do the same take twice as long to write a model."""
    known: dict[str, Any] = {"new": object.__new__, "cls": cls, "fresh": fresh}
    known |= zip(("fill", "fill_set", "fill_extra", "end"), _slots(), strict=True)
    exec("\n".join(lines), known)
    return known["function"]
