"""The journal of one run in memory: its rows by path, and the recorded calls that the code has not come to yet.

Parallel branches read and extend it at the same time. So a lookup returns a tuple that never changes, and every
iteration is over a copy, or under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from heapq import heapify, heappop

from perdure.runs.journal.entries import CHANGE, DIGEST_MASK, DONE, FAILED, INTENT, NOTE, Recorded, without_value
from perdure.runs.journal.kinds import kind_of
from perdure.runs.journal.rows import UNKNOWN_SUM, JournalSum

Rows = tuple[Recorded, ...]


class JournalIndex:
    """The recorded rows of a run, and the sum of its own rows."""

    def __init__(self) -> None:
        self.last = 0  # the greatest number of a row, written or reserved
        self._entries = self._digest = 0
        self._open = 1  # reserved rows that may or may not be written; above 0 until the journal was read
        self._by_path: dict[str, Rows] = {}
        self.ahead: set[str] = set()  # paths of recorded calls that the code has not come to
        self._effects: set[str] = set()  # those of them that are effects and may have happened
        self._ends: list[tuple[int, str]] = []  # a heap of the numbers and paths of recorded ends
        self._lock = threading.Lock()
        self.answered = 0  # number of calls that the journal answered

    def load(self, rows: Sequence[Recorded], total: JournalSum) -> None:
        """Fill the index with a journal that was read. All its calls lie ahead of the code."""
        assert total.entries is not None
        assert total.digest is not None
        assert total.last is not None
        with self._lock:
            self._entries, self._digest, self.last, self._open = total.entries, total.digest, total.last, 0
            self._place([without_value(row) if row.kind == NOTE else row for row in rows])
            # The code itself does not ask for rows beside a call: values that its body emitted, its approval.
            self.ahead = {path for path in self._by_path if is_call(path)}
            self._effects = {path for path in self.ahead if _may_have_happened(self._by_path[path])}
            self._ends = [(seq, path) for path in self.ahead if (seq := end_of(self._by_path[path]))]
            heapify(self._ends)

    def add(self, rows: Sequence[Recorded], digest: int) -> None:
        """Add reserved rows that were written. `digest` is the sum of their hashes."""
        with self._lock:
            self._open -= len(rows)
            self._entries += len(rows)
            self._digest = (self._digest + digest) & DIGEST_MASK
            self._place(rows)

    def add_one(self, row: Recorded, digest: int) -> None:
        """Add one reserved row that was written. `digest` is its hash."""
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
        """Reserve numbers for new rows and return the first. Call `add` if they were written, `release` if not."""
        with self._lock:
            self._open += count
            self.last += count
            return self.last - count + 1

    def release(self, count: int) -> None:
        with self._lock:
            self._open -= count

    def total(self) -> JournalSum:
        """Return the sum of the run's own rows; UNKNOWN_SUM while a reserved row may or may not be written."""
        with self._lock:
            return UNKNOWN_SUM if self._open else JournalSum(self._entries, self._digest, self.last)

    def at(self, path: str) -> Rows:
        """Return the rows at a path, oldest first; empty if there are none."""
        return self._by_path.get(path, ())

    def calls(self) -> list[tuple[str, Rows]]:
        """Return all paths with their rows, in the order in which they were first recorded."""
        with self._lock:
            return list(self._by_path.items())

    def rows(self) -> list[Recorded]:
        return [row for _, rows in self.calls() for row in rows]

    # --- what the code has asked for

    def read(self, path: str) -> None:
        """Mark a call as reached and answered by the journal. Its large values are dropped from memory."""
        self.reach(path)
        self.answered += 1
        with self._lock:
            self._by_path[path] = tuple(map(without_value, self._by_path[path]))

    def reach(self, path: str) -> None:
        """Mark a call as reached by the code."""
        with self._lock:
            self.ahead.discard(path)
            self._effects.discard(path)

    def forget(self, prefixes: tuple[str, ...]) -> None:
        """Do not expect the code to reach the calls whose paths have these prefixes."""
        with self._lock:
            self.ahead = {path for path in self.ahead if not path.startswith(prefixes)}
            self._effects &= self.ahead

    def unread(self) -> list[str]:
        """Return the paths of calls that the code has not reached, in the order in which they were first recorded."""
        return self._in_order(self.ahead)

    def effects_ahead(self) -> list[str]:
        """Return the paths of recorded effects that may have happened and that the code has not reached."""
        return self._in_order(self._effects)

    def _in_order(self, chosen: set[str]) -> list[str]:
        if not chosen:
            return []
        with self._lock:
            return [path for path in self._by_path if path in chosen]

    def next_end(self) -> int:
        """Return the number of the first recorded end whose call the code has not reached; 0 if there is none."""
        with self._lock:
            while self._ends and self._ends[0][1] not in self.ahead:
                heappop(self._ends)
            return self._ends[0][0] if self._ends else 0

    def is_branch(self, path: str) -> bool:
        """Return whether recorded calls below this path lie ahead of the code."""
        below = f"{path}."
        with self._lock:
            return any(other.startswith(below) for other in self.ahead)

    def equals_ahead(self, prefix: str, name: str, args_hash: bytes) -> list[str]:
        """Return the paths of calls ahead with this name and arguments, in the branch of `prefix` and its tasks."""
        with self._lock:
            return [
                path
                for path in (self._by_path if self.ahead else ())
                if path in self.ahead
                and path.startswith(prefix)
                and all("@" in part for part in path[len(prefix) :].split(".")[:-1])
                and (entry := self._by_path[path][0].entry).name == name
                and entry.args_hash == args_hash
            ]


def branch_of(path: str) -> str:
    """Return the prefix that the paths of all calls of the same branch have."""
    return path[: path.rfind(".") + 1]


def is_call(path: str) -> bool:
    """Return whether a path belongs to a call of the code, not to an undo or to a row beside a call."""
    return path[:1].isdigit() and "~" not in path and "#" not in path


def end_of(rows: Sequence[Recorded]) -> int:
    """Return the number of the row that ended a call; 0 if it has not ended."""
    return next((row.seq for row in rows if row.kind in (DONE, CHANGE)), 0)


def _may_have_happened(rows: Rows) -> bool:
    kind = kind_of(rows[0].entry.name)
    is_effect = any(row.kind == INTENT for row in rows) or (kind is not None and kind.reaches_out)
    return is_effect and rows[-1].kind != FAILED
