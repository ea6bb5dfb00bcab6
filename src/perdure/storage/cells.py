"""Which columns are secret, and what identifies the row that each belongs to. Only names: no key is known here.

A statement says which of its parameters are such cells (`Sql(…, seals=…)`) and which columns of its rows (`opens=…`);
`sealing.py` then encrypts and decrypts around programs, which never see a key. `TABLES` says the same of the tables as
such, for whoever walks over all of them to encrypt them anew.

Not secret, because the database searches, orders or counts by them: names of tenants, threads, runs, functions,
topics and metadata keys; times, sizes, counts, statuses, hashes (salted where they could confirm a guess).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# blob: bytes. text: the same in a column for text. index: one way, the same for the same value, so that it can be
# searched for. lock: says which key a tenant's data needs; opens to None.
Sort = Literal["blob", "text", "index", "lock"]


# What a sealed cell begins with, then the key's id: no MessagePack, zstd, JSON or version byte of ours begins so.
MARK = b"\xf5s\x01"


@dataclass(frozen=True, slots=True)
class Cell:
    """A secret column. `by` is what identifies its row: names of parameters, numbers of result columns."""

    label: str
    sort: Sort = "blob"
    by: tuple[str | int, ...] = ()
    hashed: bool = False  # it ends with a hash of its own (`row_hashes.py`): nothing else covers it

    def at(self, *by: str | int) -> Cell:
        """The same column, in a statement that identifies the row so: by as much, in the same order."""
        assert len(by) == len(self.by), self.label
        return replace(self, by=by)


class Unreadable:
    """Stands for a cell that cannot be read, where whoever reads it looks at types."""

    def __repr__(self) -> str:
        return "<unreadable>"


UNREADABLE = Unreadable()

SALT = Cell("body.salt")  # of a body, the number is given by the database; the record's hash tells a swap
DIFF = Cell("body.diff")
FULL_TEXT = Cell("body.full_text")
PACK = Cell("pack.data")
NOTE = Cell("record.note", "text", ("tree", "id"), hashed=True)
RECORD_METADATA = Cell("record.metadata", "text", ("tree", "id"), hashed=True)
THREAD_METADATA = Cell("thread.metadata", "text", ("thread",), hashed=True)
TAG = Cell("tag.value", "index", ("key",))
# Not the thread: a fork's are copied as they are.
WRITE = Cell("write.value", "blob", ("space", "id", "task", "idx", "channel", "path", "base"), hashed=True)
INPUT = Cell("run.input", "blob", ("id", "function"), hashed=True)
WAITING = Cell("run.waiting", "text", ("run",), hashed=True)
RUN_VALUE = Cell("run_value.value", "blob", ("run", "sort"), hashed=True)
# A run's arguments are written before it has a number. Bound to its incarnation, which idempotency keys are made from:
# if that was changed, the run does not start.
ARGS = Cell("run_value.value", "blob", ("incarnation",), hashed=True)
JOURNAL = Cell("journal.body", "blob", ("run", "seq", "kind"), hashed=True)
QUESTION = Cell("ask.question", "text", ("run", "path"), hashed=True)
TERMS = Cell("ask.terms", "text", ("run", "path"), hashed=True)
ASK_ANSWER = Cell("ask.answer", "blob", ("run", "path"), hashed=True)
ANSWER = Cell("answer.value", "blob", ("run", "path", "who"), hashed=True)
SIGNAL = Cell("signal.value", "blob", ("run", "topic", "key"), hashed=True)
BLOB = Cell("blob.body", "blob", ("hash",))
NEEDED = Cell("seal.key", "lock")


class Table(NamedTuple):
    """A table with secret cells: its key without the tenant (the order to walk it in), the cells by column, other
    columns that cells are bound to, and which of its rows."""

    name: str
    key: tuple[str, ...]
    cells: tuple[Cell, ...]
    beside: tuple[str, ...] = ()
    where: str = ""

    def columns(self) -> tuple[str, ...]:
        return tuple(cell.label.partition(".")[2] for cell in self.cells)

    def beside_names(self) -> tuple[str, ...]:
        return tuple(column.rpartition(" ")[2] for column in self.beside)


_INCARNATION = (
    "(SELECT r.incarnation FROM run r WHERE r.tenant = run_value.tenant AND r.run = run_value.run) AS incarnation"
)
TABLES = (
    Table("thread", ("thread",), (THREAD_METADATA,)),
    Table("tag", ("thread", "key"), (TAG,)),
    Table("record", ("tree", "id"), (NOTE, RECORD_METADATA)),
    Table("body", ("id",), (SALT, DIFF, FULL_TEXT)),
    Table("pack", ("pack",), (PACK,)),
    Table("write", ("thread", "space", "id", "task", "idx"), (WRITE,), ("channel", "path", "base")),
    Table("run", ("run",), (INPUT, WAITING), ("id", "function")),
    Table("run_value", ("run", "sort"), (RUN_VALUE,), where="sort <> 'args'"),
    Table("run_value", ("run", "sort"), (ARGS,), (_INCARNATION,), "sort = 'args'"),
    Table("journal", ("run", "seq"), (JOURNAL,), ("kind",)),
    Table("ask", ("run", "path"), (QUESTION, TERMS, ASK_ANSWER)),
    Table("answer", ("run", "path", "who"), (ANSWER,)),
    Table("signal", ("run", "topic", "key"), (SIGNAL,)),
    Table("blob", ("hash",), (BLOB,)),
)
