"""Convert a LangGraph checkpoint to the state of a line, and back. Pure.

The state is the channel values plus an envelope with the other parts of a checkpoint: id, parent, versions, metadata.
The parts that change at every step stand together at the end of the text, after the channels that grow. So a step
changes the text in one place.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure import External
from perdure.adapters import ENVELOPE, Codec, Encoded, Part, decode, encode, envelope_text, keys_of, noting
from perdure.errors import Unstorable, UsageError
from perdure.langgraph.remembered import NOTHING, Written, write_messages
from perdure.langgraph.serde import PerdureSerde, load_opaque

_COUNTERS = "counters_since_delta_snapshot"  # in the metadata: DeltaChannels without a stored value
START = "__start__"  # the channel of a graph's input
_FEW = 16
_COPY_OF, _NEEDS = (
    "copy_of",
    "needs",
)  # in the envelope: the checkpoint that a rollback copied; channels whose values are in the writes of ancestors


class Parts(NamedTuple):
    """The parts of a stored checkpoint."""

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
    """Encode a checkpoint, and record where each channel is in its text.

    The text of a channel is copied from the parent (`before`) if the channel is not among `new_versions` and has the
    same version there. Raises Unstorable, which names the channel.
    """
    values = checkpoint.get("channel_values") or {}
    if ENVELOPE in values:
        raise Unstorable(f"a channel cannot be named {ENVELOPE!r}: rename it", path=ENVELOPE)
    versions = checkpoint.get("channel_versions") or {}
    envelope = {**checkpoint, "parent": parent, "metadata": metadata}
    envelope.pop("channel_values", None)
    # A channel without a version was never written, so no ancestor has writes to it.
    if _COUNTERS in metadata and (
        needs := [name for name in metadata[_COUNTERS] or () if name in versions and name not in values]
    ):
        envelope[_NEEDS] = needs
    state: dict[str, Any] = {name: values[name] for name in _in_order(tuple(values))}
    if not isinstance(serde, PerdureSerde):  # never reused: the next checkpoint may have another one
        state = {name: serde.dumps_typed(value) for name, value in state.items()}
        envelope["metadata"] = serde.dumps_typed(dict(metadata))
        envelope["serde"] = True
        state[ENVELOPE] = envelope
        return Encoded(_write(state, {}, (), None, codec, native=False).text)
    state[ENVELOPE] = envelope
    written = encode_state(state, serde.codec, versions, new_versions, before)

    def whole() -> Encoded:
        # This runs later, when the graph may have changed values that it wrote. So written channels are taken from
        # the text above, and only the channels that were copied from the parent are encoded from their values.
        others = {name for name in values if name not in new_versions}
        again = encode_checkpoint(checkpoint, metadata, parent, serde, codec, others, written)
        return again._replace(values=[*written.values, *again.values])

    weight = sum([part.known.weight_bytes for part in written.parts.values() if part.known is not None])
    record = before.record if before is not None else None
    return written._replace(record=record, whole=whole, weight_bytes=weight)


def encode_state(
    state: Mapping[str, Any],
    codec: Codec,
    versions: Mapping[str, Any] = MappingProxyType({}),
    new_versions: Container[str] = (),
    before: Encoded | None = None,
) -> Encoded:
    """Encode a state with its envelope, and record where each channel is in its text. Raises Unstorable.

    Unchanged channels are copied from the parent's text (`before`). Large values of all channels are noted.
    """
    if codec.values is None:
        return _write(state, versions, new_versions, before, codec)
    with noting(codec) as noted:
        written = _write(state, versions, new_versions, before, codec, noted=noted)
    keys = {key for part in written.parts.values() for key in part.keys}
    return written._replace(keys=tuple(sorted(keys)), values=noted)


def _write(
    state: Mapping[str, Any],
    versions: Mapping[str, Any],
    new_versions: Container[str],
    before: Encoded | None,
    codec: Codec,
    *,
    native: bool = True,
    noted: Sequence[External[Any]] = (),
) -> Encoded:
    """Encode a state channel by channel. Unchanged channels are copied from the parent's text (`before`).

    `noted` gets the large values of those that are encoded.
    """
    text, old_parts = (b"", {}) if before is None else (before.text, before.parts)
    old_text = memoryview(text)
    is_head = before is not None  # so far the text equals the parent's; it is not in `pieces` yet
    parts: dict[str, Part] = {}
    pieces: list[bytes | memoryview] = []
    size = head = 0
    for name, value in state.items():
        key, old = channel_key(name, is_first=not size), old_parts.get(name)
        start = size + len(key)
        if is_head and (old is None or old.start != start or not text.startswith(key, size)):
            is_head, head = False, size
            pieces.append(old_text[:head])
        if not is_head:
            pieces.append(key)
        version = versions.get(name)
        if old is not None and version is not None and version == old.version and name not in new_versions:
            size = start + old.end - old.start
            if not is_head:
                pieces.append(old_text[old.start : old.end])
            parts[name] = old._replace(start=start, end=size)
            continue
        seen = len(noted)
        messages = _messages(value, old, old_text, codec) if native and type(value) is list else None
        if messages is not None and len(noted) > seen:
            messages = None  # messages with large values are not remembered: what they refer to could not be told
        if messages is None:
            kept, piece, known = 0, _encode_channel(name, value, codec), None
        else:
            kept, piece, known = messages  # `kept` bytes of the parent's text are reused
        if is_head:
            is_head, head = False, start + kept
            pieces.append(old_text[:head])
        elif kept and old is not None:
            pieces.append(old_text[old.start : old.start + kept])
        pieces.append(piece)
        size = start + kept + len(piece)
        parts[name] = Part(version, start, size, known, tuple(keys_of(noted[seen:])))
    if is_head:
        head = size
        pieces.append(old_text[:head])
    pieces.append(b"}" if size else b"{}")
    return Encoded(b"".join(pieces), parts, head=head)


def _messages(value: list[Any], old: Part | None, old_text: memoryview, codec: Codec) -> Written | None:
    """Encode a list of messages, reusing the text of those that did not change. Return None for other lists."""
    if not value or codec.shape_of(type(value[0])) is None:
        return None
    try:
        if old is None or old.known is None:
            return write_messages(value, NOTHING, codec)
        return write_messages(value, old.known, codec, old_text[old.start : old.start + old.known.size])
    except Unstorable:
        return None  # the caller encodes the whole list, and that error has the path


@lru_cache(maxsize=1024)
def _in_order(channels: tuple[str, ...]) -> tuple[str, ...]:
    """Return channels in the order of the text: those that live for one step (input, branches, tasks) come last."""
    return tuple(sorted(channels, key=lambda channel: channel.startswith("__") or ":" in channel))


@lru_cache(maxsize=1024)
def channel_key(name: str, is_first: bool) -> bytes:
    """Return a channel's name as a JSON key, with the brace or comma before it. Raises Unstorable."""
    try:
        if type(name) is str and not name.startswith("^"):
            return b"%b%b:" % (b"{" if is_first else b",", orjson.dumps(name))
    except TypeError:
        pass
    raise Unstorable(
        f"a channel cannot be named {name!r}: a name is text, valid Unicode, and does not begin with ^", path=repr(name)
    )


def _encode_channel(name: str, value: Any, codec: Codec) -> bytes:
    if value is None:
        return b"null"
    try:
        if name == START and type(value) is dict and len(value) <= _FEW and {*map(type, value)} == {str}:
            # The values are lists of messages, mostly: encoded one by one, each takes the fast path.
            pieces = [channel_key(key, not at) + encode(one, codec) for at, (key, one) in enumerate(value.items())]
            return b"".join(pieces) + b"}"
        return encode(value, codec)
    except Unstorable:
        return _encode({name: value}, codec)  # raises again, with the channel in the path


def _encode(state: dict[str, Any], codec: Codec) -> bytes:
    try:
        return encode(state, codec)
    except Unstorable as error:
        raise name_channel(error, state) from error


def name_channel(error: Unstorable, channels: Iterable[str]) -> Unstorable:
    """Return the same error with the name of the channel that holds the value."""
    for name in channels:
        start = f"state[{orjson.dumps(name).decode()}]"
        if error.path == start or error.path.startswith((f"{start}[", f"{start}.")):
            where = "the metadata" if name == ENVELOPE else f'channel "{name}"'
            where += " (the graph's input)" if name == START else ""
            return Unstorable(f"{where}: {error}", path=error.path)
    return error


def from_text(
    text: bytes, serde: SerializerProtocol, codec: Codec, parts: Mapping[str, Part] = MappingProxyType({})
) -> Parts:
    """Decode the text of a checkpoint. Messages that are cached in its `parts` are copied, not decoded.

    Raises Undecodable, UnknownType, and UsageError if LangGraph did not save this state.
    """
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    if any(part.known is not None for part in parts.values()):
        return from_state({name: _value(text, part, codec) for name, part in parts.items()}, serde)
    return from_state(decode(text, codec), serde)


def from_state(state: Any, serde: SerializerProtocol) -> Parts:
    """Return the checkpoint of a decoded state. The state is modified."""
    envelope = state.pop(ENVELOPE, None) if type(state) is dict else None
    if type(envelope) is not dict:
        raise UsageError("this state was not saved by LangGraph: load it with store.thread(name).load()")
    metadata = envelope.pop("metadata", {})
    parent = envelope.pop("parent", None)
    envelope.pop(_NEEDS, None)
    if envelope.pop("serde", False):
        state = {name: load_opaque(value, serde) for name, value in state.items()}
        metadata = load_opaque(metadata, serde)
    if envelope.pop(_COPY_OF, None) is not None:  # a rollback made it
        metadata = {**metadata, "source": "fork"}
    return Parts({**envelope, "channel_values": state}, metadata, parent)


def _value(text: bytes, part: Part, codec: Codec) -> Any:
    if part.known is None:
        return decode(text[part.start : part.end], codec)
    return part.known.read(text[part.start + part.known.size : part.end], codec)


def metadata_of(text: bytes, serde: SerializerProtocol, codec: Codec) -> dict[str, Any]:
    """Decode only the metadata of a checkpoint's text."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    envelope = decode(envelope_text(text) or b"{}", codec)
    metadata = envelope.get("metadata", {})
    if envelope.get("serde"):
        metadata = load_opaque(metadata, serde)
    return {**metadata, "source": "fork"} if _COPY_OF in envelope else metadata
