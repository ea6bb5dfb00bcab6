"""Searches of memory on PostgreSQL among 100,000 items, where pgvector proposes and the process ranks.

The floor is one query of pgvector alone: numbers of items and their distances, in the order of its graph. The peer is
our own ranking of everything in the process, which smaller namespaces get, warm, and in a process that has just begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import psycopg

import perdure
from bench.measure import Row, Run, in_turns, mean, milliseconds, seconds
from bench.search import DIMENSION, ROUNDS, Corpus, ours
from perdure.memory import search as memory_search
from perdure.memory.large import PROPOSED
from perdure.testing.postgres_server import PostgresServer

SAME_BAR = 0.95
EVERYTHING = 10**12
searching: Any = memory_search  # whose threshold is set here


def search_large(run: Run) -> list[Row]:
    count = run.count(100_000, 300)
    corpus = Corpus(count)
    with PostgresServer(fsync=False) as server:
        url = server.create_database("ours")
        with perdure.open(url, embedder=corpus.embed) as store:
            ours(corpus, store)
            took_s = seconds(store.ops.index_memory)
        with (
            perdure.open(url, embedder=corpus.embed) as indexed,
            perdure.open(url, embedder=corpus.embed) as everything,
            _bare(corpus, url) as bare,
        ):
            by_index, in_process = _searches(indexed, corpus, 0), _searches(everything, corpus, EVERYTHING)
            first, first_everything = seconds(by_index), seconds(in_process)
            took, warm, floor = map(milliseconds, in_turns(run.count(ROUNDS, 2), by_index, in_process, bare))
            same = mean(float(by_index() == in_process()) for _ in corpus.queries)
    name = f"PostgreSQL: search among {count:,}"
    return [
        Row(name, took, "ms", warm, floor, took / floor, note="peer: ranked in the process; floor: pgvector alone"),
        Row("  a process's first search", first * 1000, "ms", first_everything * 1000, None, first_everything / first),
        Row("  the same ten, in the same order", same, "", bar=SAME_BAR, sense="at least", judged="ours",
            note=f"the index was made in {took_s:.0f} s"),
    ]  # fmt: skip


def _searches(store: perdure.Store, corpus: Corpus, most: int) -> Callable[[], list[str]]:
    memory, asked = store.memory("users", "ann"), corpus.asked()

    def search() -> list[str]:
        before, searching.LARGE_ITEMS = searching.LARGE_ITEMS, most
        try:
            return [item.key for item in memory.search(next(asked))]
        finally:
            searching.LARGE_ITEMS = before

    return search


@contextmanager
def _bare(corpus: Corpus, url: str) -> Iterator[Callable[[], object]]:
    vectors = cycle([str(vector.tolist()) for vector in corpus.vectors[len(corpus.texts) :]])
    with psycopg.connect(url, autocommit=True, options="-c search_path=perdure,public") as connection:
        connection.execute("SELECT '[1]'::vector")  # loads the extension, which knows the next setting
        connection.execute("SET hnsw.ef_search = 200")
        row = connection.execute("SELECT model FROM memory_ann LIMIT 1").fetchone()
        model = row[0] if row is not None else ""
        distance = f"vec::halfvec({DIMENSION}) <#> %s::halfvec({DIMENSION})"
        text: Any = f"""SELECT id, {distance} FROM memory_ann
            WHERE model = '{model}' AND dimension = {DIMENSION} ORDER BY {distance} LIMIT {PROPOSED}"""

        def query() -> object:
            vector = next(vectors)
            return connection.execute(text, (vector, vector)).fetchall()

        yield query
