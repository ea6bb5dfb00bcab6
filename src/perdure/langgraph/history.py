"""Decode the checkpoints of a line one after the other: the messages that they share are decoded once, then copied.

The text of one checkpoint is kept with a cache of its messages. The next text begins with the same bytes. The messages
in that common part are copied, and the other text is decoded. So no two states share an object.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from perdure.adapters import ENVELOPE, Codec, Encoded, LineCheckpoint, common_size, decode
from perdure.errors import Unstorable
from perdure.langgraph.checkpoints import channel_key, encode_state
from perdure.langgraph.remembered import Remembered

_REST_MAX = 256  # if more messages than this must be decoded, a newer text is better to compare with


class History:
    """Decodes checkpoints, most of which follow one another on one line."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._line: tuple[str, str] | None = None  # of the last checkpoint
        self._known: Encoded | None = None  # a text that others are compared with

    def state(self, entry: LineCheckpoint) -> Any:
        """Return the state of a checkpoint, made of new objects. Raises Undecodable, UnknownType."""
        text, line = entry.text, (entry.thread, entry.namespace)
        follows, self._line = line == self._line, line
        if not follows:
            self._known = None
        state = self._shared(text) if self._known is not None else None
        if state is None:
            state = decode(text, self._codec)
            if follows:
                self._remember(text, state)
        return state

    def _remember(self, text: bytes, state: Any) -> None:
        """Keep a text to compare others with, if it has messages and encoding its state gives the same text."""
        self._known = None
        if type(state) is dict and ENVELOPE in state:
            try:
                encoded = encode_state(state, self._codec)
            except Unstorable:  # a class that this process reads, but does not write
                return
            if encoded.text == text and any(part.known is not None for part in encoded.parts.values()):
                self._known = encoded

    def _shared(self, text: bytes) -> dict[str, Any] | None:
        """Return the state of a text that shares messages with the known one, or None if too few are shared."""
        known = self._known
        assert known is not None
        same = common_size(known.text, text)
        state: dict[str, Any] = {}
        for name, part in known.parts.items():
            if part.end < same:
                size = part.known.size if part.known is not None else 0
                remainder = known.text[part.start + size : part.end]
                state[name] = part.known.read(remainder, self._codec) if size else decode(remainder, self._codec)
                continue
            if part.known is None:
                return None
            number = bisect_right(part.known.columns.ends, same - part.start, 0, part.known.number)
            kept = Remembered(part.known.columns, number)
            cut = part.start + kept.size
            if not number or text[cut : cut + 1] not in (b",", b"]"):
                return None
            left = decode(
                b"%b[%b" % (channel_key(name, True), text[cut + (text[cut : cut + 1] == b",") :]), self._codec
            )
            if len(left[name]) > _REST_MAX:
                return None
            messages = kept.copies()
            messages += left[name]
            left[name] = messages
            return {**state, **left}
        return None
