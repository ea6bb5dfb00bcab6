"""Decode the checkpoints of a line one after the other: the messages that they share are decoded once, then copied.

The text of one checkpoint is kept with a cache of its messages. The next text begins with the same bytes. The messages
in that common part are copied, and the other text is decoded. So no two states share an object.

The messages of several checkpoints are copied in one call: the garbage collector visits new objects at every call, and
all the older ones at every hundredth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.adapters import ENVELOPE, Codec, Encoded, LineCheckpoint, common_size, decode
from perdure.errors import Unstorable
from perdure.langgraph.checkpoints import channel_key, encode_state
from perdure.langgraph.remembered import Remembered

_REST_MAX = 256  # if more messages than this must be decoded, a newer text is better to compare with


class _Shared(NamedTuple):
    """A state whose channel `name` lacks its first messages: those in `kept`."""

    state: dict[str, Any]
    name: str
    kept: Remembered


class History:
    """Decodes checkpoints, most of which follow one another on one line."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._line: tuple[str, str] | None = None  # of the last checkpoint
        self._known: Encoded | None = None  # a text that others are compared with

    def states(self, entries: Sequence[LineCheckpoint]) -> list[Any]:
        """Return the states of consecutive checkpoints, made of new objects. Raises Undecodable, UnknownType.

        It raises for the first checkpoint only. If another cannot be read, it returns the states before that one.
        """
        states: list[Any] = []
        for entry in entries:
            try:
                states.append(self._state(entry))
            except Exception:
                if not states:
                    raise
                self._line = None  # the next call reads it again
                break
        shared = [one for one in states if type(one) is _Shared]
        while shared:
            columns = shared[0].kept.columns
            of_these = [one for one in shared if one.kept.columns is columns]
            shared = [one for one in shared if one.kept.columns is not columns]
            for one, messages in zip(of_these, columns.copies_of([one.kept.number for one in of_these]), strict=True):
                messages += one.state[one.name]
                one.state[one.name] = messages
        return [one.state if type(one) is _Shared else one for one in states]

    def _state(self, entry: LineCheckpoint) -> Any:
        """Return the state of a checkpoint, or a `_Shared` one."""
        text, line = entry.text, (entry.thread, entry.namespace)
        follows, self._line = line == self._line, line
        if not follows:
            self._known = None
        state: Any = self._shared(text) if self._known is not None else None
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

    def _shared(self, text: bytes) -> _Shared | None:
        """Return the state of a text that shares messages with the known one, or None if too few are shared."""
        known = self._known
        assert known is not None
        same = common_size(known.text, text)
        state: dict[str, Any] = {}
        for name, part in known.parts.items():
            if part.end < same:
                size = part.known.size if part.known is not None else 0
                remainder = known.text[part.start + size : part.end]
                state[name] = part.known.copy(remainder, self._codec) if size else decode(remainder, self._codec)
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
            return _Shared({**state, **left}, name, kept)
        return None
