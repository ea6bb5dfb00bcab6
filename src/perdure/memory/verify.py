"""Checks memory: the hash of every version, its words, the order of its key's versions, the counters of its namespace.

One namespace is one read transaction, so that its counters are those of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from perdure.errors import Damaged, PerdureError
from perdure.memory import words
from perdure.memory.flows import text_of
from perdure.memory.labels import labels_of, unescaped
from perdure.memory.rows import OPENS, ROW_COLUMNS, SEQUENCE_BITS, ItemRow
from perdure.storage.columns import ITEM_WORDS
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, check, read
from perdure.values.registry import Codec

_PAGE = 1000
_SPACES = Sql("SELECT space FROM memory_space WHERE tenant = :tenant ORDER BY space")
_SPACE = Sql("SELECT path, last, items, bytes FROM memory_space WHERE tenant = :tenant AND space = :space")
_ITEMS = Sql(
    f"""SELECT {ROW_COLUMNS}, words FROM memory_item WHERE tenant = :tenant AND space = :space AND id > :after
    ORDER BY id LIMIT :limit""",
    opens=OPENS | {14: ITEM_WORDS.at(0)},
    tolerant="all",
)
_ORPHANS = Sql(
    """SELECT count(*) FROM memory_item i WHERE i.tenant = :tenant
    AND NOT EXISTS (SELECT 1 FROM memory_space s WHERE s.tenant = i.tenant AND s.space = i.space)"""
)
_LOOSE = Sql(
    """SELECT count(*) FROM memory_vector v WHERE v.tenant = :tenant
    AND NOT EXISTS (SELECT 1 FROM memory_item i WHERE i.tenant = v.tenant AND i.id = v.id)"""
)


class Found(NamedTuple):
    """How many versions were checked, and what is wrong: the namespace, and a sentence."""

    versions: int
    problems: list[tuple[str, str]]


def verify_memory(tenant: int, codec: Codec) -> Flow[Found]:
    """Check all namespaces of a tenant."""
    versions = 0
    problems: list[tuple[str, str]] = []
    spaces, orphans, loose = yield from read(partial(_survey, tenant))
    for space in spaces:
        try:
            found = yield from check(partial(_verify_space, tenant, space, codec))
        except Damaged as error:
            found = Found(0, [("", str(error))])
        versions, problems = versions + found.versions, problems + found.problems
    if orphans:
        problems.append(("", f"{orphans} versions belong to no namespace"))
    if loose:
        problems.append(("", f"{loose} vectors belong to no version"))
    return Found(versions, problems)


def _survey(tenant: int) -> Program[tuple[list[int], int, int]]:
    spaces, orphans, loose = yield Batch(_SPACES(tenant=tenant), _ORPHANS(tenant=tenant), _LOOSE(tenant=tenant))
    return [space for (space,) in spaces], int(orphans[0][0]), int(loose[0][0])


def _verify_space(tenant: int, space: int, codec: Codec) -> Program[Found]:
    [found] = yield Batch(_SPACE(tenant=tenant, space=space))
    if not found:
        return Found(0, [])
    path, last, items, size = found[0]
    name = "/".join(labels_of(path))
    problems: list[str] = []
    newest: dict[str, ItemRow] = {}
    count = after = there = there_bytes = 0
    while page := (yield Batch(_ITEMS(tenant=tenant, space=space, after=after, limit=_PAGE)))[0]:
        after = page[-1][0]
        count += len(page)
        for row, packed in _rows(page, path):
            problems += _check_row(row, packed, newest.get(row.key), codec)
            newest[row.key] = row
    for row in newest.values():
        if row.ended_at is not None:
            problems.append(f"the newest version of {unescaped(row.key)!r} has ended")
        if row.gone is None:
            there, there_bytes = there + 1, there_bytes + row.bytes
    if after and after - (space << SEQUENCE_BITS) > last:
        problems.append(f"its newest number is {after - (space << SEQUENCE_BITS)}, and its counter says {last}")
    if (there, there_bytes) != (items, size):
        problems.append(f"it holds {there} items of {there_bytes} bytes, and its counters say {items} of {size}")
    return Found(count, [(name, problem) for problem in problems])


def _rows(page: Rows, path: str) -> Iterator[tuple[ItemRow, object]]:
    for row in page:
        yield ItemRow._make((*row[:14], path)), row[14]


def _check_row(row: ItemRow, packed: object, before: ItemRow | None, codec: Codec) -> list[str]:
    what = f"version {row.version} of {unescaped(str(row.key))!r}"
    if type(row.body) is not bytes:  # it did not have its hash
        return [f"{what} was changed, or cannot be read"]
    problems = []
    if before is not None and (row.version != before.version + 1 or before.ended_at != row.at):
        problems.append(f"{what} does not follow version {before.version}")
    if row.gone is not None:
        return problems
    if row.bytes != len(row.body):
        problems.append(f"{what} has {len(row.body)} bytes, and its row says {row.bytes}")
    try:
        content = row.content()
        text = content.text if content.text is not None else text_of(content.value, codec)
    except PerdureError as error:
        return [*problems, f"{what} cannot be read: {error}"]
    if packed != words.pack(text, content.context):
        problems.append(f"the words of {what} are not those of its text: search may not find it")
    return problems
