"""The envelope: facts about a state that was saved under an id, under one key beside its values. Pure.

The writer of a line adds it as the last value of the text. It holds the checkpoint's `id`, the `parent`'s id, and
`needs`: keys that the state itself does not hold, and that are rebuilt from the writes attached to its ancestors. All
other entries belong to the writer. In a checkpoint that a rollback has made, `copy_of` is the id whose state it has.
"""

from __future__ import annotations

from typing import Any

import orjson

from perdure.errors import Undecodable
from perdure.log.label_ids import pack_id, unpack_id

ENVELOPE = "__line__"
NEEDS = "needs"
COPY_OF = "copy_of"
_START = b'"' + ENVELOPE.encode() + b'":'


def envelope_text(text: bytes) -> bytes | None:
    """Return the envelope's JSON text, or None if there is none.

    The envelope is the last value of the text. An object of the same name deeper inside is followed by more text, so
    only the envelope is valid JSON up to the last brace.
    """
    at = len(text)
    while (at := text.rfind(_START, 0, at)) >= 0:
        envelope = text[at + len(_START) : -1]
        try:
            return envelope if type(orjson.loads(envelope)) is dict else None
        except ValueError:
            continue
    return None


def id_of(text: bytes) -> bytes:
    """Return the packed id of a state with an envelope. Raise Undecodable if it has no id."""
    label_id = orjson.loads(envelope_text(text) or b"{}").get("id")
    if type(label_id) is not str:
        raise Undecodable("a stored checkpoint that should have an id has none")
    return pack_id(label_id)


def parent_of(state: dict[str, Any]) -> bytes | None:
    """Return the packed id of a plain JSON state's parent, or None."""
    parent = _envelope(state).get("parent")
    return pack_id(parent) if type(parent) is str else None


def needs_of(state: dict[str, Any]) -> list[str]:
    """Return the keys of a plain JSON state that are rebuilt from writes attached to its ancestors."""
    needs = _envelope(state).get(NEEDS)
    return needs if type(needs) is list else []


def renamed(text: bytes, new: bytes) -> tuple[bytes, bytes]:
    """Return the text as a copy with a new id, whose parent is the original, and the old id. May raise Undecodable."""
    old = id_of(text)
    state: Any = orjson.loads(text)
    envelope = state[ENVELOPE]
    envelope["id"], envelope["parent"], envelope[COPY_OF] = unpack_id(new), unpack_id(old), unpack_id(old)
    return orjson.dumps(state), old


def _envelope(state: dict[str, Any]) -> dict[str, Any]:
    envelope = state.get(ENVELOPE)
    return envelope if type(envelope) is dict else {}
