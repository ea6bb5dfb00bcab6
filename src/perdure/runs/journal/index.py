"""The journal of one run in memory: its rows by path, and the recorded calls that the code has not come to yet.

Parallel branches read and extend it at the same time. So a lookup returns a tuple that never changes, and every
iteration is over a copy, or under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

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
        # Paths of recorded calls that the code has not come to, in the order in which they were first recorded. Iterate
        # over a copy.
        self.ahead: dict[str, None] = {}
        self.effects_ahead: dict[str, None] = {}  # those of them that are effects and may have happened
        self._groups: dict[object, list[str]] | None = None  # paths ahead by branch and by call; made when needed
        self._ends: list[tuple[int, str]] = []  # a heap of the numbers and paths of recorded ends
        self._held: dict[str, list[tuple[int, str]]] = {}  # ends that were given up, by prefix of a held branch
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
            self.ahead = {path: None for path in self._by_path if is_call(path)}
            self.effects_ahead = {path: None for path in self.ahead if _may_have_happened(self._by_path[path])}
            self._groups = None
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
        with self._lock:
            self.ahead.pop(path, None)
            self.effects_ahead.pop(path, None)

    def forget(self, prefixes: tuple[str, ...]) -> None:
        """Do not expect the code to reach the calls whose paths have these prefixes."""
        with self._lock:
            self.ahead = {path: None for path in self.ahead if not path.startswith(prefixes)}
            self.effects_ahead = {path: None for path in self.effects_ahead if path in self.ahead}

    def next_end(self) -> int:
        """Return the number of the first recorded end whose call the code has not reached; 0 if there is none."""
        with self._lock:
            while self._ends and self._ends[0][1] not in self.ahead:
                heappop(self._ends)
            return self._ends[0][0] if self._ends else 0

    def give_up_ends(self, before: int) -> None:
        """Leave the ends below a number out of `next_end`, and those of held branches until they begin."""
        with self._lock:
            ends, self._ends = self._ends, []
            for end in ends:
                prefix = branch_of(end[1])
                while prefix and prefix not in self._held:
                    prefix = outer_branch(prefix)
                if prefix:
                    self._held[prefix].append(end)
                elif end[0] >= before:
                    self._ends.append(end)
            heapify(self._ends)

    def hold(self, prefix: str) -> None:
        """Note a branch that has not begun, so that its calls cannot be reached yet."""
        if self.ahead:
            with self._lock:
                self._held[prefix] = []

    def begin(self, prefix: str) -> None:
        """Note that a held branch begins."""
        with self._lock:
            for end in self._held.pop(prefix, ()):
                heappush(self._ends, end)

    def below(self, prefix: str) -> list[str]:
        """Return the paths of calls ahead that begin with the prefix of a branch, "" for all, in recorded order."""
        return self._in_group(prefix) if prefix else list(self.ahead)

    def equals_ahead(self, prefix: str, name: str, args_hash: bytes) -> list[str]:
        """Return the paths of calls ahead with this name and arguments, in the branch of `prefix` and its tasks."""
        return self._in_group((prefix, name, args_hash))

    def _in_group(self, key: object) -> list[str]:
        if not self.ahead:
            return []
        with self._lock:
            if self._groups is None:
                self._groups = self._grouped()
            # Nothing comes to lie ahead later, so a path that was reached is removed once.
            paths = [path for path in self._groups.get(key, ()) if path in self.ahead]
            if paths:
                self._groups[key] = paths
            else:
                self._groups.pop(key, None)
            return list(paths)

    def _grouped(self) -> dict[object, list[str]]:
        groups: dict[object, list[str]] = {}
        for path in self.ahead:
            entry, prefix = self._by_path[path][0].entry, branch_of(path)
            groups.setdefault((_home_of(prefix), entry.name, entry.args_hash), []).append(path)
            while prefix:
                groups.setdefault(prefix, []).append(path)
                prefix = outer_branch(prefix)
        return groups


def branch_of(path: str) -> str:
    """Return the prefix that the paths of all calls of the same branch have."""
    return path[: path.rfind(".") + 1]


def outer_branch(prefix: str) -> str:
    """Return the prefix of the branch or task around another."""
    return prefix[: prefix.rfind(".", 0, -1) + 1]


def _home_of(prefix: str) -> str:
    """Return the prefix of the branch that a task, or a task of a task, belongs to; a branch is its own."""
    while "@" in prefix[len(outer := outer_branch(prefix)) :]:
        prefix = outer
    return prefix


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
