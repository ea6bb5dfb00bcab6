"""What stands beside the states of a thread's lines: its namespaces, and what is attached to a checkpoint.

For the command line, which needs no adapter. One read transaction each.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from perdure.errors import Damaged
from perdure.log.ids import parse_id, show_id
from perdure.log.label_ids import pack_id
from perdure.log.labels import MAIN, LabelRow, list_labels, space_heads, spaces_of
from perdure.log.pending import Write, odd_bases, select_writes, writes_of
from perdure.log.thread_table import find_thread
from perdure.storage.program import Batch, Flow, Program, Rows, read
from perdure.threads.context import Context, Cursor
from perdure.threads.flows import locate
from perdure.threads.models import Checkpoint
from perdure.threads.thread import Thread


class Space(NamedTuple):
    """A namespace of a thread: the id of its newest checkpoint in Perdure's sense, and how many there are."""

    name: str
    newest: str
    checkpoints: int


class Beside(NamedTuple):
    """What stands beside one checkpoint. `rows`: see `pending`."""

    space: str
    is_newest: bool  # in its namespace
    spaces: list[Space]
    rows: Rows
    bases: dict[int, bytes]

    def pending(self) -> list[Write]:
        """What tasks have written on it, in the order in which a run applies it. Raises Damaged."""
        return writes_of(self.rows, self.bases)


def read_spaces(thread: Thread) -> list[Space]:
    """The namespaces of a thread that hold a checkpoint, by name; "" is its own line, with its head."""
    return thread._run(_spaces(thread._context, thread._cursor))


def read_named(thread: Thread, id_: str) -> str | None:
    """The checkpoint, in Perdure's sense, that a caller has named `id_`, in whatever namespace, or None."""
    return thread._run(_named(thread._context, thread._cursor, pack_id(id_)))


def _named(ctx: Context, line: Cursor, id_: bytes) -> Flow[str | None]:
    tenant, row = yield from locate(ctx, line)
    labels = yield from read(partial(list_labels, tenant, thread=row.thread))
    return next((show_id(label.record) for label in labels if label.id == id_), None)


def read_beside(thread: Thread, checkpoint: Checkpoint, id_: str) -> Beside:
    """What stands beside a checkpoint whose caller named it `id_`."""
    return thread._run(_beside(thread._context, thread._cursor, parse_id(checkpoint.id), pack_id(id_)))


def _spaces(ctx: Context, line: Cursor) -> Flow[list[Space]]:
    tenant, _ = yield from locate(ctx, line)
    _, spaces = yield from read(partial(_look, tenant, line))
    return list(spaces.values())


def _beside(ctx: Context, line: Cursor, record: int, id_: bytes) -> Flow[Beside]:
    tenant, _ = yield from locate(ctx, line)
    return (yield from read(partial(_read_beside, tenant, line, record, id_)))


def _read_beside(tenant: int, line: Cursor, record: int, id_: bytes) -> Program[Beside]:
    labels, spaces = yield from _look(tenant, line)
    # A record whose id was put again has none of its own any more.
    own = next((label for label in labels if label.record == record), None)
    space, named = (own.space, own.id) if own is not None else (MAIN, id_)
    assert line.thread is not None
    [rows] = yield Batch(select_writes(tenant, line.thread, space, named))
    try:
        bases = yield from odd_bases(tenant, line.tree, rows, ())
    except Damaged:  # `pending` raises it; the rest can be shown
        bases = {}
    here = spaces.get(space)
    return Beside(
        here.name if here is not None else "",
        here is not None and here.newest == show_id(record),
        list(spaces.values()),
        rows,
        bases,
    )


def _look(tenant: int, line: Cursor) -> Program[tuple[list[LabelRow], dict[int, Space]]]:
    """All labels of a thread, and its namespaces by number."""
    row = yield from find_thread(tenant, line.name, line.thread)
    labels = yield from list_labels(tenant, thread=row.thread)
    names = yield from spaces_of(tenant, row.thread)
    heads = {**(yield from space_heads(tenant, row.thread)), MAIN: row.head}
    own: dict[int, dict[bytes, int]] = {}
    for label in labels:
        own.setdefault(label.space, {})[label.id] = label.record
    spaces: dict[int, Space] = {}
    for number, name in sorted(names.items(), key=lambda item: item[1]):
        records, head = own.get(number, {}), heads.get(number)
        if number != MAIN and head not in records.values():  # it was pruned, or is of the thread that this is a fork of
            head = records[max(records)] if records else None
        if head is not None:
            spaces[number] = Space(name, show_id(head), len(records))
    return labels, spaces
