"""Searches of memory, by words and vectors, warm: among 10,000 items, and in 200 of many; and puts.

The peer is LangGraph's `SqliteStore`, as its documentation opens it, which searches by vectors only. The floor is what
no store can do without: one product of a matrix of numpy with the query's vector, and one query of an FTS5 table, both
bare. All get the same texts, vectors (384 numbers, in 200 clusters) and queries; the embedder looks vectors up. A
search returns ten items with their values.
"""

from __future__ import annotations

import importlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import apsw
import numpy
from langgraph.store.base import PutOp
from langgraph.store.sqlite import SqliteStore

import perdure
from bench.measure import BareTable, Prose, Row, Run, in_turns, milliseconds
from perdure.langgraph import PerdureStore
from perdure.memory.words import ENGLISH

DIMENSION = 384
CLUSTERS = 200
WORDS = 25
QUERY_WORDS = 8
FIRST = 10
PEER_BAR = 8.0
FLOOR_BAR = 1.0
FEW_BAR = 2.0
PUT_BAR = 2.0
ROUNDS = 40


class Corpus:
    """Texts and queries with vectors, and an embedder that knows them."""

    def __init__(self, count: int, queries: int = 20) -> None:
        prose, random = Prose(1), numpy.random.default_rng(1)
        centres = random.normal(size=(CLUSTERS, DIMENSION))
        near = centres[random.integers(0, CLUSTERS, count + queries)]
        vectors = near + 0.8 * random.normal(size=near.shape)
        self.vectors = (vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)).astype("f4")
        self.texts = [f"{prose.words_of(WORDS)} note{number}" for number in range(count)]
        self.queries = [f"{prose.words_of(QUERY_WORDS)} query{number}" for number in range(queries)]

    def embed(self, texts: list[str]) -> list[list[float]]:
        """By the number in a text: the peer wants the vector of an item's JSON, whatever `fields` says."""
        places = [re.findall(r"(note|query)(\d+)", text)[-1] for text in texts]
        starts = {"note": 0, "query": len(self.texts)}
        return [self.vectors[starts[kind] + int(number)].tolist() for kind, number in places]

    def asked(self) -> Iterator[str]:
        return cycle(self.queries)

    def query_vectors(self) -> Iterator[Any]:
        return cycle(self.vectors[len(self.texts) :])


def bare(corpus: Corpus, path: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """The floor: a matrix of numpy, and an FTS5 table."""
    matrix = corpus.vectors[: len(corpus.texts)].copy()
    vectors, asked = corpus.query_vectors(), corpus.asked()
    table = apsw.Connection(str(path))
    table.pragma("journal_mode", "wal")
    table.execute("CREATE VIRTUAL TABLE text USING fts5(body, tokenize='porter unicode61')")
    with table:
        table.executemany("INSERT INTO text (body) VALUES (?)", ((text,) for text in corpus.texts))

    def by_vector() -> object:
        # As fast as `@`, whose second thread keeps a processor busy for a while: whoever comes next would wait for it.
        scores = numpy.vecdot(matrix, next(vectors))
        first = numpy.argpartition(-scores, FIRST)[:FIRST]
        return first[numpy.argsort(-scores[first])]

    def by_words() -> object:
        wanted = " OR ".join(f'"{stem}"' for stem in ENGLISH.stems(next(asked)))
        sql = "SELECT body, bm25(text) AS score FROM text WHERE text MATCH ? ORDER BY score LIMIT ?"
        return list(table.execute(sql, (wanted, FIRST)))

    return by_vector, by_words


def peer(corpus: Corpus, path: Path) -> Callable[[], object]:
    # The peer loads an extension, which not every Python's own sqlite3 can.
    own = hasattr(sqlite3.Connection, "enable_load_extension")
    module = sqlite3 if own else importlib.import_module("pysqlite3")
    connection = module.connect(str(path), check_same_thread=False, isolation_level=None)
    index: Any = {"dims": DIMENSION, "embed": corpus.embed, "fields": ["text"]}
    store = SqliteStore(connection, index=index)
    store.setup()
    for start in range(0, len(corpus.texts), 500):
        texts = enumerate(corpus.texts[start : start + 500], start)
        store.batch([PutOp(("users", "ann"), f"item{number}", {"text": text}) for number, text in texts])
    asked = corpus.asked()
    return lambda: store.search(("users", "ann"), query=next(asked), limit=FIRST)


def ours(corpus: Corpus, store: perdure.Store) -> Callable[[], object]:
    memory = store.memory("users", "ann")
    for start in range(0, len(corpus.texts), 500):
        texts = enumerate(corpus.texts[start : start + 500], start)
        memory.put_many({f"item{number}": {"text": text} for number, text in texts})
    asked = corpus.asked()
    return lambda: memory.search(next(asked), limit=FIRST)


def through_langgraph(corpus: Corpus, store: perdure.Store) -> Callable[[], object]:
    """The same items, searched through `PerdureStore`, as the peers are."""
    items, asked = PerdureStore(store), corpus.asked()
    return lambda: items.search(("users", "ann"), query=next(asked), limit=FIRST)


def search(run: Run) -> list[Row]:
    count = run.count(10_000, 300)
    corpus = Corpus(count)
    by_vector, by_words = bare(corpus, run.folder / "bare.db")
    stock = peer(corpus, run.folder / "peer.db")
    with perdure.open(run.folder / "ours.db", embedder=corpus.embed) as store:
        mine = ours(corpus, store)
        times = in_turns(run.count(ROUNDS, 2), mine, through_langgraph(corpus, store), stock, by_vector, by_words)
    took, through, theirs, vector, words = map(milliseconds, times)
    floor = vector + words
    name = f"search among {count:,}"
    return [
        Row(name, took, "ms", theirs, floor, theirs / took, PEER_BAR, "at least",
            note="words and vectors; peer: SqliteStore, vectors only"),
        Row("  through PerdureStore", through, "ms", theirs, None, theirs / through, PEER_BAR, "at least"),
        Row("  over bare numpy and bare FTS5", took, "ms", None, floor, took / floor, FLOOR_BAR),
        few(run),
        put(run),
    ]  # fmt: skip


def put(run: Run) -> Row:
    """A put of a new item without an embedder, against a bare insert of its text, each with its commit."""
    corpus = Corpus(run.count(300, 20))
    texts, copies = iter(corpus.texts), iter(corpus.texts)
    table = BareTable(run.folder / "bare-put.db")
    with perdure.open(run.folder / "put.db") as store:
        memory = store.memory("users", "ann")
        puts = (memory.put(f"item{number}", {"text": text}) for number, text in enumerate(texts))
        rounds = len(corpus.texts) - 10
        took, floor = map(
            milliseconds, in_turns(rounds, lambda: next(puts), lambda: table.insert(next(copies).encode()), warm_up=5)
        )
    table.close()
    return Row("put without embedding", took, "ms", None, floor, took / floor, PUT_BAR,
               note="floor: a bare insert with its commit")  # fmt: skip


def few(run: Run) -> Row:
    """A user's 200 items, alone in a store and among those of many users."""
    users, each = run.count(500, 5), run.count(200, 20)
    corpus = Corpus(each)
    searches = []
    stores = [perdure.open(run.folder / f"{name}.db", embedder=corpus.embed) for name in ("alone", "many")]
    for store, count in zip(stores, (1, users), strict=True):
        for number in range(count):
            items = {f"item{place}": {"text": text} for place, text in enumerate(corpus.texts)}
            store.memory("users", f"user{number}").put_many(items)
        searches.append(_searches(store, corpus, min(count, 20)))
    alone, many = map(milliseconds, in_turns(run.count(5 * ROUNDS, 2), *searches, warm_up=25))
    for store in stores:
        store.close()
    return Row(f"search in {each} of {users * each:,}", many, "ms", None, alone, many / alone, FEW_BAR,
               note="floor: the same 200 alone")  # fmt: skip


def _searches(store: perdure.Store, corpus: Corpus, users: int) -> Callable[[], object]:
    """Searches of several users in turn."""
    asked, memories = corpus.asked(), cycle([store.memory("users", f"user{number}") for number in range(users)])
    return lambda: next(memories).search(next(asked), limit=FIRST)
