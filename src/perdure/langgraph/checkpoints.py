"""A LangGraph checkpoint as the state of a Perdure thread, and back. Pure.

The state is the channel values, as any other state, plus one key, BOOK, with all that LangGraph keeps beside them: id,
parent, versions, metadata. What changes at every step stands together at the end of the text, behind the channels that
grow: there a step is one splice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from blake3 import blake3
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.errors import Unstorable, UsageError
from perdure.langgraph.serde import PerdureSerde, load_opaque
from perdure.log.books import BOOK, COUNTERS, DELTAS, book_text
from perdure.values.codec import Codec, decode, encode
from perdure.values.plain import is_plain_dict

START = "__start__"  # the channel of a graph's input


class Parts(NamedTuple):
    """What a stored checkpoint says."""

    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    parent: str | None


def run_key(run: str) -> bytes:
    """What a run's checkpoints are found by: not the run's id itself, which may be hidden by encryption."""
    return blake3(run.encode("utf-8", "surrogatepass")).digest(16)


class Span(NamedTuple):
    """Where a channel's value stands in a text, and of which version it is."""

    version: Any
    start: int
    end: int


class Encoded(NamedTuple):
    """A checkpoint's text, and where its channels are."""

    text: bytes
    spans: Mapping[str, Span]


def to_text(
    checkpoint: Mapping[str, Any],
    metadata: Mapping[str, Any],
    parent: str | None,
    serde: SerializerProtocol,
    codec: Codec,
) -> bytes:
    """The text of a checkpoint. Raises Unstorable, which names channel and path."""
    return encode_checkpoint(checkpoint, metadata, parent, serde, codec).text


def encode_checkpoint(
    checkpoint: Mapping[str, Any],
    metadata: Mapping[str, Any],
    parent: str | None,
    serde: SerializerProtocol,
    codec: Codec,
    new_versions: Container[str] = (),
    before: Encoded | None = None,
) -> Encoded:
    """The same, and where each channel is. A channel that is not among `new_versions`, and has the version that it had
    in the parent (`before`), is taken from there as it is."""
    values = checkpoint.get("channel_values") or {}
    if BOOK in values:
        raise Unstorable(f"a channel cannot be named {BOOK!r}: rename it", path=BOOK)
    book = {key: value for key, value in checkpoint.items() if key != "channel_values"}
    book["parent"] = parent
    book["metadata"] = dict(metadata)
    state: dict[str, Any] = {name: values[name] for name in sorted(values, key=_is_fleeting)}
    native = isinstance(serde, PerdureSerde)
    if not isinstance(serde, PerdureSerde):
        state = {name: serde.dumps_typed(value) for name, value in state.items()}
        book["metadata"] = serde.dumps_typed(book["metadata"])
        book["serde"] = True
        if counters := metadata.get(COUNTERS):
            book[DELTAS] = list(counters)
    else:
        codec = serde.codec
    if not is_plain_dict(state):
        odd = next(name for name in state if not is_plain_dict({name: None}))
        raise Unstorable(
            f"a channel cannot be named {odd!r}: a name is text, valid Unicode, and does not begin with ^",
            path=repr(odd),
        )
    versions = checkpoint.get("channel_versions") or {}
    parts: list[bytes] = []
    spans: dict[str, Span] = {}
    at = 1  # behind the brace
    for name, value in (*state.items(), (BOOK, book)):
        version = versions.get(name)
        old = before.spans.get(name) if native and before is not None else None
        if before is not None and old is not None and _is_unchanged(name, version, old, new_versions):
            part = before.text[old.start : old.end]
        else:
            part = _encode_channel(name, value, codec)
        key = orjson.dumps(name) + b":"
        start = at + len(key)
        spans[name] = Span(version, start, start + len(part))
        parts += (key, part, b",")
        at = start + len(part) + 1
    parts[-1] = b"}"
    text = b"".join((b"{", *parts))
    # What an assigned serializer made is not taken over: the next one may be another.
    return Encoded(text, spans if native else {})


def _is_unchanged(name: str, version: Any, old: Span, new_versions: Container[str]) -> bool:
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
            where = "the metadata" if name == BOOK else f'channel "{name}"'
            where += " (the graph's input)" if name == START else ""
            return Unstorable(f"{where}: {error}", path=error.path)
    return error


def from_text(text: bytes, serde: SerializerProtocol, codec: Codec) -> Parts:
    """The checkpoint of a text. Raises Undecodable, UnknownType; UsageError if it is no checkpoint of LangGraph's."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    state = decode(text, codec)
    book = state.pop(BOOK, None) if type(state) is dict else None
    if type(book) is not dict:
        raise UsageError("this state was not saved by LangGraph: load it with store.thread(name).load()")
    metadata = book.pop("metadata", {})
    parent = book.pop("parent", None)
    book.pop(DELTAS, None)
    if book.pop("serde", False):
        state = {name: load_opaque(value, serde) for name, value in state.items()}
        metadata = load_opaque(metadata, serde)
    return Parts({**book, "channel_values": state}, metadata, parent)


def metadata_of(text: bytes, serde: SerializerProtocol, codec: Codec) -> dict[str, Any]:
    """The metadata of a checkpoint's text, without its values."""
    if isinstance(serde, PerdureSerde):
        codec = serde.codec
    book = decode(book_text(text) or b"{}", codec)
    metadata = book.get("metadata", {})
    return load_opaque(metadata, serde) if book.get("serde") else metadata  # type: ignore[no-any-return]
