"""Compressing cold keyframes again, with more effort than a save could take: a part of compaction.

A keyframe's bytes change, its text does not, so no hash changes and nothing that was built on it needs to be touched.
How far this has come is kept in the store, so that the next time only what is new is looked at.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from perdure.errors import Undecodable
from perdure.storage.columns import FULL_TEXT
from perdure.storage.program import Batch, Flow, Program, Sql, aside, maintain, read, write
from perdure.values.compress import compress_hard, decompress_full

_BODIES = Sql(
    """SELECT b.id, r.tree, r.id, r.size, b.full_text FROM record r
    JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.keyframe = 1 AND b.id > :after ORDER BY b.id LIMIT :limit""",
    opens={4: FULL_TEXT},
    tolerant=True,
)
# Only while the body is still this record's: SQLite may reuse the number of a body that was removed.
_SET = Sql(
    """UPDATE body SET full_text = :full_text WHERE tenant = :tenant AND id = :id AND EXISTS (SELECT 1 FROM record r
        WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = :record AND r.body = :id AND r.keyframe = 1)
    RETURNING id""",
    seals={"full_text": FULL_TEXT},
)
_GET_MARK = Sql("SELECT value FROM meta WHERE key = :key")
_SET_MARK = Sql("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = :value")
_PAGE = 8


class _Body(NamedTuple):
    id: int
    tree: int
    record: int
    size: int
    full: bytes


def recompress(tenant: int) -> Flow[int]:
    """Compress the keyframes that are new since the last time again. How many bytes that saved."""
    key = f"recompressed {tenant}"
    after = yield from read(partial(_start, tenant, key))
    saved = 0
    while True:
        bodies = yield from read(partial(_bodies, tenant, after))
        for body in bodies:
            after = body.id
            packed = yield from aside(partial(_packed, body))
            if packed is not None:
                changed = yield from write(partial(_store, tenant, body, packed), solo=True)
                saved += len(body.full) - len(packed) if changed else 0
        yield from write(partial(_mark, tenant, key, after), solo=True)
        if len(bodies) < _PAGE:
            return saved


def _start(tenant: int, key: str) -> Program[int]:
    """How far the last time came."""
    [rows] = yield Batch(_GET_MARK(tenant=tenant, key=key), last=True)
    return int(rows[0][0]) if rows and str(rows[0][0]).isdigit() else 0


def _bodies(tenant: int, after: int) -> Program[list[_Body]]:
    [rows] = yield Batch(_BODIES(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [_Body._make(row) for row in rows]


def _packed(body: _Body) -> bytes | None:
    """The text compressed with more effort; None if that is not smaller, or if it is damaged: that is verify's."""
    try:
        packed = compress_hard(decompress_full(body.full, body.size))
    except (Undecodable, TypeError):
        return None
    return packed if len(packed) < len(body.full) else None


def _store(tenant: int, body: _Body, packed: bytes) -> Program[bool]:
    this = {"tenant": tenant, "tree": body.tree, "record": body.record}
    [rows] = yield Batch(_SET(**this, id=body.id, full_text=packed), last=True)
    return bool(rows)


def _mark(tenant: int, key: str, after: int) -> Program[None]:
    yield Batch(_SET_MARK(tenant=tenant, key=key, value=str(after)), last=True)


def reclaim() -> Flow[None]:
    """Give space that nothing uses any more back to the file system."""
    yield from maintain("reclaim")
