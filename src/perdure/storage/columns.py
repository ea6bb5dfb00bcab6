"""What a statement says of an encrypted or hashed column. Which columns are, their tables declare (`domains.py`).

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
        """Return the column for a statement that names what identifies the row otherwise, in the same order."""
        assert len(by) == len(self.by), self.label
        return replace(self, by=by)


class Unreadable:
    """Stands for a value that cannot be read, where the reader checks types."""

    def __repr__(self) -> str:
        return "<unreadable>"


UNREADABLE = Unreadable()
