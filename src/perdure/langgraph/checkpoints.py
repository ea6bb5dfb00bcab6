"""A LangGraph checkpoint as the state of a line, and back. Pure.

The state is the channel values, as any other state, plus its envelope with all that LangGraph keeps beside them: id,
parent, versions, metadata. What changes at every step stands together at the end of the text, behind the channels that
grow: there a step is one splice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters import ENVELOPE, Codec, Encoded, Part, decode, encode, envelope_text
from perdure.errors import Unstorable, UsageError
from perdure.langgraph.remembered import NOTHING, Written, write_messages
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
    # What an assigned serializer made is not taken over: the next one may be another.
    text = _Text(before if native else None, codec)
    state[ENVELOPE] = envelope
    for name, value in state.items():
        version = versions.get(name)
        is_new = version is None or name in new_versions
        text.add(name, value, version, is_new=is_new, native=native)
    if not native:
        return Encoded(text.whole())
    # By then the graph may have changed what it has written: that is taken from here, and the parent's from the graph.
    done, others = Encoded(text.whole(), text.parts), {name for name in values if name not in new_versions}
    whole = partial(encode_checkpoint, checkpoint, metadata, parent, serde, codec, others, done)
    weight = sum([part.known.weight_bytes for part in text.parts.values() if part.known is not None])
    record = before.record if before is not None else None
    return done._replace(record=record, whole=whole, head=text.head, weight_bytes=weight)


def encode_state(state: Mapping[str, Any], codec: Codec) -> Encoded:
    """The text of a state with its envelope, and where each channel is in it. Raises Unstorable."""
    text = _Text(None, codec)
    for name, value in state.items():
        text.add(name, value, None, is_new=True, native=True)
    return Encoded(text.whole(), text.parts)


class _Text:
    """A state's text in the making, channel by channel; what did not change is taken from the parent's (`before`)."""

    def __init__(self, before: Encoded | None, codec: Codec) -> None:
        self.parts: dict[str, Part] = {}
        self.head = 0  # so many first bytes are the parent's
        self._before, self._codec = before, codec
        self._old = memoryview(before.text if before is not None else b"")
        self._pieces: list[bytes | memoryview] = [b"{"]
        self._size = 1
        self._is_head = before is not None

    def add(self, name: str, value: Any, version: Any, *, is_new: bool, native: bool) -> None:
        key = channel_key(name) if self._size == 1 else b"," + channel_key(name)
        start = self._size + len(key)
        old = self._before.parts.get(name) if self._before is not None else None
        if self._is_head and (old is None or old.start != start or self._old[self._size : start] != key):
            self._end_head(self._size)
        self._put(key)
        if old is not None and not is_new and version == old.version:
            self._take(old.start, old.end)
            self.parts[name] = Part(version, start, self._size, old.known)
            return
        written = self._messages(value, old) if native else None
        if written is None:
            self._end_head(self._size)
            self._put(_encode_channel(name, value, self._codec))
            self.parts[name] = Part(version, start, self._size)
            return
        if old is not None:
            self._take(old.start, old.start + written.kept)
        self._end_head(self._size)
        self._put(written.text)
        self.parts[name] = Part(version, start, self._size, written.messages)

    def whole(self) -> bytes:
        self._end_head(self._size)
        return b"".join((*self._pieces, b"}"))

    def _messages(self, value: Any, old: Part | None) -> Written | None:
        """A list of messages, of which those that were there before are not written again."""
        if type(value) is not list or not value or self._codec.shape_of(type(value[0])) is None:
            return None
        try:
            return write_messages(value, (old.known if old is not None else None) or NOTHING, self._codec)
        except Unstorable:
            return None  # encoding all of it says where

    def _put(self, piece: bytes) -> None:
        if not self._is_head:
            self._pieces.append(piece)
        self._size += len(piece)

    def _take(self, start: int, end: int) -> None:
        """Take a piece of the parent's text."""
        if not self._is_head:
            self._pieces.append(self._old[start:end])
        self._size += end - start

    def _end_head(self, size: int) -> None:
        """From here on it is another text than the parent's."""
        if self._is_head:
            self._is_head, self.head, self._pieces = False, size, [self._old[:size]]


@lru_cache(maxsize=1024)
def channel_key(name: str) -> bytes:
    """A channel's name as the key of a state. Raises Unstorable."""
    try:
        if type(name) is str and not name.startswith("^"):
            return orjson.dumps(name) + b":"
    except TypeError:
        pass
    raise Unstorable(
        f"a channel cannot be named {name!r}: a name is text, valid Unicode, and does not begin with ^", path=repr(name)
    )


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


def from_text(
    text: bytes, serde: SerializerProtocol, codec: Codec, parts: Mapping[str, Part] = MappingProxyType({})
) -> Parts:
    """The checkpoint of a text; what is remembered of its `parts` is copied, not decoded. Raises Undecodable,
    UnknownType; UsageError if it is no checkpoint of LangGraph's."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    if any(part.known is not None for part in parts.values()):
        return from_state({name: _value(text, part, codec) for name, part in parts.items()}, serde)
    return from_state(decode(text, codec), serde)


def from_state(state: Any, serde: SerializerProtocol) -> Parts:
    """The checkpoint of a state that is decoded; it is taken apart."""
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


def _value(text: bytes, part: Part, codec: Codec) -> Any:
    if part.known is None:
        return decode(text[part.start : part.end], codec)
    return part.known.read(text[part.start + part.known.size : part.end], codec)


def metadata_of(text: bytes, serde: SerializerProtocol, codec: Codec) -> dict[str, Any]:
    """The metadata of a checkpoint's text, without its values."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    envelope = decode(envelope_text(text) or b"{}", codec)
    metadata = envelope.get("metadata", {})
    if envelope.get("serde"):
        metadata = load_opaque(metadata, serde)
    return {**metadata, "source": "fork"} if _COPY_OF in envelope else metadata
