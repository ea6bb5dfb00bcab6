"""Which packs a line consists of, without reading the rows of the records in them.

A pack is a piece of one line: its records follow each other. So if the first record of a pack is built on the last of
another, all of that one lies on the line too. Where a line leaves a pack in its middle, or records that are in no pack
lie between, the records' rows are followed (`reading.py`). Nothing here is checked: the state's hash tells.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from perdure.log.keyframes import RECORD_COST_BYTES
from perdure.log.packs import MEMBERS_MAX, PACK, Packs
from perdure.log.records import Record
from perdure.storage import cells
from perdure.storage.program import Batch, Rows, Sql, Statement, one_row

_LINKS_MAX = 1000
# What reading a chain costs (`keyframes.py`) that is likely to take more than one pack.
_LONG_COST = MEMBERS_MAX * 2 * RECORD_COST_BYTES
# A pack, how many of its records there are up to one of them, and what its first record is built on.
_OWN = Sql(
    """SELECT p.pack, p.data, (SELECT count(*) FROM record o WHERE o.tenant = p.tenant AND o.tree = p.tree
        AND o.id >= p.first AND o.id <= :id AND o.body = -p.pack),
        (SELECT f.base FROM record f WHERE f.tenant = p.tenant AND f.tree = p.tree AND f.id = p.first)
    FROM pack p WHERE p.tenant = :tenant AND p.pack = :pack""",
    opens={1: cells.PACK},
    tolerant=True,
)
_BODY = Sql("SELECT body FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id AND body < 0")
# The older packs of a chain, and what the first record of each is built on.
_LINKS = Sql(
    """SELECT p.pack, p.last, f.base
    FROM pack p JOIN record f ON f.tenant = p.tenant AND f.tree = p.tree AND f.id = p.first
    WHERE p.tenant = :tenant AND p.tree = :tree AND p.key = :key AND p.first <= :id
    ORDER BY p.first DESC LIMIT :limit"""
)


class PackedLine(NamedTuple):
    """The packs from the keyframe to a record, and how many records of each lie on the way (None: all)."""

    pieces: list[tuple[int, int | None]]
    packs: Packs


def line_statements(tenant: int, record: Record) -> list[Statement]:
    """What `packed_line` needs to know first of a record that is in a pack: the pack, and if others are likely to come
    before it, which these are."""
    this = {"tenant": tenant, "id": record.id}
    own = _OWN(**this, pack=-(record.body or 0))
    if record.cost < _LONG_COST:
        return [own]
    return [own, _LINKS(**this, tree=record.tree, key=record.key, limit=_LINKS_MAX)]


def line_to(tenant: int, tree: int, key: int, record: int) -> Generator[Batch, list[Rows], PackedLine | None]:
    """The packs that lead to a record. None: it is in no pack, or it takes the records' rows to tell."""
    [bodies] = yield Batch(_BODY(tenant=tenant, tree=tree, id=record))
    if not bodies:
        return None
    this = {"tenant": tenant, "id": record}
    answers = yield Batch(_OWN(**this, pack=-bodies[0][0]), _LINKS(**this, tree=tree, key=key, limit=_LINKS_MAX))
    return (yield from packed_line(tenant, tree, key, *answers))


def packed_line(
    tenant: int, tree: int, key: int, own: Rows, links: Rows | None = None
) -> Generator[Batch, list[Rows], PackedLine | None]:
    """The same for a record of which `line_statements` have answered."""
    row = one_row(own)
    if row is None:
        return None
    pack, data, number, base = row
    packs: Rows = [(pack, data)]
    pieces: list[tuple[int, int | None]] = [(pack, number)]
    if base != key:
        if links is None:
            [links] = yield Batch(_LINKS(tenant=tenant, tree=tree, key=key, id=base, limit=_LINKS_MAX))
        older = _older(key, links, base)
        if older is None:
            return None
        found = yield Batch(*(PACK(tenant=tenant, pack=number) for number in older))
        packs += [row for rows in found for row in rows]
        pieces = [*((number, None) for number in older), *pieces]
    return PackedLine(pieces, Packs(packs))


def _older(key: int, links: Rows, wanted: int | None) -> list[int] | None:
    """The packs from the keyframe to a record that is the last of one, oldest first."""
    ends = {last: (pack, base) for pack, last, base in links}
    found: list[int] = []
    while wanted != key:
        link = ends.pop(wanted, None)  # each once: damaged pointers must not lead in circles
        if link is None:
            return None
        pack, wanted = link
        found.append(pack)
    found.reverse()
    return found
