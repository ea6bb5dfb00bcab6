"""Read values that LangGraph's serializer stored in another program, without running code that they name.

By default LangGraph's serializer imports and calls whatever a stored value names. In its strict mode it returns bare
fields instead. Here its strict mode gets a list of allowed classes, and an unknown name raises. So no foreign code
runs, and no type is lost silently.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.adapters import Codec
from perdure.errors import Undecodable, UnknownType

_KINDS = ("null", "bytes", "bytearray", "msgpack", "json")  # what LangGraph's serializer writes without pickle


class SafeReader(SerializerProtocol):
    """LangGraph's serializer. It raises for classes that the codec does not know.

    It also writes: PostgresSaver writes the pending sends of checkpoints before version 4 anew, as a value of the next.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._allowed: set[tuple[str, ...]] = set()
        self._serde = JsonPlusSerializer(allowed_msgpack_modules=None)

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return self._serde.dumps_typed(obj)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, stored = data
        if kind not in _KINDS:
            raise Undecodable(
                f"its type is {kind!r}, which LangGraph's serializer does not write by default: give the serializer "
                "that does, import_langgraph(…, serde=…)"
            )
        if kind == "json":
            json.loads(stored, object_hook=_check_json)
        while True:
            value, blocked = self._load(data)
            unknown = {name for name in blocked if not self._is_known(*name)}
            if unknown:
                raise _unknown(unknown)
            if blocked <= self._allowed:
                return value
            self._allowed |= blocked
            self._serde = JsonPlusSerializer(allowed_msgpack_modules=tuple(self._allowed))

    def _load(self, data: tuple[str, bytes]) -> tuple[Any, set[tuple[str, ...]]]:
        """Return a value, and the names in it that LangGraph's serializer blocked."""
        blocked: set[tuple[str, ...]] = set()
        caller = threading.get_ident()

        def note(event: SerdeEvent) -> None:
            if threading.get_ident() == caller:
                method = (event["method"],) if "method" in event else ()
                blocked.add((event["module"], event["name"], *method))

        unregister = register_serde_event_listener(note)
        try:
            return self._serde.loads_typed(data), blocked
        finally:
            unregister()

    def _is_known(self, module: str, name: str, *method: str) -> bool:
        """Return whether the codec may make this class. Imports trusted modules, and calls nothing."""
        if method:
            return False
        try:
            self._codec.entry_named(f"{module}.{name}")
        except UnknownType:
            pass  # or it is registered under another name
        member = vars(sys.modules[module]).get(name) if module in sys.modules else None
        return isinstance(member, type) and self._codec.entry_of(member) is not None


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse objects in the JSON format of 2024 that LangGraph's serializer now reads as None."""
    if value.get("lc") == 2 and value.get("type") == "constructor":
        raise _unknown({tuple(map(str, value.get("id") or ["json"]))})
    return value


def _unknown(names: set[tuple[str, ...]]) -> UnknownType:
    shown = sorted(".".join(name) for name in names)
    prefixes = sorted({f"{name.partition('.')[0]}." for name in shown})
    options = " ".join(f"--trust {prefix}" for prefix in prefixes)
    return UnknownType(
        f"it names {', '.join(shown)}: neither registered nor a data class of a trusted module; nothing was executed. "
        f"If these are data classes of your own, give {options} (in Python: trust={json.dumps(prefixes)}). For a class "
        "that was removed or renamed, or is inside another class, give a serializer of your own (serde=)",
        type_name=shown[0],
    )


def safe_reader(serde: SerializerProtocol | None, codec: Codec) -> SerializerProtocol:
    """Return the caller's serializer, or LangGraph's restricted to known classes."""
    if serde is None:
        return SafeReader(codec)
    if isinstance(serde, EncryptedSerializer) and type(serde.serde) is JsonPlusSerializer:
        return EncryptedSerializer(serde.cipher, SafeReader(codec))  # only the cipher is taken from it
    return serde
