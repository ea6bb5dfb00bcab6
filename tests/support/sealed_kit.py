"""Encrypted stores for tests: something secret everywhere through the public API, and the database as it is stored."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apsw
import psycopg

import perdure
from perdure import Store
from perdure.encryption.cipher import INDEX_MARK, INDEX_TEXT_MARK, TEXT_MARK
from perdure.memory.embed import embedding_of
from perdure.memory.scopes import searcher_of
from perdure.storage.columns import MARK, EncryptedColumn
from perdure.storage.domains import all_tables
from perdure.teams import Post, link

OLD, NEW, OTHER = bytes(range(32)), bytes(range(1, 33)), bytes(range(2, 34))
CANARY = "Kanarienvogel"
_words = itertools.count()
LARGE = 70_000  # bytes: results from 64 KB on are kept apart


def secret() -> str:
    """A word that is nowhere else. Different each time, so that compression leaves it as it is."""
    return f"{CANARY}{next(_words):x}"


@perdure.step(name="sealed_kit.look")
def look(word: str) -> str:
    return f"{word} {secret()}"


@perdure.effect(name="sealed_kit.book")
def book(word: str) -> str:
    return f"{word} {secret()}"


@perdure.step(name="sealed_kit.large")
def large(word: str) -> str:
    return f"{word} {os.urandom(LARGE).hex()} {word}"


@perdure.durable(name="sealed_kit.travel")
def travel(word: str) -> str:
    look(word)
    book(word)
    large(word)
    state = perdure.state()
    state["secret"] = word
    perdure.emit(f"{word} emitted")
    perdure.tag(customer=word)
    answer = perdure.ask(f"{secret()}?", options=[secret(), CANARY])
    heard = perdure.receive("topic")
    return f"{answer} {heard} {secret()}"


@perdure.durable(name="sealed_kit.waiting")
def waiting(word: str) -> str:
    return str(perdure.ask(f"{secret()}?", options=[CANARY, secret()]))


def fill(store: Store) -> None:
    """Something secret in every table that can hold any."""
    thread = store.thread("alice", metadata={"user": secret(), "long": secret() * 40})
    for number in range(12):
        thread.save(
            {"messages": [secret() for _ in range(number)], "n": number}, note=secret(), metadata={"why": secret()}
        )
    grown = store.thread("grown")
    for number in range(40):
        grown.save({"messages": [f"{CANARY} {at}" for at in range(number)]})
    thread.fork(name="bob", metadata={"user": secret()}).save({"other": secret()})
    word = secret()
    store.run(travel, word, id="trip")
    store.answer("trip", CANARY, who="carol")
    store.send("trip", secret(), topic="topic")
    store.send("trip", secret(), topic="other")
    store.run(travel, word, id="trip").result(timeout_s=30)
    store.run(waiting, secret(), id="waits", tags={"customer": secret()})
    store.schedule("yearly", waiting, "0 0 1 1 *", args=(secret(),))
    searcher_of(store._context).embedding = embedding_of(lambda texts: [[float(len(text)), 1.0] for text in texts])
    memory = store.memory("users", "alice")
    memory.put("fact", {"fact": secret()}, text=secret(), context=secret(), source=secret())
    memory.put("fact", {"fact": secret()})


def fill_team(store: Store) -> None:
    """A dead letter with its error, and a message on its way to a member in another store."""
    with perdure.open(":memory:") as other:
        here, there = store.team("team"), other.team("team")

        @here.agent(policy="dead_letter")
        def refuses(state: Any, message: Any) -> None:
            raise ValueError(message)

        @there.agent
        def reader(state: Any, message: Any) -> None: ...

        link({"here": here, "there": there})
        here.send(refuses, secret())
        here.send("reader", secret())
        here.work(until_idle=True)
        Post(here).outgoing("there")


def fill_langgraph(store: Store) -> None:
    """The same through LangGraph's checkpointer, with writes that are pending."""
    from langgraph.checkpoint.base import empty_checkpoint

    from perdure.langgraph import PerdureSaver

    saver = PerdureSaver(store)
    config: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": ""}}
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"messages": [secret()]}
    checkpoint["channel_versions"] = {"messages": 1}
    stored = saver.put(config, checkpoint, {"source": "input", "step": -1, "parents": {}}, {"messages": 1})
    saver.put_writes(stored, [("messages", secret()), ("__error__", secret())], "task-1")


class Raw:
    """The database itself, past Perdure."""

    def __init__(self, url: str) -> None:
        self.is_postgres = url.startswith("postgres")
        self._url = url

    def __call__(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self.is_postgres:
            with psycopg.connect(self._url, options="-c search_path=perdure", autocommit=True) as connection:
                cursor = connection.execute(sql.replace("?", "%s"), params, binary=True)
                return cursor.fetchall() if cursor.description else []
        file = apsw.Connection(self._url)
        file.set_busy_timeout(10_000)
        try:
            return list(file.execute(sql, tuple(params)))
        finally:
            file.close()

    def everything(self) -> Iterable[bytes]:
        """All bytes that are stored: the files, or every value of every table."""
        if not self.is_postgres:
            folder, name = Path(self._url).parent, Path(self._url).name
            yield from (path.read_bytes() for path in folder.iterdir() if path.name.startswith(name))
            return
        tables = self("SELECT table_name FROM information_schema.tables WHERE table_schema = 'perdure'")
        for (table,) in tables:
            for row in self(f'SELECT * FROM "{table}"'):
                yield from (value if isinstance(value, bytes) else str(value).encode() for value in row)

    def values(self, column: EncryptedColumn) -> list[Any]:
        """All stored values of a column."""
        table, _, name = column.label.partition(".")
        return [value for (value,) in self(f"SELECT {name} FROM {table}")]

    def swap(self, table: str, column: str, key: str, one: Any, other: Any) -> None:
        """Exchange a cell of two rows."""
        [(first,)] = self(f"SELECT {column} FROM {table} WHERE {key} = ?", (one,))
        [(second,)] = self(f"SELECT {column} FROM {table} WHERE {key} = ?", (other,))
        assert first != second
        self(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (second, one))
        self(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (first, other))


def encrypted_columns() -> list[EncryptedColumn]:
    """All encrypted columns of all tables with rows that stay."""
    tables = [table for table in all_tables().values() if not table.volatile]
    return [column for table in tables for column in table.encrypted_columns.values()]


def is_encrypted(column: EncryptedColumn, value: Any) -> bool:
    """Whether a stored value is encrypted."""
    if value is None:
        return True
    if column.kind == "index":
        return bool(value.startswith(INDEX_MARK if isinstance(value, bytes) else INDEX_TEXT_MARK))
    start: Any = MARK if column.kind == "bytes" else TEXT_MARK
    return bool(value.startswith(start))


def assert_sealed(raw: Raw) -> dict[str, int]:
    """Every value of every encrypted column is encrypted. How many there are, by column."""
    counts: dict[str, int] = {}
    for column in encrypted_columns():
        values = raw.values(column)
        for value in values:
            assert is_encrypted(column, value), (column.label, value)
        counts[column.label] = sum(value is not None for value in values)
    return counts
