"""Find the ancestor of a record at a position of its line, without following every parent.

A record's `step` is its position. Some records have `skip`, the id of an ancestor far behind: every 128th that of the
128th before, and the last of every 4,096 that of the first of them. So the ancestor at any position of a line of
100,000 is some 350 rows away. `skip` is never required: a record without one is left by its parent.
"""

from __future__ import annotations

from typing import Any

import orjson

from perdure.log.records import COLUMNS, ERASED, RECORD_ENCRYPTED, Record, record_of
from perdure.storage.program import Batch, Program, Sql, one_row

_NEAR, _FAR = 128, 4096
_WALKED_MAX = 10_000  # of a longer line only every 128th record is looked at

# From the first of 4,096 the parent leads to a longer skip than its own.
_TO_STEP = f"""CASE WHEN r.skip IS NULL OR (r.step % {_FAR} = 0 AND r.step - {_FAR} >= :step) THEN r.parent
    WHEN r.step - CASE r.step % {_NEAR} WHEN 0 THEN {_NEAR} ELSE {_FAR - 1} END >= :step THEN r.skip
    ELSE r.parent END"""
_BY_PARENT = "r.parent"
_TO_SAMPLE = f"CASE WHEN r.step % {_NEAR} = 0 AND r.skip IS NOT NULL THEN r.skip ELSE r.parent END"
_OF_TREE = "r.tenant = :tenant AND r.tree = :tree AND r.id ="


def _walk(following: str, goes_on: str, result: str, **options: Any) -> Sql:
    """Return SQL that follows a line from the record :id on. `following`: the id that comes after a record `r`.

    Ids shrink along the way, so damaged pointers form no circle. Each row is looked up by its key: PostgreSQL would
    read the whole tree if its statistics are old, and SQLite at a snapshot, where `record` is a union."""
    text = f"""WITH RECURSIVE line (id, step, following) AS (
        SELECT r.id, r.step, {following} FROM record r WHERE {_OF_TREE} :id
        UNION ALL
        SELECT {{step}})
    SELECT {result}"""
    by_key = f"FROM record r WHERE {_OF_TREE} l.following"
    values = f"l.following, (SELECT r.step {by_key}), (SELECT {following} {by_key})"
    return Sql(
        sqlite=text.format(
            step=f"{values} FROM line l WHERE l.following < l.id AND EXISTS (SELECT 1 {by_key} AND {goes_on})"
        ),
        postgres=text.format(
            step=f"r.id, r.step, {following} FROM line l CROSS JOIN LATERAL (SELECT * {by_key} OFFSET 0) r "
            f"WHERE l.following < l.id AND {goes_on}"
        ),
        **options,
    )


def _ancestor(following: str) -> Sql:
    result = f"{COLUMNS} FROM record r WHERE {_OF_TREE} (SELECT l.id FROM line l WHERE l.step = :step)"
    return _walk(following, "l.step > :step", result, opens=RECORD_ENCRYPTED, tolerant=True)


# The line continues behind erased records, and ends at other tombstones.
_IS_LIVE = f"(r.body IS NOT NULL OR r.keyframe = {ERASED})"


_BY_SKIPS, _BY_PARENTS = _ancestor(_TO_STEP), _ancestor(_BY_PARENT)
_EVERY, _SAMPLES = (_walk(by, _IS_LIVE, "id, step FROM line") for by in (_BY_PARENT, _TO_SAMPLE))
_RECORDS = Sql(
    f"""SELECT {COLUMNS} FROM record r WHERE tenant = :tenant AND tree = :tree AND id IN {{numbers:ids}}
        AND body IS NOT NULL ORDER BY id""",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)


_BEFORE = _walk(
    _BY_PARENT,
    "l.id >= :cut",
    f"{COLUMNS} FROM record r WHERE {_OF_TREE} (SELECT min(l.id) FROM line l)",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)


def skip_length(step: int) -> int:
    """Return how many steps the `skip` of the record at a step goes back, or 0 if it has none."""
    if step % _NEAR == 0 and step:
        return _NEAR
    return _FAR - 1 if step % _FAR == _FAR - 1 else 0


def find_ancestor(tenant: int, tree: int, record: int, step: int) -> Program[Record | None]:
    """Return the record at a step of the line that ends in `record`, or None if it was removed or never was there."""
    key = {"tenant": tenant, "tree": tree, "id": record, "step": step}
    [rows] = yield Batch(_BY_SKIPS(**key))
    if not rows:  # a repair may have removed a record that a skip names
        [rows] = yield Batch(_BY_PARENTS(**key))
    row = one_row(rows)
    return record_of(row) if row is not None else None


def find_before(tenant: int, tree: int, record: int, cut: int) -> Program[Record | None]:
    """Return the newest record of the line that ends in `record` with an id below `cut`.

    If there is none, return the oldest one that is left of the line, which may be a tombstone."""
    [rows] = yield Batch(_BEFORE(tenant=tenant, tree=tree, id=record, cut=cut))
    row = one_row(rows)
    return record_of(row) if row is not None else None


def sample_line(tenant: int, tree: int, head: Record, points: int) -> Program[list[Record]]:
    """Return at most `points` records of the line that ends in `head`, oldest first, about evenly apart.

    The head and the oldest record that is left are among them."""
    key = {"tenant": tenant, "tree": tree, "id": head.id}
    line: list[tuple[int, int]] = []
    if head.step > _WALKED_MAX:
        [rows] = yield Batch(_SAMPLES(**key))
        line = sorted((id_, step) for id_, step in rows)
    if not line or head.step - line[0][1] <= _WALKED_MAX:  # a short line, or one that was pruned to be short
        [rows] = yield Batch(_EVERY(**key))
        line = sorted((id_, step) for id_, step in rows)
    else:
        line = [line[0], *(one for one in line[1:-1] if one[1] % _NEAR == 0), line[-1]]
    last = len(line) - 1
    chosen = {line[round(place * last / (points - 1))][0] for place in range(points)} if last >= 0 else set()
    [rows] = yield Batch(_RECORDS(tenant=tenant, tree=tree, ids=orjson.dumps(sorted(chosen)).decode()), last=True)
    return [record_of(row) for row in rows]
