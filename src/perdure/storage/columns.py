"""Which columns are encrypted, and what identifies the row that a value belongs to. Only names: no key is known here.

A statement names its parameters (`Sql(…, seals=…)`) and the columns of its rows (`opens=…`) that are such columns; the
encrypting driver (`encryption/driver.py`) works around programs, which never see a key.

Not encrypted, because the database searches, orders or counts by them: names of tenants, threads, runs, functions,
topics and metadata keys; namespaces, keys and kinds of memory; times, sizes, counts, statuses, hashes (salted where
they could confirm a guess).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# text: the same as bytes in a column for text. index: one way, the same for the same value, so that it can be searched
# for. tenant: whether a tenant's data is encrypted; reads as None with its key, and without keys is an error.
Kind = Literal["bytes", "text", "index", "tenant"]


# What an encrypted value begins with: no MessagePack, zstd, JSON or version byte of ours begins so.
MARK = b"\xf5s\x02"


@dataclass(frozen=True, slots=True)
class EncryptedColumn:
    """An encrypted column. `by` is what identifies its row: names of parameters, numbers of result columns."""

    label: str
    kind: Kind = "bytes"
    by: tuple[str | int, ...] = ()
    hashed: bool = False  # it ends with a hash of its own (`row_hashes.py`): nothing else covers it

    def at(self, *by: str | int) -> EncryptedColumn:
        """The same column, in a statement that identifies the row so: by as much, in the same order."""
        assert len(by) == len(self.by), self.label
        return replace(self, by=by)


class Unreadable:
    """Stands for a value that cannot be read, where the reader checks types."""

    def __repr__(self) -> str:
        return "<unreadable>"


UNREADABLE = Unreadable()

SALT = EncryptedColumn("body.salt")  # of a body, the number is given by the database; the record's hash tells a swap
DIFF = EncryptedColumn("body.diff")
FULL_TEXT = EncryptedColumn("body.full_text")
NOTE = EncryptedColumn("record.note", "text", ("tree", "id"), hashed=True)
RECORD_METADATA = EncryptedColumn("record.metadata", "text", ("tree", "id"), hashed=True)
THREAD_METADATA = EncryptedColumn("thread.metadata", "text", ("thread",), hashed=True)
TAG = EncryptedColumn("tag.value", "index", ("key",))
# Not the thread: a fork's are copied as they are.
WRITE = EncryptedColumn("write.value", "bytes", ("space", "id", "task", "idx", "key", "path", "base"), hashed=True)
INPUT = EncryptedColumn("run.input", "bytes", ("id", "function"), hashed=True)
WAITING = EncryptedColumn("run.waiting", "text", ("run",), hashed=True)
RUN_VALUE = EncryptedColumn("run_value.value", "bytes", ("run", "kind"), hashed=True)
# A run's arguments are written before it has a number. Bound to its incarnation, which idempotency keys are made from:
# if that was changed, the run does not start.
ARGS = EncryptedColumn("run_value.value", "bytes", ("incarnation",), hashed=True)
JOURNAL = EncryptedColumn("journal.body", "bytes", ("run", "seq", "kind"), hashed=True)
QUESTION = EncryptedColumn("ask.question", "text", ("run", "path"), hashed=True)
TERMS = EncryptedColumn("ask.terms", "text", ("run", "path"), hashed=True)
ASK_ANSWER = EncryptedColumn("ask.answer", "bytes", ("run", "path"), hashed=True)
ANSWER = EncryptedColumn("answer.value", "bytes", ("run", "path", "who"), hashed=True)
SIGNAL = EncryptedColumn("signal.value", "bytes", ("run", "topic", "key"), hashed=True)
BLOB = EncryptedColumn("blob.body", "bytes", ("hash",))
# A version of an item stands for good: all that says what and when it is belongs to its hash.
ITEM = EncryptedColumn(
    "memory_item.body",
    "bytes",
    ("id", "key", "version", "kind", "pinned", "created_at", "at", "valid_from", "valid_to", "gone"),
    hashed=True,
)
ITEM_WORDS = EncryptedColumn("memory_item.words", "bytes", ("id",))
ITEM_VECTOR = EncryptedColumn("memory_vector.vec", "bytes", ("id",))
TENANT_KEY = EncryptedColumn("tenant_key.wrapped_by", "tenant")
COLUMNS = (
    SALT, DIFF, FULL_TEXT, NOTE, RECORD_METADATA, THREAD_METADATA, TAG, WRITE, INPUT, WAITING, RUN_VALUE, ARGS,
    JOURNAL, QUESTION, TERMS, ASK_ANSWER, ANSWER, SIGNAL, BLOB, ITEM, ITEM_WORDS, ITEM_VECTOR,
)  # fmt: skip
TABLES = frozenset(column.label.partition(".")[0] for column in COLUMNS)  # that have encrypted columns
