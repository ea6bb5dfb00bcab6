"""A chain of states for a database without the tables of `log`: each link is one value of bytes. Pure.

The database keeps links under consecutive numbers, and must refuse a number that it has: then two writers cannot extend
the same link. A link holds a whole text or the difference to the text before it. Its hash covers the hash before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from perdure.errors import Damaged, Undecodable
from perdure.log.append import base_after, prepare
from perdure.log.cache import Base
from perdure.log.records import NO_HASH, UNKNOWN, Record, chain_hash, hash_holds
from perdure.values.compress import decompress_full
from perdure.values.delta import Decoder, apply_all
from perdure.values.dictionary import Dictionary
from perdure.values.diff import Splices
from perdure.values.hashing import chunk_digests, content_digest

LINKS_MAX = 32  # how many links a read takes at most: the first of them is whole
_KIND = "link"


class ChainLink(msgspec.Struct, frozen=True, array_like=True):
    """One stored state."""

    number: int
    key: int  # the number of the whole link that this one is rebuilt from; its own if it is whole
    at: int  # in microseconds since 1970
    label: str  # the caller's id of the state
    size: int
    salt: bytes
    previous: bytes  # of a whole link: the hash before it. Of others it is in the link before.
    hash: bytes
    body: bytes


pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(ChainLink).decode


def unpack(packed: bytes) -> ChainLink:
    """Return the link of its bytes. Raises Undecodable."""
    try:
        return _unpack(packed)
    except msgspec.MsgspecError as problem:
        raise Undecodable(f"a stored link is malformed: {problem}") from problem


def extend(
    tip: Base | None, text: bytes, label: str, number: int, at: int, salt: bytes, *, whole: bool = False, head: int = 0
) -> tuple[ChainLink, Base]:
    """Return the link of the next state, and the tip after it. If the database refuses the link, read the tip again.

    `head`: the number of leading bytes that are known to equal the tip's. `whole` starts a new chain.
    """
    before = None if tip is None else tip.record
    base = None if whole or before is None or number - before.key >= LINKS_MAX else tip
    draft = prepare(text, base, salt, kind=_KIND, note=label, metadata=None, head=head if base is not None else 0)
    is_whole = draft.full is not None
    key = number if is_whole or before is None else before.key
    previous = NO_HASH if before is None else before.hash
    hash_ = chain_hash(previous, number, _KIND, at, 0, label, None, draft.content)
    body = draft.full if draft.full is not None else draft.diff or b""
    link = ChainLink(number, key, at, label, len(text), salt, previous if is_whole else b"", hash_, body)
    return link, base_after(draft, _record(link), 0)


def read_tip(links: Sequence[ChainLink]) -> Base:
    """Return the checked state of the last link, to be extended. `links` begin with a whole one. Raises Damaged."""
    key_text, splices = _parts(links)
    try:
        text = apply_all(key_text, [splices]) if splices else key_text
    except Undecodable as error:
        raise _damaged(links[-1]) from error
    digests = _check(links, len(links) - 1, text)
    return Base(_record(links[-1]), text, digests, Dictionary(key_text), len(key_text), 0, 0)


def walk(links: Sequence[ChainLink]) -> Iterator[tuple[ChainLink, bytes]]:
    """Iterate over all states of a chain, the oldest first. Raises Damaged."""
    text, splices = _parts(links)
    for position, link in enumerate(links):
        try:
            text = apply_all(text, [[splices[position - 1]]]) if position else text
        except Undecodable as error:
            raise _damaged(link) from error
        _check(links, position, text)
        yield link, text


def _parts(links: Sequence[ChainLink]) -> tuple[bytes, list[Splices]]:
    """Return the text of the whole link, and the differences since."""
    first = links[0]
    for position, link in enumerate(links):
        if link.key != first.number or link.number != first.number + position:
            raise _damaged(link)
    try:
        text = decompress_full(first.body, first.size)
        return text, Decoder(Dictionary(text)).decode(link.body for link in links[1:])
    except Undecodable as error:
        raise _damaged(links[-1]) from error


def _check(links: Sequence[ChainLink], position: int, text: bytes) -> tuple[bytes, ...]:
    """Return the digests of a link's text. Raises Damaged if it is not what was saved."""
    link, digests = links[position], chunk_digests(text)
    previous = links[position - 1].hash if position else link.previous
    content = content_digest(link.salt, len(text), digests)
    if len(text) != link.size or not hash_holds(_record(link), previous, content):
        raise _damaged(link)
    return digests


def _record(link: ChainLink) -> Record:
    """Return a link as a record. Its cost stays 0: the number of links bounds what a read costs."""
    return UNKNOWN._replace(
        id=link.number, key=link.key, kind=_KIND, at=link.at, note=link.label, size=link.size, hash=link.hash
    )


def _damaged(link: ChainLink) -> Damaged:
    return Damaged(
        f"checkpoint {link.label} is damaged: what is stored does not add up to what was saved",
        checkpoints=(link.label,),
    )
