"""The journal of one run as this process knows it: its rows by path, and which of them the code has not asked for yet.

Parallel branches read and extend it at the same time. So nothing outside sees the dict and the set: a lookup gives a
tuple that is never changed, and everything that iterates does so over a copy made under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from perdure.runs.journal.entries import DIGEST_MASK, Recorded
from perdure.runs.journal.rows import UNKNOWN_SUM, JournalSum

Rows = tuple[Recorded, ...]


class JournalIndex:
    """What is recorded of a run, and what its own rows add up to."""

    def __init__(self) -> None:
        self.last = 0  # the greatest number that a row has, or that was reserved
        self._entries = self._digest = 0
        self._open = 1  # rows whose fate is not known: none is, before the journal was read
        self._by_path: dict[str, Rows] = {}
        self._unread: set[str] = set()
        self._lock = threading.Lock()
        self.answered = 0  # calls that the journal answered

    def load(self, rows: Sequence[Recorded], total: JournalSum) -> None:
        """Take over a journal that was read: the code has yet to ask for its calls."""
        assert total.entries is not None
        assert total.digest is not None
        assert total.last is not None
        with self._lock:
            self._entries, self._digest, self.last, self._open = total.entries, total.digest, total.last, 0
            self._place(rows)
            # What belongs to a call (what its body emitted, who approved it) is not asked for by the code itself.
            self._unread = {
                path for path in self._by_path if path[:1].isdigit() and "~" not in path and "#" not in path
            }

    def add(self, rows: Sequence[Recorded], digest: int) -> None:
        """These rows are written. `digest` is the sum of their hashes."""
        with self._lock:
            self._open -= len(rows)
            self._entries += len(rows)
            self._digest = (self._digest + digest) & DIGEST_MASK
            self._place(rows)

    def add_one(self, row: Recorded, digest: int) -> None:
        """The same for one row."""
        path = row.entry.path
        with self._lock:
            self._open -= 1
            self._entries += 1
            self._digest = (self._digest + digest) & DIGEST_MASK
            self._by_path[path] = (*self._by_path.get(path, ()), row)

    def _place(self, rows: Sequence[Recorded]) -> None:
        for row in rows:
            path = row.entry.path
            self._by_path[path] = (*self._by_path.get(path, ()), row)

    def reserve(self, count: int) -> int:
        """Reserve numbers for new rows; gives the first. `add` says that they are written, `release` that they are
        not."""
        with self._lock:
            self._open += count
            self.last += count
            return self.last - count + 1

    def release(self, count: int) -> None:
        with self._lock:
            self._open -= count

    def total(self) -> JournalSum:
        """What the run's own rows add up to; unknown while it is not known of each reserved number whether it was
        written."""
        with self._lock:
            return UNKNOWN_SUM if self._open else JournalSum(self._entries, self._digest, self.last)

    def at(self, path: str) -> Rows:
        """The rows at a path, oldest first; empty if there are none."""
        return self._by_path.get(path, ())

    def calls(self) -> list[tuple[str, Rows]]:
        """All paths with their rows, in the order in which they were first recorded."""
        with self._lock:
            return list(self._by_path.items())

    def rows(self) -> list[Recorded]:
        return [row for _, rows in self.calls() for row in rows]

    # --- what the code has asked for

    def read(self, path: str) -> None:
        """The code has come to this call."""
        with self._lock:
            self._unread.discard(path)
            self.answered += 1

    def forget(self, prefixes: tuple[str, ...]) -> None:
        """The code need not come to the calls whose paths begin so."""
        with self._lock:
            self._unread = {path for path in self._unread if not path.startswith(prefixes)}

    def unread(self) -> list[str]:
        """The paths that the code has not come to, in the order in which they were first recorded."""
        with self._lock:
            return [path for path in self._by_path if path in self._unread] if self._unread else []
