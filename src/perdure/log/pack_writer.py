"""Writing packs: up to 64 cold differences of a chain in one row, compressed as one. A part of compaction.

The differences of a chain are one compressed stream, in which each needs those before it. So a chain is packed in one
transaction: groups of its records become packs, and what stays in bodies of its own gets differences that need no
stream. Writers that hold a stream of the chain in memory are told first, by the generation of their threads, to start
a new one. No hash changes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from itertools import chain as chain_of
from typing import NamedTuple

import orjson

from perdure.errors import Damaged, Undecodable
from perdure.log.pack_plan import GROUP_MIN, PackNode, group, members_max
from perdure.log.packs import Member, make_pack, packed_mark, prefix_of, salts_in, splices_in
from perdure.log.reading import read_chain, read_state
from perdure.log.records import SALT_BYTES, each
from perdure.log.thread_table import MINUTE_US, ThreadRow, next_generation, threads_in_tree
from perdure.storage.columns import DIFF, PACK, SALT
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, aside, read, write
from perdure.values.delta import Decoder, Encoder, goes_on, pack_splices
from perdure.values.dictionary import Dictionary

_PAGE = 100

_TREES = Sql(
    """SELECT DISTINCT tree FROM thread WHERE tenant = :tenant AND active >= :since AND tree > :after
    ORDER BY tree LIMIT :limit"""
)
# Chains in which something is not packed yet, and when each was last written to.
_CHAINS = Sql(
    """SELECT key FROM record r
    WHERE tenant = :tenant AND tree = :tree AND keyframe = 0 AND body IS NOT NULL
    GROUP BY key HAVING max(at) < :cold AND max(body) > 0 AND count(*) >= :least ORDER BY key"""
)
_NODES = Sql(
    """SELECT r.id, r.base, r.keyframe, r.body, length(b.diff), r.thread
    FROM record r LEFT JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :key AND r.body IS NOT NULL
    AND (r.key = :key OR (r.keyframe = 1 AND r.base IN (SELECT o.id FROM record o
        WHERE o.tenant = :tenant AND o.tree = :tree AND o.id >= :key AND o.key = :key))) ORDER BY r.id"""
)
_SALTS = Sql(
    """SELECT r.id, b.salt, b.diff FROM record r JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :key AND r.key = :key AND r.keyframe = 0""",
    opens={1: SALT, 2: DIFF},
)
_KEPT_DIFF = Sql("SELECT salt, diff FROM body WHERE tenant = :tenant AND id = :body", opens={0: SALT, 1: DIFF})
_INSERT = Sql(
    """INSERT INTO pack (tenant, tree, key, first, last, data)
    VALUES (:tenant, :tree, :key, :first, :last, :data) RETURNING pack""",
    seals={"data": PACK},
)
_POINT = each(
    """UPDATE record SET body = -CAST(:pack AS bigint)
    WHERE tenant = :tenant AND tree = :tree AND id IN ({ids}) RETURNING id"""
)
_DROP_BODIES = each("DELETE FROM body WHERE tenant = :tenant AND id IN ({ids})")
_SET_DIFF = Sql(
    "UPDATE body SET diff = :diff WHERE tenant = :tenant AND id = :body RETURNING id",
    seals={"diff": DIFF},
)
_GET_MARK = Sql("SELECT value FROM meta WHERE key = :key")
_SET_MARK = Sql("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = :value")
_MOVE_MARK = Sql("UPDATE meta SET value = :value WHERE key = :key AND value = :since")
COLD_US = MINUTE_US  # a chain not written to for so long: its writer has mostly let go of the stream


class PackResult(NamedTuple):
    """What packing did."""

    records: int = 0
    packs: int = 0
    saved_bytes: int = 0

    def plus(self, other: PackResult) -> PackResult:
        return PackResult(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain as it was read, and its differences without the stream they were compressed in."""

    key: int
    key_text: bytes
    generations: dict[int, int]  # of all threads of the tree
    nodes: dict[int, PackNode]
    members: dict[int, Member]
    stored: dict[int, bytes]  # differences as they are stored, of what is not packed, and of the keyframes at its ends


class _Moved(Exception):
    """Another process rearranged the tree meanwhile: this chain is left for the next time."""


def pack_tenant(tenant: int, cold_before: int, progress: Progress | None = None) -> Flow[PackResult]:
    """Pack every chain that was not written to since `cold_before` (microseconds since 1970), among the threads that
    were active since the last time. `progress`: (done, of how many) trees of a page."""
    key = packed_mark(tenant)
    since = yield from write(partial(_mark, tenant, key, cold_before // MINUTE_US), solo=True)
    total, after, whole = PackResult(), 0, True
    while True:
        trees = yield from read(partial(_trees, tenant, since, after))
        for done, tree in enumerate(trees):
            after = tree
            packed, complete = yield from pack_tree(tenant, tree, cold_before)
            total, whole = total.plus(packed), whole and complete
            if progress is not None:
                progress(done + 1, len(trees))
        if len(trees) < _PAGE:
            break
    if whole:
        yield from write(partial(_move_mark, tenant, key, since, cold_before // MINUTE_US - 1), solo=True)
    return total


def pack_tree(tenant: int, tree: int, cold_before: int) -> Flow[tuple[PackResult, bool]]:
    """Pack the cold chains of one tree; and whether no writer got in the way."""
    total, complete = PackResult(), True
    keys = yield from read(partial(_chains, tenant, tree, cold_before))
    for key in keys:
        try:
            total = total.plus((yield from _pack_chain(tenant, tree, key)))
        except _Moved:
            complete = False
        except (Damaged, Undecodable):
            continue  # that is for verify and repair to say; the other chains are packed all the same
    return total, complete


def _pack_chain(tenant: int, tree: int, key: int) -> Flow[PackResult]:
    before, worth = yield from read(partial(_worth_packing, tenant, tree, key))
    if not worth:
        return PackResult()
    generations = yield from write(partial(_end_streams, tenant, tree, key), solo=True)
    chain = yield from read(partial(_read_chain, tenant, tree, key, generations))
    if [node.id for node in chain.nodes.values() if not node.keyframe] != before:
        return PackResult()  # it was just written to: its stream may continue
    packs, detached = yield from aside(partial(_pack, tenant, chain))
    return (yield from write(partial(_store, tenant, tree, chain, packs, detached), solo=True))


def _pack(tenant: int, chain: _Chain) -> tuple[list[tuple[list[int], bytes]], list[Statement]]:
    """The packs of a chain, each looked at before what it replaces goes; and what gives the records that stay in bodies
    of their own differences that need no stream."""
    packs, prefix = [], prefix_of(chain.key_text)
    sizes = {record: len(member.diff) for record, member in chain.members.items()}
    for group_ in group(chain.nodes, sizes, members_max(len(chain.key_text))):
        members = [chain.members[record] for record in group_]
        data = make_pack(members, chain.key_text)
        diffs = map(pack_splices, splices_in(data, prefix))
        if [*map(Member._make, zip(salts_in(data), diffs, strict=True))] != members:
            raise Damaged("a pack does not give back what was put into it")
        packs.append((group_, data))
    packed = {record for group_, _ in packs for record in group_}
    dictionary = Dictionary(chain.key_text)
    detached = []
    for record, old in chain.stored.items() if packs else ():
        if record not in packed and goes_on(old):
            [splices] = Decoder(dictionary).decode([chain.members[record].diff])
            diff = Encoder(dictionary).encode(splices)
            detached.append(_SET_DIFF(tenant=tenant, body=chain.nodes[record].body, diff=diff))
    return packs, detached


# --- programs


def _mark(tenant: int, key: str, cold: int) -> Program[int]:
    """How far the last time came; 0 if that is not known, or by a clock that was ahead. Makes sure that it is written
    down: taking packs apart removes it, which must be seen at the end."""
    [rows] = yield Batch(_GET_MARK(tenant=tenant, key=key))
    found = int(rows[0][0]) if rows and str(rows[0][0]).isdigit() else -1
    if not 0 <= found <= cold:
        found = 0
        yield Batch(_SET_MARK(tenant=tenant, key=key, value="0"))
    return found


def _move_mark(tenant: int, key: str, since: int, minute: int) -> Program[None]:
    yield Batch(_MOVE_MARK(tenant=tenant, key=key, since=str(since), value=str(max(0, minute))), last=True)


def _trees(tenant: int, since: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_TREES(tenant=tenant, since=since, after=after, limit=_PAGE), last=True)
    return [tree for (tree,) in rows]


def _chains(tenant: int, tree: int, cold: int) -> Program[list[int]]:
    [rows] = yield Batch(_CHAINS(tenant=tenant, tree=tree, cold=cold, least=GROUP_MIN), last=True)
    return [key for (key,) in rows]


def _worth_packing(tenant: int, tree: int, key: int) -> Program[tuple[list[int], bool]]:
    """The records of a chain, and whether packing them would change anything."""
    [rows] = yield Batch(_NODES(tenant=tenant, tree=tree, key=key))
    nodes = _nodes(rows)
    sizes = {node.id: node.size or 0 for node in nodes.values()}
    return [node.id for node in nodes.values() if not node.keyframe], bool(group(nodes, sizes))


def _nodes(rows: Rows) -> dict[int, PackNode]:
    for row in rows:
        if not all(type(part) is int or (part is None and at in (1, 4)) for at, part in enumerate(row)):
            raise Damaged("the row of a record is damaged")
    return {row[0]: PackNode._make(row) for row in rows}


def _end_streams(tenant: int, tree: int, key: int) -> Program[dict[int, int]]:
    """Let no writer continue a stream of the chain that was begun before. Returns the generations of the threads."""
    yield from threads_in_tree(tenant, tree, lock=True)
    [rows] = yield Batch(_NODES(tenant=tenant, tree=tree, key=key))
    yield Batch(next_generation(tenant, {node.thread for node in _nodes(rows).values()}))
    return _generations((yield from threads_in_tree(tenant, tree)))


def _generations(threads: list[ThreadRow]) -> dict[int, int]:
    return {row.thread: row.generation for row in threads}


def _read_chain(tenant: int, tree: int, key: int, generations: dict[int, int]) -> Program[_Chain]:
    threads = yield from threads_in_tree(tenant, tree)
    keyframe = yield from read_state(tenant, tree, key)
    if keyframe is None or not threads or _generations(threads) != generations:
        raise _Moved
    [rows] = yield Batch(_NODES(tenant=tenant, tree=tree, key=key))
    nodes = _nodes(rows)
    [rows] = yield Batch(_SALTS(tenant=tenant, tree=tree, key=key))
    salts: dict[int, bytes] = {}
    chain = _Chain(key, keyframe.data, generations, nodes, {}, {})
    for record, salt, diff in rows:
        if type(salt) is not bytes or type(diff) is not bytes or len(salt) != SALT_BYTES:
            raise Damaged("a body is damaged")
        salts[record], chain.stored[record] = salt, diff
    bases = {node.base for node in nodes.values() if not node.keyframe}
    for node in nodes.values():
        if node.keyframe or node.id not in bases:
            yield from _unpack_line(tenant, tree, node, chain, salts)
    return chain


def _unpack_line(
    tenant: int, tree: int, end: PackNode, chain: _Chain, salts: dict[int, bytes]
) -> Generator[Batch, list[Rows], None]:
    """The differences from the keyframe to the end of a line, each for itself."""
    tip = end.base if end.keyframe and end.base is not None else end.id
    found = yield from read_chain(tenant, tree, tip)
    if found is None:
        raise Damaged("a chain is broken")
    salts = salts | found.packed_salts()
    ids, more = list(found.ids), list[bytes]()
    if end.keyframe and end.size is not None:
        [rows] = yield Batch(_KEPT_DIFF(tenant=tenant, body=end.body))
        if not rows or type(rows[0][1]) is not bytes:
            raise Damaged("a keyframe has lost its difference")
        [(salts[end.id], chain.stored[end.id])] = rows
        ids, more = [*ids, end.id], [chain.stored[end.id]]
    differences = chain_of.from_iterable(found.batches(chain.key_text, *more))
    for record, splices in zip(ids, differences, strict=True):
        if record not in salts:
            raise Damaged("a record stands in a chain that is not its own")
        if record not in chain.members:
            chain.members[record] = Member(salts[record], pack_splices(splices))


def _store(
    tenant: int, tree: int, chain: _Chain, packs: list[tuple[list[int], bytes]], detached: list[Statement]
) -> Program[PackResult]:
    threads = yield from threads_in_tree(tenant, tree, lock=True)
    if not threads or _generations(threads) != chain.generations:
        raise _Moved
    if detached and not all((yield Batch(*detached))):
        raise _Moved
    total = PackResult()
    for group_, data in packs:
        this = {"tenant": tenant, "tree": tree}
        [[(pack,)]] = yield Batch(_INSERT(**this, key=chain.key, first=group_[0], last=group_[-1], data=data))
        pointed, _ = yield Batch(
            _POINT(**this, pack=pack, ids=orjson.dumps(group_).decode()),
            _DROP_BODIES(tenant=tenant, ids=orjson.dumps([chain.nodes[record].body for record in group_]).decode()),
        )
        if len(pointed) != len(group_):
            raise _Moved
        before = sum((chain.nodes[record].size or 0) + SALT_BYTES for record in group_)
        total = total.plus(PackResult(len(group_), 1, before - len(data)))
    return total
