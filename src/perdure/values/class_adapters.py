"""The kinds of data classes that can be taken apart into fields and rebuilt from them.

Rebuilding never runs `__init__`, `__post_init__`, validators or a root `__new__`: they may reject or change saved
values, repeat side effects, or be an attacker's target. Fields are set on an empty object instead. Only the default
factory of a field that was added since the save may run. `registry` decides which classes are allowed. pydantic is
recognised without an import, so that `import perdure` stays fast.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import cached_property
from typing import Any, Protocol

import msgspec

from perdure.errors import Undecodable
from perdure.values.names import class_name

# Attributes that typing puts on an instance of a generic class; they say nothing about its value.
_NOISE = frozenset({"__orig_class__"})

_BUILTINS = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    list,
    tuple,
    dict,
    set,
    frozenset,
    BaseException,
    type,
)


class CannotTake(Exception):
    """A value of a known class cannot be taken apart without loss; the text says why."""


class ClassAdapter(Protocol):
    """Takes values of one class apart and rebuilds them. `extras` are the values of a model beside its fields."""

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]: ...

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any: ...


def adapter_of(cls: type) -> ClassAdapter | None:
    """Return the adapter of a class; None if it is not a data class of a known kind."""
    if issubclass(cls, Enum):
        return EnumAdapter(cls) if cls.__members__ else None
    if issubclass(cls, msgspec.Struct):
        return StructAdapter(cls)
    if issubclass(cls, tuple):
        return NamedTupleAdapter(cls) if _is_namedtuple(cls) else None
    if _is_model(cls):
        return ModelAdapter(cls)
    if dataclasses.is_dataclass(cls) and not issubclass(cls, _BUILTINS):
        return DataclassAdapter(cls)
    return None


def _is_namedtuple(cls: type) -> bool:
    names = getattr(cls, "_fields", None)
    return isinstance(names, tuple) and all(type(name) is str for name in names)


def _is_model(cls: type) -> bool:
    # A class can derive from BaseModel only if pydantic is loaded already.
    base = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base is not None and issubclass(cls, base) and cls is not base


def _check_fields(cls: type, body: Any, known: dict[str, Any], required: Iterable[str]) -> dict[str, Any]:
    if type(body) is not dict:
        raise Undecodable(f"a stored {_name(cls)} has no fields")
    if body.keys() == known.keys():
        return body
    unknown = [name for name in body if name not in known]
    if unknown:
        raise Undecodable(
            f"a stored {_name(cls)} has the field {unknown[0]!r}, which the class no longer has; "
            f"raise its version "
            f"and give an upgrade: @perdure.register(version=2, upgrade={{1: function}})"
        )
    missing = [name for name in required if name not in body]
    if missing:
        raise Undecodable(
            f"a stored {_name(cls)} lacks the field {missing[0]!r}, which has no default; give it "
            f"one, or raise the "
            f"class's version and give an upgrade: @perdure.register(version=2, upgrade={{1: function}})"
        )
    return body


def _check_attributes(cls: type, present: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse attributes that are not fields: they would be lost. Cached properties are computed again."""
    for name in present.keys() - set(known) - _NOISE:
        if not any(isinstance(vars(base).get(name), cached_property) for base in cls.__mro__):
            raise CannotTake(
                f"attribute {name!r} is not a field, so it would be lost; declare it as a field, or "
                f"register the "
                f"class with dump= and load="
            )


def _name(cls: type) -> str:
    return ".".join(class_name(cls))


class EnumAdapter:
    """Enum, IntEnum, StrEnum, Flag: kept by the member's name; a combination of flags by its value."""

    def __init__(self, cls: type[Enum]) -> None:
        self.cls = cls

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        name: str | None = value._name_
        if name is not None and name in self.cls.__members__:
            return {"name": name}, None
        return {"value": value._value_}, None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        if type(body) is dict and len(body) == 1:
            member = self.cls.__members__.get(body["name"]) if type(body.get("name")) is str else None
            if member is not None:
                return member
            if issubclass(self.cls, Flag) and type(body.get("value")) is int:
                return self.cls(body["value"])
        raise Undecodable(
            f"the Enum {_name(self.cls)} has no member for {str(body)[:100]}; if it was renamed, "
            f"raise the version "
            f"and give an upgrade: @perdure.register(version=2, upgrade={{1: function}})"
        )


class DataclassAdapter:
    """Dataclasses: frozen, with slots, with fields outside `__init__`, inherited. InitVars are no fields."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = dataclasses.MISSING
        self.required = [
            name for name, field in self.fields.items() if field.default is missing and field.default_factory is missing
        ]

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        present = getattr(value, "__dict__", None)
        if present is not None and not present.keys() <= self.fields.keys():
            _check_attributes(self.cls, present, self.fields)
        try:
            return {name: getattr(value, name) for name in self.fields}, None
        except AttributeError as problem:
            raise CannotTake(f"a field was never set: {problem}") from None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        fields = _check_fields(self.cls, body, self.fields, self.required)
        instance: Any = object.__new__(self.cls)
        for name, field in self.fields.items():
            if name in fields:
                value = fields[name]
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            else:
                value = field.default
            object.__setattr__(instance, name, value)  # also sets fields of frozen classes, and slots
        return instance


class NamedTupleAdapter:
    """NamedTuple and collections.namedtuple."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.fields: dict[str, None] = dict.fromkeys(cls._fields)
        self.defaults: dict[str, Any] = dict(getattr(cls, "_field_defaults", {}))
        self.required = [name for name in self.fields if name not in self.defaults]

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        _check_attributes(self.cls, getattr(value, "__dict__", {}), ())
        if len(value) != len(self.fields):
            raise CannotTake("it does not have as many values as its class has fields")
        return dict(zip(self.fields, value, strict=True)), None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        fields = self.defaults | _check_fields(self.cls, body, self.fields, self.required)
        return tuple.__new__(self.cls, [fields[name] for name in self.fields])


class StructAdapter:
    """msgspec Structs. Their constructor checks nothing, so it is used, without `__post_init__`."""

    def __init__(self, cls: type[msgspec.Struct]) -> None:
        self.cls = cls
        self.fields = dict.fromkeys(cls.__struct_fields__)
        defaults = cls.__struct_defaults__
        start = len(self.fields) - len(defaults)
        self.required = [
            name for at, name in enumerate(self.fields) if at < start or defaults[at - start] is msgspec.NODEFAULT
        ]
        self.bare: Any = cls
        if hasattr(cls, "__post_init__"):
            # A Struct cannot be made without its constructor. So an instance of a subclass without `__post_init__` is
            # made, and its class is replaced afterwards: both classes have the same layout.
            meta: Any = type(cls)
            self.bare = meta(cls.__name__, (cls,), {"__post_init__": _nothing, "__module__": cls.__module__})

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        try:
            return {name: getattr(value, name) for name in self.fields}, None
        except AttributeError as problem:
            raise CannotTake(f"a field was never set: {problem}") from None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        instance = self.bare(**_check_fields(self.cls, body, self.fields, self.required))
        if self.bare is not self.cls:
            msgspec.structs.force_setattr(instance, "__class__", self.cls)
        return instance


def _nothing(self: object) -> None:
    pass


class ModelAdapter:
    """pydantic v2 models: fields, extra values, and which fields were set.

    Private attributes are not kept, because they mostly hold clients and caches. They become their defaults.
    """

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.fields: dict[str, Any] = dict(cls.model_fields)
        self.required = [name for name, field in self.fields.items() if field.is_required()]
        self.allows_extra = cls.model_config.get("extra") == "allow"

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        present = value.__dict__
        if present.keys() != self.fields.keys():
            _check_attributes(self.cls, present, self.fields)
            unset = [name for name in self.required if name not in present]
            if unset:
                raise CannotTake(f"the field {unset[0]!r} was never set")
            present = {name: present[name] for name in self.fields if name in present}
        extras: dict[str, Any] = {}
        if value.__pydantic_fields_set__ != present.keys():
            extras["set"] = sorted(value.__pydantic_fields_set__)
        if value.__pydantic_extra__:
            extras["extra"] = value.__pydantic_extra__
        return present, extras or None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        stored = _check_fields(self.cls, body, self.fields, self.required)
        extras = extras or {}
        extra, names = extras.get("extra", {}), extras.get("set", list(stored))
        if type(extra) is not dict or type(names) is not list or not all(type(name) is str for name in names):
            raise Undecodable(f"a stored {_name(self.cls)} is not a pydantic model's")
        if extra and not self.allows_extra:
            raise Undecodable(f"a stored {_name(self.cls)} has extra values, which the class no longer allows")
        fields = stored
        if len(stored) != len(self.fields):
            fields = {}
            for name, field in self.fields.items():
                fields[name] = stored[name] if name in stored else model_default(field, fields)
        instance: Any = object.__new__(self.cls)
        object.__setattr__(instance, "__dict__", fields)
        object.__setattr__(instance, "__pydantic_fields_set__", {n for n in names if n in fields or n in extra})
        object.__setattr__(instance, "__pydantic_extra__", extra if self.allows_extra else None)
        object.__setattr__(instance, "__pydantic_private__", self._private(fields))
        return instance

    def _private(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        if not self.cls.__private_attributes__:
            return None
        undefined = sys.modules["pydantic_core"].PydanticUndefined
        attributes: dict[str, Any] = {}
        for name, item in self.cls.__private_attributes__.items():
            # Older versions of pydantic always call a default factory, newer ones only on request.
            asks = hasattr(item, "default_factory_takes_validated_data")
            value = model_default(item, {**fields, **attributes}) if asks else item.get_default()
            if value is not undefined:
                attributes[name] = value
        return attributes


def model_default(field: Any, before: dict[str, Any]) -> Any:
    if getattr(field, "default_factory_takes_validated_data", False):
        return field.get_default(call_default_factory=True, validated_data=before)
    return field.get_default(call_default_factory=True)


class CustomAdapter:
    """A class that was registered with two functions: `dump` to a storable value, and `load` back from it."""

    def __init__(self, dump: Callable[[Any], Any], load: Callable[[Any], Any]) -> None:
        self.dump = dump
        self.load = load

    def take(self, value: Any) -> tuple[Any, dict[str, Any] | None]:
        return self.dump(value), None

    def rebuild(self, body: Any, extras: dict[str, Any] | None) -> Any:
        return self.load(body)
