"""Read many states of one line, newest first, from one read of the keyframe's chain.

Loading each state by itself would apply the whole chain each time. Here the chain is applied once, forwards. Each step
remembers the bytes that it overwrote, and is then undone. Every state is checked against its hash on the way.
Memory: one text and the bytes that the steps changed, however long the chain is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from perdure.errors import Damaged, Undecodable
from perdure.log.ids import show_id
from perdure.log.reading import Chain, read_chain
from perdure.log.records import NO_HASH, R_COLUMNS, RECORD_ENCRYPTED, Record, hash_holds, record_of
from perdure.log.tables import SALT
from perdure.storage.program import Batch, Program, Sql
from perdure.values.compress import decompress_full
from perdure.values.delta import apply_undoable
from perdure.values.diff import Splices
from perdure.values.hashing import chunk_digests, content_digest

_ROWS = Sql(
    f"""SELECT {R_COLUMNS}, (SELECT b.salt FROM body b WHERE b.tenant = r.tenant AND b.id = r.body),
        (SELECT p.hash FROM record p WHERE p.tenant = r.tenant AND p.tree = r.tree AND p.id = r.parent)
    FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.body IS NOT NULL AND r.id IN {{numbers:ids}}""",
    opens={**RECORD_ENCRYPTED, len(Record._fields): SALT},
    tolerant=True,
)
_WIDTH = len(Record._fields)


class Link(NamedTuple):
    """One record of a chain, with the salt and the parent's hash that its own hash covers."""

    record: Record
    salt: bytes
    parent_hash: bytes | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A record's chain back to its keyframe, read at once and not yet checked."""

    chain: Chain
    links: dict[int, Link]

    def forward(self, records: Container[int] | None = None) -> Iterator[tuple[Link, bytes, Splices]]:
        """Yield each record from the keyframe on, oldest first, with its text and the splices that undo its step.

        Each state is checked, or only those of the records in `records`. Raise Damaged if a check fails."""
        chain = self.chain
        key = self.links.get(chain.record.key)
        try:
            if chain.full is None or chain.stored is None or key is None:
                raise Undecodable("its chain is broken")
            text = decompress_full(chain.full, chain.key_size)
            digests = self._check(key, text, records)
            yield key, text, []
            numbers = iter(chain.ids)
            for batch in chain.batches(text):
                for splices in batch:
                    common = splices[0] if splices else len(text)
                    text, before = apply_undoable(text, splices)
                    link = self.links[next(numbers, -1)]
                    digests = self._check(link, text, records, digests, common)  # type: ignore[arg-type]
                    yield link, text, before
        except (Undecodable, KeyError) as problem:
            raise Damaged(
                f"checkpoint {show_id(chain.record.id)} is damaged, or one it is built on: {problem}",
                checkpoints=(show_id(chain.record.id),),
            ) from problem

    def states(self) -> Iterator[tuple[Record, bytes]]:
        """Return the states from the record back to the keyframe, newest first. Raise Damaged if a check fails."""
        steps: list[tuple[Link, Splices]] = []
        text = b""
        for link, text, before in self.forward():  # noqa: B007 - the last one
            steps.append((link, before))
        return self._back(text, steps)

    def _back(self, text: bytes, steps: list[tuple[Link, Splices]]) -> Iterator[tuple[Record, bytes]]:
        while steps:
            link, before = steps.pop()
            yield link.record, text
            text = apply_undoable(text, before)[0] if steps else text

    def _check(
        self,
        link: Link,
        text: bytes,
        records: Container[int] | None,
        known: tuple[bytes, ...] = (),
        common_head: int = 0,
    ) -> tuple[bytes, ...]:
        record = link.record
        digests = chunk_digests(text, known, [(0, common_head)])
        if records is not None and record.id not in records:
            return digests
        content = content_digest(link.salt, len(text), digests) if len(text) == record.size else b""
        if link.parent_hash is None or not hash_holds(record, link.parent_hash, content):
            raise Undecodable(f"what is stored for {show_id(record.id)} does not add up to what was saved")
        return digests


def read_stretch(tenant: int, tree: int, record: int) -> Program[Stretch | None]:
    """Read a record's chain. Return None if there is no such record, or only its tombstone."""
    chain = yield from read_chain(tenant, tree, record)
    if chain is None or chain.record.body is None:
        return None
    ids = orjson.dumps([chain.record.key, *chain.ids]).decode()
    [rows] = yield Batch(_ROWS(tenant=tenant, tree=tree, ids=ids), last=True)
    links: dict[int, Link] = {}
    for row in rows:
        link = record_of(row[:_WIDTH])
        salt, parent_hash = row[_WIDTH:]
        salt = salt if type(salt) is bytes else b""  # damaged
        links[link.id] = Link(link, salt, NO_HASH if link.parent is None else parent_hash)
    return Stretch(chain, links)
