"""Taking packs apart where records are removed or moved: what stays in them gets bodies of its own again.

Part of the transaction that rearranges a tree (`gc.py`): afterwards nothing that is to be moved is packed, so
that the rest of it knows nothing of packs.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from typing import Protocol

from perdure.errors import Damaged, Undecodable
from perdure.log.ids import show_id
from perdure.log.packs import PACK, Packs, packed_mark
from perdure.log.reading import read_state
from perdure.storage.columns import DIFF, SALT
from perdure.storage.program import Batch, Rows, Sql, Statement
from perdure.values.delta import Decoder, Encoder
from perdure.values.dictionary import Dictionary

_UNPACK = Sql(
    sqlite=(
        "INSERT INTO body (tenant, salt, diff) VALUES (:tenant, :salt, :diff)",
        "UPDATE record SET body = last_insert_rowid() WHERE tenant = :tenant AND tree = :tree AND id = :id",
    ),
    postgres="""WITH b AS (INSERT INTO body (tenant, salt, diff) VALUES (:tenant, :salt, :diff) RETURNING id)
        UPDATE record SET body = b.id FROM b
        WHERE tenant = :tenant AND tree = :tree AND record.id = :id""",
    seals={"salt": SALT, "diff": DIFF},
)
_DROP_PACK = Sql("DELETE FROM pack WHERE tenant = :tenant AND pack = :pack")
# What was taken apart is to be packed again, even if its thread was not written to.
_FORGET_MARK = Sql("DELETE FROM meta WHERE key = :key")
_BATCH = 50
_DROP_PACKS = Sql(
    """DELETE FROM pack WHERE tenant = :tenant AND pack IN (
        SELECT pack FROM pack WHERE tenant = :tenant AND tree = :tree LIMIT :limit) RETURNING pack"""
)


class Pointers(Protocol):
    """What is asked of a record here."""

    @property
    def id(self) -> int: ...
    @property
    def body(self) -> int | None: ...
    @property
    def key(self) -> int: ...


def _packed_in(nodes: Iterable[Pointers]) -> dict[int, list[Pointers]]:
    """Which packs there are, and the records in each, the oldest first."""
    packs: dict[int, list[Pointers]] = {}
    for node in sorted(nodes, key=lambda node: node.id):
        if node.body is not None and node.body < 0:
            packs.setdefault(-node.body, []).append(node)
    return packs


def release(
    tenant: int, tree: int, nodes: Iterable[Pointers], gone: Collection[int], moved_keys: Collection[int]
) -> Generator[Batch, list[Rows], tuple[bool, list[Statement]]]:
    """Take apart the packs in which records `gone` stand beside others, and those of the chains `moved_keys`. Whether
    any body has moved; and what drops the packs whose records all go, for when nothing is built on these any more."""
    changed, drops = False, []
    for pack, nodes_in in _packed_in(nodes).items():
        members = [node.id for node in nodes_in]
        going = sum(record in gone for record in members)
        if going == len(members):
            drops.append(_DROP_PACK(tenant=tenant, pack=pack))
        elif going or any(node.key in moved_keys for node in nodes_in):
            yield from _dissolve(tenant, tree, pack, nodes_in[0].key, members)
            changed = True
    return changed, drops


def _dissolve(tenant: int, tree: int, pack: int, key: int, members: list[int]) -> Generator[Batch, list[Rows], None]:
    """Give all records of a pack bodies of their own. `members`: every record that is in it, in order."""
    key_text = yield from _key_text(tenant, tree, [key, *members])
    if key_text is None:
        raise _lost(members)
    [rows] = yield Batch(PACK(tenant=tenant, pack=pack))
    if not rows:
        raise _lost(members)
    packs = Packs(rows)
    encoder, decoder = Encoder(Dictionary(key_text)), Decoder(Dictionary(key_text))
    statements = []
    try:
        for index, record in enumerate(members):
            salt = packs.salt(pack, index)
            [splices] = decoder.decode([packs.diff(pack, index, key_text)])
            diff = encoder.encode_splices(splices)
            statements.append(_UNPACK(tenant=tenant, tree=tree, id=record, salt=salt, diff=diff))
    except Undecodable as problem:
        raise _lost(members) from problem
    forget = _FORGET_MARK(tenant=tenant, key=packed_mark(tenant))
    yield Batch(*statements, _DROP_PACK(tenant=tenant, pack=pack), forget)


def _key_text(tenant: int, tree: int, records: list[int]) -> Generator[Batch, list[Rows], bytes | None]:
    """The keyframe's text, proved by the hash of one of these records: the keyframe's own note may be damaged."""
    for record in records:
        try:
            loaded = yield from read_state(tenant, tree, record)
        except (Damaged, Undecodable):
            continue
        if loaded is not None:
            return loaded.key_data
    return None


def drop_packs(tenant: int, tree: int) -> Generator[Batch, list[Rows], int]:
    """Remove some packs of a tree that goes as a whole. How many: 0 if none was left."""
    [rows] = yield Batch(_DROP_PACKS(tenant=tenant, tree=tree, limit=_BATCH))
    return len(rows)


def _lost(members: list[int]) -> Damaged:
    named = tuple(show_id(record) for record in members)
    return Damaged(
        f"the pack that holds checkpoints {named[0]} to {named[-1]} is damaged: run `perdure store repair`",
        checkpoints=named,
    )
