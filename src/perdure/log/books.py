"""What a labelled state says of itself, under one key beside its values: ids, versions, metadata. Pure.

The saver writes it. Reading the little that the log, a rollback and the command line need takes no LangGraph.
"""

from __future__ import annotations

from typing import Any

import orjson

from perdure.errors import Undecodable
from perdure.log.label_ids import pack_id, unpack_id

BOOK = "__langgraph__"
COUNTERS = "counters_since_delta_snapshot"  # in the metadata: channels that ancestors' writes are needed for
DELTAS = "deltas"  # their names, where the metadata cannot be read without a serializer
_START = b'"' + BOOK.encode() + b'":'


def book_text(text: bytes) -> bytes | None:
    """The text of the bookkeeping alone; None if there is none.

    It is the last value of the text. An object of the same name deeper inside has more behind it, so that only the
    right place leaves valid JSON up to the last brace.
    """
    at = len(text)
    while (at := text.rfind(_START, 0, at)) >= 0:
        book = text[at + len(_START) : -1]
        try:
            return book if type(orjson.loads(book)) is dict else None
        except ValueError:
            continue
    return None


def id_of(text: bytes) -> bytes:
    """The id of a labelled state, packed. Raises Undecodable."""
    found = orjson.loads(book_text(text) or b"{}").get("id")
    if type(found) is not str:
        raise Undecodable("a stored checkpoint of LangGraph's has no id")
    return pack_id(found)


def parent_of(state: dict[str, Any]) -> bytes | None:
    """The parent's id, packed, of a state as plain JSON."""
    parent = _book(state).get("parent")
    return pack_id(parent) if type(parent) is str else None


def delta_channels(state: dict[str, Any]) -> list[str]:
    """Channels that a state as plain JSON does not hold, but its ancestors' writes do."""
    book = _book(state)
    metadata, versions = book.get("metadata"), book.get("channel_versions")
    counters = book.get(DELTAS) or (metadata.get(COUNTERS) if type(metadata) is dict else None)
    if not isinstance(counters, dict | list) or type(versions) is not dict:
        return []
    # A channel without a version was never written: there is nothing to look for.
    return [channel for channel in counters if channel in versions and channel not in state]


def renamed(text: bytes, new: bytes) -> tuple[bytes, bytes]:
    """The text under a new id, as a fork of what it was; and its old id. Raises Undecodable."""
    old = id_of(text)
    state: Any = orjson.loads(text)
    book = state[BOOK]
    book["id"], book["parent"] = unpack_id(new), unpack_id(old)
    if type(book.get("metadata")) is dict and "source" in book["metadata"]:
        book["metadata"]["source"] = "fork"
    return orjson.dumps(state), old


def _book(state: dict[str, Any]) -> dict[str, Any]:
    book = state.get(BOOK)
    return book if type(book) is dict else {}
