"""What travels between stores: letters and moving members as frames, and batches of frames as signed bytes. Pure.

Two stores share a secret, with which each batch is signed: another store cannot speak in the name of either. A batch
that was recorded and sent again changes nothing: its frames are numbered, and their links are checked.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec
from blake3 import blake3

from perdure.errors import BatchRefused, Undecodable
from perdure.teams.protocol import PeerBatch, PeerFrame
from perdure.values.compress import decompress_bounded

SECRET_BYTES = 32
BATCH_BYTES_MAX = 32_000_000
PARCEL_BYTES_MAX = BATCH_BYTES_MAX // 2  # of a message or a state, compressed or not
_SIGNATURE_BYTES = 32
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Letter(msgspec.Struct, frozen=True, array_like=True, tag="letter"):
    """A message to a member in the other store. Ids are those of runs, such as research/writer."""

    to: str
    key: str
    sender: str | None
    sent_turn: int | None
    topic: str
    header: bytes | None
    value: bytes


class MovingMember(msgspec.Struct, frozen=True, array_like=True, tag="member"):
    """A member that continues in the other store, between two of its turns."""

    id: str
    function: str
    version: str
    turn: int
    args: bytes
    state: bytes


Parcel = Letter | MovingMember


def encode_parcel(parcel: Parcel) -> bytes:
    return msgspec.msgpack.encode(parcel)


def decode_parcel(body: bytes) -> Parcel:
    """Read a frame's body. Raises BatchRefused."""
    try:
        parcel = msgspec.msgpack.decode(body, type=Letter | MovingMember)
        content = parcel.value if isinstance(parcel, Letter) else parcel.state
        if content[:4] == _ZSTD_MAGIC:  # a small frame may claim to be huge
            decompress_bounded(content, PARCEL_BYTES_MAX)
    except (msgspec.DecodeError, ValueError, Undecodable) as error:
        raise BatchRefused(f"a message of another store cannot be read ({error}): is it of another version?") from error
    return parcel


def encode_batch(batch: PeerBatch, secret: bytes) -> bytes:
    """Return a batch as bytes, signed."""
    text = msgspec.msgpack.encode(batch)
    return blake3(text, key=secret).digest() + text


def decode_batch(data: bytes, team: str, store: str, secret_of: Callable[[str], bytes | None]) -> PeerBatch:
    """Read a batch that was sent to a store of a team, and check its signature. Raises BatchRefused."""
    if len(data) > BATCH_BYTES_MAX:
        raise BatchRefused(f"a batch of {len(data):,} bytes: at most {BATCH_BYTES_MAX:,} are read")
    signature, text = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    try:
        batch = msgspec.msgpack.decode(text, type=PeerBatch)
    except (msgspec.DecodeError, ValueError) as error:
        raise BatchRefused(f"what arrived is no batch of a team ({error})") from error
    if (batch.team, batch.target) != (team, store):
        raise BatchRefused(
            f"the batch is for store {batch.target!r} of team {batch.team!r}; this is store {store!r} of team {team!r}"
        )
    secret = secret_of(batch.source)
    if secret is None:
        raise BatchRefused(f"store {batch.source!r} is not linked with this one in team {team!r}")
    if not hmac.compare_digest(blake3(text, key=secret).digest(), signature):
        raise BatchRefused(f"the batch is not signed by store {batch.source!r}: another sender made it, or changed it")
    return batch


def some_frames(frames: list[PeerFrame]) -> list[PeerFrame]:
    """Return the first frames, as many as fit well into a batch, and at least one."""
    size = 0
    for number, frame in enumerate(frames):
        size += len(frame.body)
        if number and size > PARCEL_BYTES_MAX:
            return frames[:number]
    return frames
