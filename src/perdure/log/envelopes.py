"""What a state that was saved under an id says of itself, under one key beside its values: the envelope. Pure.

The writer of a line puts it there, as the last value of the text: the `id` of the checkpoint, its `parent`'s id, and
`needs`: keys that the state does not hold itself, but that are rebuilt from what is attached to its ancestors. All else
in it is the writer's own. A checkpoint that a rollback has made says in `copy_of` whose state it has.
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
    """The text of the envelope alone; None if there is none.

    It is the last value of the text. An object of the same name deeper inside has more behind it, so that only the
    right place leaves valid JSON up to the last brace.
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
    """The id of a state with an envelope, packed. Raises Undecodable."""
    found = orjson.loads(envelope_text(text) or b"{}").get("id")
    if type(found) is not str:
        raise Undecodable("a stored checkpoint that should have an id has none")
    return pack_id(found)


def parent_of(state: dict[str, Any]) -> bytes | None:
    """The parent's id, packed, of a state as plain JSON."""
    parent = _envelope(state).get("parent")
    return pack_id(parent) if type(parent) is str else None


def needs_of(state: dict[str, Any]) -> list[str]:
    """Keys that a state as plain JSON does not hold, but what is attached to its ancestors does."""
    needs = _envelope(state).get(NEEDS)
    return needs if type(needs) is list else []


def renamed(text: bytes, new: bytes) -> tuple[bytes, bytes]:
    """The text under a new id, as a copy that follows what it was; and its old id. Raises Undecodable."""
    old = id_of(text)
    state: Any = orjson.loads(text)
    envelope = state[ENVELOPE]
    envelope["id"], envelope["parent"], envelope[COPY_OF] = unpack_id(new), unpack_id(old), unpack_id(old)
    return orjson.dumps(state), old


def _envelope(state: dict[str, Any]) -> dict[str, Any]:
    envelope = state.get(ENVELOPE)
    return envelope if type(envelope) is dict else {}
