"""A LangGraph checkpoint as the state of a line, and back. Pure.

The state is the channel values, as any other state, plus its envelope with all that LangGraph keeps beside them: id,
parent, versions, metadata. What changes at every step stands together at the end of the text, behind the channels that
grow: there a step is one splice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import orjson
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters import ENVELOPE, Codec, Encoded, Part, decode, encode, envelope_text
from perdure.errors import Unstorable, UsageError
from perdure.langgraph.serde import PerdureSerde, load_opaque

_COUNTERS = "counters_since_delta_snapshot"  # in the metadata: DeltaChannels that have no value of their own
START = "__start__"  # the channel of a graph's input
_COPY_OF, _NEEDS = (
    "copy_of",
    "needs",
)  # in the envelope: what a rollback has copied, channels that ancestors' writes hold


class Parts(NamedTuple):
    """What a stored checkpoint says."""

    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    parent: str | None


def encode_checkpoint(
    checkpoint: Mapping[str, Any],
    metadata: Mapping[str, Any],
    parent: str | None,
    serde: SerializerProtocol,
    codec: Codec,
    new_versions: Container[str] = (),
    before: Encoded | None = None,
) -> Encoded:
    """A checkpoint's text, and where each channel is in it. A channel that is not among `new_versions`, and has the
    version that it had in the parent (`before`), is taken from there as it is. Raises Unstorable, which names it."""
    values = checkpoint.get("channel_values") or {}
    if ENVELOPE in values:
        raise Unstorable(f"a channel cannot be named {ENVELOPE!r}: rename it", path=ENVELOPE)
    versions = checkpoint.get("channel_versions") or {}
    envelope = {key: value for key, value in checkpoint.items() if key != "channel_values"}
    envelope["parent"] = parent
    envelope["metadata"] = dict(metadata)
    # A channel without a version was never written: there is nothing to look for.
    if needs := [name for name in metadata.get(_COUNTERS) or () if name in versions and name not in values]:
        envelope[_NEEDS] = needs
    state: dict[str, Any] = {name: values[name] for name in sorted(values, key=_is_fleeting)}
    native = isinstance(serde, PerdureSerde)
    if not isinstance(serde, PerdureSerde):
        state = {name: serde.dumps_typed(value) for name, value in state.items()}
        envelope["metadata"] = serde.dumps_typed(envelope["metadata"])
        envelope["serde"] = True
    else:
        codec = serde.codec
    parts: list[bytes] = []
    parts_at: dict[str, Part] = {}
    at = 1  # behind the brace
    for name, value in (*state.items(), (ENVELOPE, envelope)):
        version = versions.get(name)
        old = before.parts.get(name) if native and before is not None else None
        if before is not None and old is not None and _is_unchanged(name, version, old, new_versions):
            part = before.text[old.start : old.end]
        else:
            part = _encode_channel(name, value, codec)
        key = _channel_key(name)
        start = at + len(key)
        parts_at[name] = Part(version, start, start + len(part))
        parts += (key, part, b",")
        at = start + len(part) + 1
    parts[-1] = b"}"
    text = b"".join((b"{", *parts))
    # What an assigned serializer made is not taken over: the next one may be another.
    if not native:
        return Encoded(text)
    whole = partial(encode_checkpoint, checkpoint, metadata, parent, serde, codec)
    return Encoded(text, parts_at, before.record if before is not None else None, whole)


@lru_cache(maxsize=1024)
def _channel_key(name: str) -> bytes:
    """A channel's name as the key of a state. Raises Unstorable."""
    try:
        if type(name) is str and not name.startswith("^"):
            return orjson.dumps(name) + b":"
    except TypeError:
        pass
    raise Unstorable(
        f"a channel cannot be named {name!r}: a name is text, valid Unicode, and does not begin with ^", path=repr(name)
    )


def _is_unchanged(name: str, version: Any, old: Part, new_versions: Container[str]) -> bool:
    return version is not None and version == old.version and name not in new_versions


def _encode_channel(name: str, value: Any, codec: Codec) -> bytes:
    try:
        return encode(value, codec)
    except Unstorable:
        return _encode({name: value}, codec)  # for the path


def _encode(state: dict[str, Any], codec: Codec) -> bytes:
    try:
        return encode(state, codec)
    except Unstorable as error:
        raise name_channel(error, state) from error


def _is_fleeting(channel: str) -> bool:
    """Whether a channel lives for one step: input, branches, tasks."""
    return channel.startswith("__") or ":" in channel


def name_channel(error: Unstorable, channels: Iterable[str]) -> Unstorable:
    """The same error, with the name of the channel that holds the value."""
    for name in channels:
        start = f"state[{orjson.dumps(name).decode()}]"
        if error.path == start or error.path.startswith((f"{start}[", f"{start}.")):
            where = "the metadata" if name == ENVELOPE else f'channel "{name}"'
            where += " (the graph's input)" if name == START else ""
            return Unstorable(f"{where}: {error}", path=error.path)
    return error


def from_text(text: bytes, serde: SerializerProtocol, codec: Codec) -> Parts:
    """The checkpoint of a text. Raises Undecodable, UnknownType; UsageError if it is no checkpoint of LangGraph's."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    state = decode(text, codec)
    envelope = state.pop(ENVELOPE, None) if type(state) is dict else None
    if type(envelope) is not dict:
        raise UsageError("this state was not saved by LangGraph: load it with store.thread(name).load()")
    metadata = envelope.pop("metadata", {})
    parent = envelope.pop("parent", None)
    envelope.pop(_NEEDS, None)
    if envelope.pop("serde", False):
        state = {name: load_opaque(value, serde) for name, value in state.items()}
        metadata = load_opaque(metadata, serde)
    if envelope.pop(_COPY_OF, None) is not None:  # of a rollback
        metadata = {**metadata, "source": "fork"}
    return Parts({**envelope, "channel_values": state}, metadata, parent)


def metadata_of(text: bytes, serde: SerializerProtocol, codec: Codec) -> dict[str, Any]:
    """The metadata of a checkpoint's text, without its values."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    envelope = decode(envelope_text(text) or b"{}", codec)
    metadata = envelope.get("metadata", {})
    if envelope.get("serde"):
        metadata = load_opaque(metadata, serde)
    return {**metadata, "source": "fork"} if _COPY_OF in envelope else metadata
