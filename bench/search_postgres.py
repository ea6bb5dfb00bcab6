"""Searches of memory on PostgreSQL among 10,000 items, beside LangGraph's `PostgresStore` with pgvector.

The peer searches by vectors only, with the approximate index that it makes by default. A row says how many of the ten
hits that an exact comparison of all vectors finds each of them returned: ours by a query whose words no item has, so
that meaning alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy
from langgraph.store.base import PutOp
from langgraph.store.postgres import PostgresStore

import perdure
from bench.measure import Row, Run, in_turns, mean, milliseconds
from bench.search import DIMENSION, FIRST, ROUNDS, Corpus, ours, through_langgraph
from perdure.testing.postgres_server import PostgresServer

TIME_BAR = 1.0
EXACT_BAR = 1.0


def search_postgres(run: Run) -> list[Row]:
    count = run.count(10_000, 300)
    corpus = Corpus(count)
    with PostgresServer(fsync=True) as server:
        for name in ("ours", "peer"):
            server.create_database(name)
        with (
            perdure.open(server.url("ours"), embedder=corpus.embed) as store,
            _peer(corpus, server.url("peer")) as (stock, keys),
        ):
            mine = ours(corpus, store)
            times = in_turns(run.count(ROUNDS, 2), mine, through_langgraph(corpus, store), stock)
            took, through, theirs = map(milliseconds, times)
            exact = [_exact(corpus, place) for place in range(len(corpus.queries))]
            memory = store.memory("users", "ann")
            found = [[item.key for item in memory.search(f"query{place}")] for place in range(len(exact))]
            right = mean(float(got == wanted) for got, wanted in zip(found, exact, strict=True))
            others = mean(
                len({*keys(query)} & {*wanted}) / FIRST for query, wanted in zip(corpus.queries, exact, strict=True)
            )
    name = f"PostgreSQL: search among {count:,}"
    return [
        Row(name, took, "ms", theirs, None, theirs / took, TIME_BAR, "at least", note="peer: PostgresStore, vectors only"),
        Row("  through PerdureStore", through, "ms", theirs, None, theirs / through, TIME_BAR, "at least"),
        Row("  all ten, in the right order", right, "", bar=EXACT_BAR, sense="at least", judged="ours",
            note=f"the peer finds {others:.0%} of the ten"),
    ]  # fmt: skip


def _exact(corpus: Corpus, place: int) -> list[str]:
    """The keys of the items nearest to a query, by the vectors as they are stored."""
    stored = corpus.vectors.astype("<f2").astype("f8")
    scores = stored[: len(corpus.texts)] @ stored[len(corpus.texts) + place]
    return [f"item{number}" for number in numpy.argsort(-scores, kind="stable")[:FIRST]]


@contextmanager
def _peer(corpus: Corpus, url: str) -> Iterator[tuple[Callable[[], object], Callable[[str], list[str]]]]:
    index: Any = {"dims": DIMENSION, "embed": corpus.embed, "fields": ["text"]}
    with PostgresStore.from_conn_string(url, index=index) as store:
        store.setup()
        for start in range(0, len(corpus.texts), 500):
            texts = enumerate(corpus.texts[start : start + 500], start)
            store.batch([PutOp(("users", "ann"), f"item{number}", {"text": text}) for number, text in texts])
        asked = cycle(corpus.queries)

        def search(query: str) -> list[str]:
            return [item.key for item in store.search(("users", "ann"), query=query, limit=FIRST)]

        yield lambda: search(next(asked)), search
