"""Encode a chain of differences again when some of its records are removed.

Part of the transaction that removes records. A live record that loses its base becomes a keyframe, and records that are
built on it are encoded with its text. Every state is checked against its hash before its encoding is replaced. Records
that are not built on a removed one stay as they are. No hash changes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import NamedTuple

from perdure.errors import Damaged
from perdure.log.gc_plan import Node
from perdure.log.history_walk import Stretch, read_stretch
from perdure.log.ids import show_id
from perdure.log.keyframes import difference_cost
from perdure.log.tables import DIFF, FULL_TEXT
from perdure.storage.program import Batch, Rows, Sql, Statement, as_subprogram
from perdure.values.compress import compress_full
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary
from perdure.values.diff import find, inserted_bytes

_BATCH = 50
_RECORD = "base = :base, keyframe = :keyframe, key = :key, cost = :cost"
_THIS = "record.tenant = :tenant AND record.tree = :tree AND record.id = :id"
_SET = Sql(
    sqlite=(
        "UPDATE body SET diff = :diff, full_text = :full_text WHERE tenant = :tenant AND id = :body",
        f"UPDATE record SET {_RECORD} WHERE {_THIS}",
    ),
    postgres=f"""WITH b AS (
        UPDATE body SET diff = :diff, full_text = :full_text WHERE tenant = :tenant AND id = :body)
        UPDATE record SET {_RECORD} WHERE {_THIS}""",
    seals={"diff": DIFF, "full_text": FULL_TEXT},
)


class _Placed(NamedTuple):
    """A record's position in its new chain."""

    key: int
    dictionary: Dictionary
    cost: int


def built_on(nodes: Mapping[int, Node], moving: Collection[int], live: Collection[int]) -> set[int]:
    """Return the live records that must be encoded again when some records move or are removed. Pure.

    These are the moving ones, and all that are built on them up to the next keyframe."""
    followers: dict[int, list[int]] = {}
    for node in nodes.values():
        if node.base is not None and not node.keyframe:
            followers.setdefault(node.base, []).append(node.id)
    reached: set[int] = set()
    ahead = list(moving)
    while ahead:
        record = ahead.pop()
        if record not in reached:
            reached.add(record)
            ahead += followers.get(record, ())
    return {record for record in reached if record in live and not nodes[record].keyframe}


def rewrite_chain(
    tenant: int, tree: int, key: int, nodes: Mapping[int, Node], live: Collection[int], rewritten: Collection[int]
) -> Generator[Batch, list[Rows], None]:
    """Encode again those records of a chain that are in `rewritten`, line by line from the keyframe on."""
    members = {record for record in rewritten if nodes[record].key == key}
    stretches: list[Stretch] = []
    for leaf in sorted(members - {nodes[member].base for member in members}):
        stretch = yield from as_subprogram(read_stretch(tenant, tree, leaf))
        if stretch is None:
            raise Damaged(f"checkpoint {show_id(leaf)} has lost its body", checkpoints=(show_id(leaf),))
        stretches.append(stretch)
    placed: dict[int, _Placed] = {}
    for stretch in stretches:  # oldest leaf first: a newer one only adds the records after their fork
        statements = _rewrite_line(tenant, tree, stretch, nodes, members, live, placed)
        for start in range(0, len(statements), _BATCH):
            yield Batch(*statements[start : start + _BATCH])


def _rewrite_line(
    tenant: int,
    tree: int,
    stretch: Stretch,
    nodes: Mapping[int, Node],
    members: Collection[int],
    live: Collection[int],
    placed: dict[int, _Placed],
) -> list[Statement]:
    statements: list[Statement] = []
    encoder: Encoder | None = None  # its stream ends in the previous record
    before, dictionary = b"", Dictionary(b"")
    for link, text, _ in stretch.forward(members):
        number, base = link.record.id, link.record.base
        if link.record.keyframe:
            dictionary = Dictionary(text)
        if number not in members:
            if number in live:  # not rewritten
                placed[number] = _Placed(link.record.key, dictionary, link.record.cost)
            encoder = None
        elif number not in placed:
            diff, full = None, None
            if base is not None and base in placed:
                follows = placed[base]
                encoder = encoder or Encoder(follows.dictionary)
                splices = find(before, text)
                diff = encoder.encode(splices)
                cost = follows.cost + difference_cost(len(diff), inserted_bytes(splices), len(splices) // 3)
                placed[number] = follows._replace(cost=cost)
            else:
                full, encoder = compress_full(text), None
                placed[number] = _Placed(number, Dictionary(text), 0)
            params = {"tenant": tenant, "tree": tree, "id": number, "diff": diff, "full_text": full}
            params |= {"base": base if full is None else None, "keyframe": int(full is not None)}
            params |= {"key": placed[number].key, "cost": placed[number].cost}
            statements.append(_SET(**params, body=nodes[number].body))
        else:
            encoder = None
        before = text
    return statements
