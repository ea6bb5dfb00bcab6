"""LangGraph on PostgreSQL: the long chat and many short ones, beside `langgraph-checkpoint-postgres`.

The server is a real one with fsync on, started for this; each saver has a database of its own on it. Sizes are those
of all tables there with their indexes and what is stored out of line. Client and server share the machine's cores.
The peer stores a channel's value once per version, not once per checkpoint as on SQLite, so the factors are smaller.
"""

from __future__ import annotations

import psycopg

from bench.langgraph_chat import Rival, floor_bytes, long_chat, short_chats
from bench.langgraph_history import readings
from bench.langgraph_sqlite import SHORT_TURNS
from bench.measure import MB, Row, Run
from perdure.testing.postgres_server import PostgresServer

TIME_BAR = 4.0
SIZE = """
SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
"""


def langgraph_postgres(run: Run) -> list[Row]:
    with PostgresServer(fsync=True) as server:
        return [*_long(server, run), *_short(server, run)]


def _rivals(server: PostgresServer, name: str) -> tuple[Rival, Rival, Rival]:
    stock = Rival("postgres", server.create_database(f"stock_{name}"))
    ours = Rival("perdure", server.create_database(f"ours_{name}"))
    return stock, ours, Rival("nothing")


def _long(server: PostgresServer, run: Run) -> list[Row]:
    turns = run.count(400, 6)
    stock, ours, nothing = _rivals(server, "long")
    answers = long_chat([stock, ours, nothing], turns, get_states=run.count(21, 2))
    floor = floor_bytes(answers) / MB
    stock_mb, ours_mb = _mb(stock), _mb(ours)
    peer, read = readings([stock, ours], turns)
    name = f"LangGraph PG, {turns:,} turns"
    return [
        Row(f"{name}: size", ours_mb, "MB", stock_mb, floor, stock_mb / ours_mb,
            note="peer: stock PostgreSQL saver; floor: the texts once, zstd"),
        Row(f"{name}: time", ours.took_s, "s", stock.took_s, nothing.took_s, stock.took_s / ours.took_s, TIME_BAR,
            "at least", note="floor: a saver that stores nothing; fsync on"),
        Row("  CPU, over a saver that stores nothing", ours.cpu_s, "s", stock.cpu_s, nothing.cpu_s,
            ours.cpu_s / nothing.cpu_s),
        Row(f"  history of {read.states:,} states", read.history_s, "s", peer.history_s, None,
            peer.history_s / read.history_s,
            note=f"a new process, at most {read.peak_bytes / MB:.0f} MB; peer's {peer.peak_bytes / MB:.0f} MB"),
        Row("  and every message in it read", read.all_s, "s", peer.all_s, None, peer.all_s / read.all_s),
        Row("  get_state at the end", ours.get_state_ms, "ms", stock.get_state_ms, nothing.get_state_ms,
            stock.get_state_ms / ours.get_state_ms),
        Row("  get_state in a new process", read.first_s * 1000, "ms", peer.first_s * 1000, None,
            peer.first_s / read.first_s),
    ]  # fmt: skip


def _short(server: PostgresServer, run: Run) -> list[Row]:
    threads = run.count(200, 4)
    stock, ours, nothing = _rivals(server, "short")
    answers = short_chats([stock, ours, nothing], threads, SHORT_TURNS)
    stock_mb, ours_mb = _mb(stock), _mb(ours)
    return [
        Row(f"LangGraph PG, {threads} short threads: size", ours_mb, "MB", stock_mb, floor_bytes(answers) / MB,
            stock_mb / ours_mb, note=f"{SHORT_TURNS} turns each"),
        Row("  time", ours.took_s, "s", stock.took_s, nothing.took_s, stock.took_s / ours.took_s),
    ]  # fmt: skip


def _mb(rival: Rival) -> float:
    with psycopg.connect(rival.location) as connection:
        row = connection.execute(SIZE).fetchone()
    assert row is not None
    return float(row[0]) / MB
