"""Mending where packs belong, and taking those apart that lost records leave behind.

A record's place in its pack is its place among the records that point at it: so nothing may drop out of that order
before the others have bodies of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Generator
from functools import partial
from typing import Any

from perdure.errors import Damaged
from perdure.log.choosing import Node
from perdure.log.mended import Done
from perdure.log.mending_bodies import CANNOT_READ, set_row
from perdure.log.reading import RECORD, read_state
from perdure.log.records import R_COLUMNS, RECORD_CELLS, record_of
from perdure.log.unpacking import dissolve_with
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write

_PAGE = 200
_ODD_PACKS = Sql(
    """SELECT p.pack, p.tree, p.key, p.first, p.last FROM pack p JOIN (
        SELECT body, min(tree) AS tree, min(key) AS key, min(id) AS first, max(id) AS last
        FROM record WHERE tenant = :tenant AND body < 0 GROUP BY body) m ON m.body = -p.pack
    WHERE p.tenant = :tenant AND p.pack > :after
        AND (p.tree <> m.tree OR p.key <> m.key OR p.first <> m.first OR p.last <> m.last)
    ORDER BY p.pack LIMIT :limit"""
)
_MEMBERS = Sql(
    f"SELECT {R_COLUMNS} FROM record r WHERE r.tenant = :tenant AND r.body = :body ORDER BY r.id",
    opens=RECORD_CELLS,
    tolerant="all",
)
_PLACE_PACK = Sql(
    "UPDATE pack SET tree = :tree, key = :key, first = :first, last = :last WHERE tenant = :tenant AND pack = :pack"
)


def take_apart(
    tenant: int, tree: int, nodes: dict[int, Node], gone: Container[int]
) -> Generator[Batch, list[Rows], None]:
    """Before records go: take apart the packs that they share with others, or whose keyframe they are. The keyframe's
    text is what the others are proved with, also where it is not proved itself."""
    packs: dict[int, list[Node]] = {}
    for node in sorted(nodes.values()):
        if node.body is not None and node.body < 0:
            packs.setdefault(-node.body, []).append(node)
    for pack, members in packs.items():
        key = Counter(member.key for member in members).most_common(1)[0][0]
        for member in members:
            if member.key != key:  # it would be taken for a pack of its own, and drop this one
                [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=member.id))
                yield Batch(set_row(tenant, record_of(rows[0])._replace(key=key)))
        live = [member.id for member in members if member.id not in gone]
        if not live or (len(live) == len(members) and key not in gone and nodes[live[0]].base not in gone):
            continue
        key_text = yield from _key_text(tenant, tree, live)
        if key_text is not None:
            yield from dissolve_with(tenant, tree, pack, key_text, [member.id for member in members])


def _key_text(tenant: int, tree: int, live: list[int]) -> Generator[Batch, list[Rows], bytes | None]:
    for number in live:
        try:
            loaded = yield from read_state(tenant, tree, number)
        except CANNOT_READ:
            continue
        if loaded is not None:
            return loaded.key_data
    return None


def _is_sound(row: tuple[Any, ...]) -> bool:
    try:
        record_of(row)
    except Damaged:
        return False
    return True


def place_packs(tenant: int) -> Flow[Done]:
    """Where a pack belongs is said by its records, as far as their rows are sound."""
    done = Done()
    after: int | None = -1
    while after is not None:
        after, placed = yield from write(partial(_place_some, tenant, after))
        if placed:
            done.mended.append(("(store)", None, f"{placed} packs are where their checkpoints look for them again"))
    return done


def _place_some(tenant: int, after: int) -> Program[tuple[int | None, int]]:
    [rows] = yield Batch(_ODD_PACKS(tenant=tenant, after=after, limit=_PAGE))
    placed = 0
    for pack, *place in rows:
        [found] = yield Batch(_MEMBERS(tenant=tenant, body=-pack))
        sound = [record_of(row) for row in found if _is_sound(row)]
        where = {(record.tree, record.key) for record in sound}
        if len(where) == 1:
            tree, key = where.pop()
            wanted = [tree, key, sound[0].id, sound[-1].id]
            if wanted != place:
                names = ("tree", "key", "first", "last")
                yield Batch(_PLACE_PACK(tenant=tenant, pack=pack, **dict(zip(names, wanted, strict=True))))
                placed += 1
    return (rows[-1][0] if len(rows) == _PAGE else None), placed
