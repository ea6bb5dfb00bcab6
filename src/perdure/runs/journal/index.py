"""The journal of one run as this process knows it: its rows by path, and which of them the code has not asked for yet.

Parallel branches read and extend it at the same time. So nothing outside sees the dict and the set: a lookup gives a
tuple that is never changed, and everything that iterates does so over a copy made under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from perdure.runs.journal.entries import Recorded

Rows = tuple[Recorded, ...]


class JournalIndex:
    """What is recorded of a run. `last` is the greatest number that a row has."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._by_path: dict[str, Rows] = {}
        self._unread: set[str] = set()
        self._lock = threading.Lock()
        self.answered = 0  # calls that the journal answered

    def load(self, rows: Sequence[Recorded]) -> None:
        """Take over a journal that was read: the code has yet to ask for its calls."""
        self.add(rows)
        with self._lock:
            self._last = max((self._last, *(row.seq for row in rows)))
            # What belongs to a call (what its body emitted, who approved it) is not asked for by the code itself.
            self._unread = {
                path for path in self._by_path if path[:1].isdigit() and "~" not in path and "#" not in path
            }

    def add(self, rows: Iterable[Recorded]) -> None:
        with self._lock:
            for row in rows:
                path = row.entry.path
                self._by_path[path] = (*self._by_path.get(path, ()), row)

    def numbers(self, count: int) -> int:
        """Reserve numbers for new rows; gives the first."""
        with self._lock:
            self._last += count
            return self._last - count + 1

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
