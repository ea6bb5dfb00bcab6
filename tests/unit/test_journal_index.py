"""The journal in memory: what lies ahead of the code is found by branch and by call, as by a look at every path."""

from __future__ import annotations

import random

from perdure.runs.journal.entries import DONE, Entry, Recorded
from perdure.runs.journal.index import JournalIndex
from perdure.runs.journal.rows import JournalSum

PREFIXES = ["", "1.", "2.", "1.1.", "1@a.", "2@a.", "1@a.1@b.", "1@a.3.", "1@a.3.1@b-0f.", "1.2@a.", "12."]
NAMES, HASHES = ["think", "book"], [b"x", b"y"]


def test_what_lies_ahead_is_found_as_by_a_look_at_every_path() -> None:
    chance = random.Random(7)
    paths = [f"{prefix}{number}" for prefix in PREFIXES for number in range(4, 9)]
    chance.shuffle(paths)
    entries = {path: Entry(path, chance.choice(NAMES), 0, chance.choice(HASHES)) for path in paths}
    index = JournalIndex()
    rows = [Recorded(1, seq, DONE, entry) for seq, entry in enumerate(entries.values(), 1)]
    index.load(rows, JournalSum(len(rows), 0, len(rows)))
    left = list(paths)
    while left:
        for prefix in PREFIXES:
            assert index.below(prefix) == [path for path in left if path.startswith(prefix)]
            for name in NAMES if prefix in ("", "1.", "2.", "1.1.", "1@a.3.", "12.") else ():  # the others are of tasks
                for args_hash in HASHES:
                    assert index.equals_ahead(prefix, name, args_hash) == [
                        path
                        for path in left
                        if path.startswith(prefix)
                        and all("@" in part for part in path[len(prefix) :].split(".")[:-1])
                        and (entries[path].name, entries[path].args_hash) == (name, args_hash)
                    ]
        if len(left) == 30:
            index.forget(("1@a.",))
            left = [path for path in left if not path.startswith("1@a.")]
        index.reach(gone := chance.choice(left))
        left.remove(gone)
    assert not index.ahead
