"""Verification of memory: hashes and words of versions, the order of each key's versions, counters of namespaces.

A namespace is checked in one read transaction, so that its counters belong to its rows.
"""

from __future__ import annotations

from functools import partial

from perdure.errors import Damaged, PerdureError
from perdure.memory.labels import labels_of, unescaped
from perdure.memory.models import indexed
from perdure.memory.rows import OPENS, ROW_COLUMNS, SEQUENCE_BITS, ItemRow
from perdure.memory.scopes import searcher_of
from perdure.memory.tables import ITEM_WORDS
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, check, read
from perdure.threads.context import StoreContext

_PAGE = 1000
_SPACES = Sql("SELECT space FROM memory_space WHERE tenant = :tenant ORDER BY space")
_SPACE = Sql("SELECT path, last, items, bytes FROM memory_space WHERE tenant = :tenant AND space = :space")
_ITEMS = Sql(
    f"""SELECT {ROW_COLUMNS}, words FROM memory_item WHERE tenant = :tenant AND space = :space AND id > :after
    ORDER BY id LIMIT :limit""",
    opens=OPENS | {14: ITEM_WORDS.at(0)},
    tolerant=True,
)
_VERSIONS = Sql("SELECT count(*) FROM memory_item WHERE tenant = :tenant")
_ORPHANS = Sql(
    """SELECT count(*) FROM memory_item i WHERE i.tenant = :tenant
    AND NOT EXISTS (SELECT 1 FROM memory_space s WHERE s.tenant = i.tenant AND s.space = i.space)"""
)
_OF_NO_VERSION = """FROM memory_vector AS v WHERE v.tenant = :tenant
    AND NOT EXISTS (SELECT 1 FROM memory_item i WHERE i.tenant = v.tenant AND i.id = v.id)"""
_LOOSE = Sql(f"SELECT count(*) {_OF_NO_VERSION}")
_DROP_LOOSE = Sql(f"DELETE {_OF_NO_VERSION} RETURNING 1")


def verify_memory(ctx: StoreContext, tenant: int) -> Flow[tuple[int, list[tuple[str, str]]]]:
    """Check all namespaces of a tenant. Return the number of versions, and problems as (namespace, sentence)."""
    spaces, orphans, loose, [(versions,)] = yield from read(partial(_survey, tenant))
    problems: list[tuple[str, str]] = []
    for (space,) in spaces:
        try:
            problems += yield from check(partial(_verify_space, ctx, tenant, space))
        except Damaged as error:
            problems.append(("", str(error)))
    for [(count,)], problem in ((orphans, "versions belong to no namespace"), (loose, "vectors belong to no version")):
        if count:
            problems.append(("", f"{count} {problem}"))
    return versions, problems


def drop_loose_vectors(tenant: int) -> Program[int]:
    """Delete the vectors that belong to no version. Return their number."""
    [rows] = yield Batch(_DROP_LOOSE(tenant=tenant))
    return len(rows)


def _survey(tenant: int) -> Program[list[Rows]]:
    return (yield Batch(*(sql(tenant=tenant) for sql in (_SPACES, _ORPHANS, _LOOSE, _VERSIONS))))


def _verify_space(ctx: StoreContext, tenant: int, space: int) -> Program[list[tuple[str, str]]]:
    [spaces] = yield Batch(_SPACE(tenant=tenant, space=space))
    if not spaces:
        return []
    path, last, items, size = spaces[0]
    problems: list[str] = []
    newest: dict[str, ItemRow] = {}
    after = 0
    while page := (yield Batch(_ITEMS(tenant=tenant, space=space, after=after, limit=_PAGE)))[0]:
        after = page[-1][0]
        for *stored, packed in page:
            row = ItemRow._make((*stored, path))
            problems += _check_row(ctx, row, packed, newest.get(row.key))
            newest[row.key] = row
    ended = [row for row in newest.values() if row.ended_at is not None]
    problems += [f"the newest version of {unescaped(row.key)!r} has ended" for row in ended]
    sizes = [row.bytes for row in newest.values() if row.gone is None and not row.pinned]
    if after and after - (space << SEQUENCE_BITS) > last:
        problems.append(f"its newest number is {after - (space << SEQUENCE_BITS)}, and its counter says {last}")
    if (len(sizes), sum(sizes)) != (items, size):
        problems.append(
            f"it holds {len(sizes)} items of {sum(sizes)} bytes that are not pinned, and its counters say {items} of "
            f"{size}"
        )
    return [("/".join(labels_of(path)), problem) for problem in problems]


def _check_row(ctx: StoreContext, row: ItemRow, packed: object, before: ItemRow | None) -> list[str]:
    subject = f"version {row.version} of {unescaped(str(row.key))!r}"
    if type(row.body) is not bytes:  # its hash did not match
        return [f"{subject} was changed, or cannot be read"]
    problems = []
    if before is not None and (row.version != before.version + 1 or before.ended_at != row.at):
        problems.append(f"{subject} does not follow version {before.version}")
    if row.gone is not None:
        return problems
    if row.bytes != len(row.body):
        problems.append(f"{subject} has {len(row.body)} bytes, and its row says {row.bytes}")
    try:
        text, words = indexed(row.content(), row.key, ctx.codec), searcher_of(ctx).words
        # A search cuts again what another analyzer has packed.
        if not isinstance(packed, bytes) or (words.has_packed(packed) and packed != words.pack(text)):
            problems.append(f"the words of {subject} are not those of its text: search may not find it")
    except PerdureError as error:
        problems.append(f"{subject} cannot be read: {error}")
    return problems
