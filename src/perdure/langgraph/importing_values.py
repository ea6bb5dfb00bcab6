"""What LangGraph's stock savers have stored, decoded without executing it.

Their serializer names a class, or any other callable, in the stored bytes, and calls it while loading; in its strict
mode it hands out bare fields instead, without a word. Here a name is only ever looked up among LangGraph's own safe
types, the registered classes and the modules that the user trusts. Whatever else is met is remembered and reported, so
that an import neither runs foreign code nor loses a type.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ormsgpack
from langchain_core.documents import Document
from langchain_core.load.load import Reviver
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Send

from perdure.errors import Undecodable, UnknownType
from perdure.values.registry import REGISTRY, Codec
from perdure.values.sorts import DataclassSort, NamedTupleSort, Sort

_ONE, _MANY, _NAMED, _METHOD, _MODEL_1, _MODEL_2, _ARRAY, _SNAPSHOT = range(8)  # LangGraph's codes
_CACHE_BYTES = 8 * 1024 * 1024
_PLAIN = {"null", "bytes", "bytearray", "msgpack", "json"}
_MESSAGES = (
    *(AIMessage, AIMessageChunk, ChatMessage, ChatMessageChunk, Document, FunctionMessage, FunctionMessageChunk),
    *(HumanMessage, HumanMessageChunk, RemoveMessage, SystemMessage, SystemMessageChunk, ToolMessage, ToolMessageChunk),
)
# The only methods that a stored name may reach, of the old JSON form: (module, class, method).
_METHODS = {
    ("datetime", "datetime", "fromisoformat"),
    ("datetime", "date", "fromisoformat"),
    ("datetime", "time", "fromisoformat"),
    ("builtins", "bytes", "fromhex"),
    ("builtins", "bytearray", "fromhex"),
}


class Found(NamedTuple):
    """A class that may be made: how it is called, and how it is rebuilt from its fields (None: by calling it)."""

    make: Callable[..., Any]
    sort: Sort | None = None


class Unloadable(NamedTuple):
    """Something that was not made: what, and why. `why` empty: it is not trusted."""

    module: str
    name: str
    why: str = ""


class Decoder:
    """Decodes stored values. `problems` holds what could not be made since `check` was last called."""

    def __init__(self, codec: Codec, serde: SerializerProtocol | None = None) -> None:
        self._codec = codec
        self._found: dict[tuple[str, str], Found | Unloadable] = {}
        self._recent: dict[tuple[int, bytes], Any] = {}
        self._older: dict[tuple[int, bytes], Any] = {}
        self._recent_bytes = 0
        self._reviver = Reviver(allowed_objects=_MESSAGES)
        self._serde: SerializerProtocol | None = serde
        if isinstance(serde, EncryptedSerializer) and type(serde.serde) is JsonPlusSerializer:
            self._serde = EncryptedSerializer(serde.cipher, _Strict(self))  # only the cipher is taken from it
        self._refused = 0
        self.problems: dict[Unloadable, None] = {}

    def value(self, kind: object, data: object) -> Any:
        """The value of a stored type and its bytes. Raises Undecodable; see `problems` for what was not made."""
        if self._serde is not None:
            return self._serde.loads_typed((kind, data))  # type: ignore[arg-type]
        return self.plain_value(kind, data)

    def plain_value(self, kind: object, data: object) -> Any:
        if kind not in _PLAIN:
            raise Undecodable(_why_not(kind))
        if kind == "null":
            return None
        if not isinstance(data, bytes):
            raise Undecodable(f"a value of type {kind!r} has no bytes")
        if kind == "bytes":
            return data
        if kind == "bytearray":
            return bytearray(data)
        if kind == "json":
            return json.loads(data, object_hook=self._from_json)
        return ormsgpack.unpackb(data, ext_hook=self._from_ext, option=ormsgpack.OPT_NON_STR_KEYS)

    def check(self) -> None:
        """Raise UnknownType if something could not be made, and forget it."""
        if self.problems:
            problems, self.problems = self.problems, {}
            raise unloadable(problems)

    # --- msgpack

    def _from_ext(self, code: int, data: bytes) -> Any:
        """The value of an extension. Checkpoints of one thread repeat most of theirs: those are made once.

        Nothing that is given out here is ever changed, so that one object may stand in many states.
        """
        key = (code, data)
        if (made := self._recent.get(key)) is not None:
            return made
        made = self._older.get(key)
        if made is None:
            before = self._refused
            made = self._made(code, data)
            if self._refused > before:
                return made
        self._recent[key] = made
        self._recent_bytes += len(data)
        if self._recent_bytes > _CACHE_BYTES:
            self._older, self._recent, self._recent_bytes = self._recent, {}, 0
        return made

    def _made(self, code: int, data: bytes) -> Any:
        body = ormsgpack.unpackb(data, ext_hook=self._from_ext, option=ormsgpack.OPT_NON_STR_KEYS)
        if code == _SNAPSHOT:
            return _DeltaSnapshot(body)
        if not _ONE <= code <= _ARRAY:
            return self._refuse(Unloadable("msgpack", f"extension {code}", "it is not one of LangGraph's"), body)
        try:
            if code == _ARRAY:
                return _array(*body)
            module, name, payload = str(body[0])[:200], str(body[1])[:200], body[2]
        except Exception as error:
            return self._refuse(Unloadable("msgpack", f"extension {code}", f"it is damaged ({error!r})"), body)
        if code == _METHOD:
            return self._call(module, name, str(body[3]), [payload], payload)
        found = self._look_up(module, name)
        if isinstance(found, Unloadable):
            return self._refuse(found, payload)
        try:
            return _build(code, found, payload)
        except Exception as error:
            return self._refuse(Unloadable(module, name, f"it cannot be made of what was stored ({error!r})"), payload)

    def _refuse(self, problem: Unloadable, payload: Any) -> Any:
        self._refused += 1
        self.problems[problem] = None
        return payload

    def _call(self, module: str, name: str, method: str, args: list[Any], payload: Any) -> Any:
        if (module, name, method) not in _METHODS:
            return self._refuse(Unloadable(module, f"{name}.{method}", "a method is not called"), payload)
        try:
            return getattr(getattr(importlib.import_module(module), name), method)(*args)
        except Exception as error:
            return self._refuse(Unloadable(module, name, f"it cannot be made of what was stored ({error!r})"), payload)

    # --- JSON, as the first versions wrote it

    def _from_json(self, value: dict[str, Any]) -> Any:
        lc, kind, id_ = value.get("lc"), value.get("type"), value.get("id")
        if lc not in (1, 2) or type(id_) is not list or not all(type(part) is str for part in id_):
            return value
        module, name = ".".join(id_[:-1]), id_[-1] if id_ else ""
        if lc == 1 and kind in ("secret", "not_implemented"):
            return self._refuse(Unloadable(module, name, "it was not stored, only its name was"), value)
        if kind != "constructor":
            return value
        if lc == 1:
            try:
                return self._reviver(value)
            except Exception as error:
                return self._refuse(Unloadable(module, name, f"LangChain does not load it ({error!r})"), value)
        args, kwargs, method = value.get("args") or [], value.get("kwargs") or {}, value.get("method")
        if type(method) is str:
            return self._call(module, name, method, args, value)
        found = self._look_up(module, name)
        if isinstance(found, Unloadable):
            return self._refuse(found, value)
        try:
            return _build(_MODEL_2, found, kwargs) if kwargs and not args else found.make(*args, **kwargs)
        except Exception as error:
            return self._refuse(Unloadable(module, name, f"it cannot be made of what was stored ({error!r})"), value)

    # --- names

    def _look_up(self, module: str, name: str) -> Found | Unloadable:
        key = (module, name)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._search(module, name)
        return found

    def _search(self, module: str, name: str) -> Found | Unloadable:
        if (module, name) in SAFE_MSGPACK_TYPES:
            made = getattr(importlib.import_module(module), name, None)
            return Unloadable(module, name, "this version has no such type") if made is None else Found(made)
        if (cls := _registered(module, name)) is not None:
            return self._entry(cls)
        try:
            entry = self._codec.entry_named(f"{module}.{name}")
            return Found(entry.cls, entry.sort)
        except UnknownType as error:
            if error.type_name != f"{module}.{name}":  # a module that is trusted and cannot be imported
                return Unloadable(module, name, str(error))
        if not f"{module}.".startswith(self._codec.trust):
            return Unloadable(module, name)
        # Importing its module may have registered it. LangGraph keeps the bare name of a class inside a class.
        inside = _registered(module, name) or _nested(module, name)
        if inside is not None and self._codec.entry_of(inside) is not None:
            return self._entry(inside)
        return Unloadable(module, name, "there is no such data class: it was renamed or removed, or needs registering")

    def _entry(self, cls: type) -> Found:
        entry = self._codec.entry_of(cls)
        return Found(cls, entry.sort if entry is not None else None)


class _Strict(SerializerProtocol):
    """The decoder as the inner serializer of an encrypted one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        raise NotImplementedError("this one only reads")

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self._decoder.plain_value(*data)


def _build(code: int, found: Found, payload: Any) -> Any:
    """An object of an allowed class, as LangGraph makes it; data classes from their fields, without running them."""
    if code == _ONE:
        return found.make(payload)
    if code == _MANY:
        if found.make is Send:
            return Send(payload[0], payload[1], **({"timeout": payload[2]} if len(payload) > 2 else {}))
        return found.make(*payload)
    if isinstance(found.sort, DataclassSort | NamedTupleSort):
        try:
            return found.sort.rebuild(payload, None)
        except Undecodable:
            return found.make(**payload)  # fields have changed since: its own constructor may know
    try:
        return found.make(**payload)
    except Exception:
        construct = getattr(found.make, "construct" if code == _MODEL_1 else "model_construct", None)
        if code == _NAMED or construct is None:
            raise
        return construct(**payload)


def _array(dtype: Any, shape: Any, order: Any, data: Any) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype=numpy.dtype(str(dtype))).reshape(shape, order=order)


def _registered(module: str, name: str) -> type | None:
    """A registered class by the name that LangGraph stored."""
    return next((cls for cls in list(REGISTRY._by_class) if (cls.__module__, cls.__name__) == (module, name)), None)


def _nested(module: str, name: str) -> type | None:
    """The only class of that bare name among those inside the classes of a trusted module."""
    try:
        pending = [one for one in vars(importlib.import_module(module)).values() if isinstance(one, type)]
    except ImportError:
        return None
    seen: set[type] = set()
    while pending:
        cls = pending.pop()
        if cls.__module__ == module and cls not in seen:
            seen.add(cls)
            pending += [one for one in vars(cls).values() if isinstance(one, type)]
    named = [cls for cls in seen if cls.__name__ == name]
    return named[0] if len(named) == 1 else None


def _why_not(kind: object) -> str:
    if kind == "pickle":
        return (
            "it is stored as pickle, which runs code when it is read: load it where you trust it and save it again "
            "with a serializer without pickle_fallback"
        )
    if isinstance(kind, str) and "+" in kind:
        return (
            f"it is encrypted ({kind!r}): import it from Python with the serializer that has the key, "
            "import_langgraph(…, serde=EncryptedSerializer…)"
        )
    return (
        f"its type is {kind!r}, which LangGraph's serializer does not write: import it from Python with your "
        "serializer, import_langgraph(…, serde=…)"
    )


def unloadable(problems: Mapping[Unloadable, None]) -> UnknownType:
    """The error that names the types, and what would let them in."""
    unknown = [problem for problem in problems if not problem.why]
    foreign = [one for one in unknown if _root(one.module) in sys.stdlib_module_names]
    own = [one for one in unknown if one not in foreign or one.module == "__main__"]
    parts: list[str] = []
    if own:
        prefixes = sorted({f"{_root(one.module)}." for one in own})
        options = " ".join(f"--trust {prefix}" for prefix in prefixes)
        parts.append(
            f"it holds types that are neither trusted nor registered: {_names(own)}. If they are your own data "
            f"classes, give {options} (in Python: trust={json.dumps(prefixes)})"
        )
    if any(one.module == "__main__" for one in own):
        parts.append("a class of __main__ can be found only in its own script: call import_langgraph there")
    if foreign:
        parts.append(f"it names what is no data: {_names(foreign)}. Somebody may have tampered with this database")
    parts += [f"{one.module}.{one.name}: {one.why}" for one in problems if one.why]
    first = next(iter(problems))
    return UnknownType("; ".join(parts) + "; nothing of it was executed", type_name=f"{first.module}.{first.name}")


def _names(found: Iterable[Unloadable]) -> str:
    return ", ".join(sorted(f"{one.module}.{one.name}" for one in found))


def _root(module: str) -> str:
    root = module.partition(".")[0]
    return root if root.isidentifier() else "myapp"
