"""Lists, searches and counts among a million runs and as many threads, on SQLite and PostgreSQL: the 95th percentile.

The rows are made by SQL, as runs would leave them: 20 functions, five statuses of which 97 % are done, three tags of
which one is rare and one on nine of ten runs. Each figure is of 100 searches with other values, pages of 100 from
anywhere in the list. Beside it is the same among 10,000: a search must not take longer because there is more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import psycopg

import perdure
from bench.measure import Row, Run
from perdure import Store
from perdure.runs.tables import INPUT
from perdure.storage.row_hashes import with_hash
from perdure.testing.postgres_server import PostgresServer

MANY, FEW = 1_000_000, 10_000
ROUNDS = 100
BAR_MS = 10.0
START_US = 1_700_000_000_000_000
# `x` is a number from 0 to 999 that looks random, `k` the number of the run.
_RUN = {
    "tenant": "1", "run": "k", "id": "f || '-' || k", "function": "f", "version": "'1'", "input": "{input}",
    "incarnation": "{bytes}", "root": "k", "origin_seq": "0",
    "status": """CASE WHEN x < 970 THEN 'done' WHEN x < 990 THEN 'failed' WHEN x < 995 THEN 'waiting'
        WHEN x < 999 THEN 'queued' ELSE 'paused' END""",
    "queue": "CASE WHEN x % 3 = 0 THEN 'slow' ELSE 'default' END",
    "priority": "0", "fence": "1", "lease_until": "0", "wake_at": "2305843009213693952", "wakeup_pending": "0",
    "entries": "5", "digest": "1", "seq": "5", "since": "0",
    "created_at": "{start} + k * 1000000", "changed_at": "{start} + k * 1000000", "cut": "0",
}  # fmt: skip
_NUMBERS = {
    "sqlite": """WITH RECURSIVE n (k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < {count}),
        made AS (SELECT k, k * 2654435761 % 4294967296 / 65536 % 1000 AS x, 'fn' || (k * 40503 / 7 % 20) AS f FROM n)""",
    "postgres": """WITH made AS (SELECT k, k * 2654435761 % 4294967296 / 65536 % 1000 AS x,
        'fn' || (k * 40503 / 7 % 20) AS f FROM generate_series(1, {count}::bigint) k)""",
}
_TAGS = (
    "'customer', 'c-' || (k * 7919 % 10000)",
    "'env', CASE WHEN x % 10 < 9 THEN 'prod' ELSE 'test' END",
    "'model', 'm' || (x % 5)",
)
_THREADS = """1, k, k, 'thread-' || k, '{{}}', NULL, NULL, 0, k, 'h', {start} + k * 1000000, {start} + k * 1000000,
    ({start} + k * 1000000) / 60000000, NULL, NULL"""
_THREAD_COLUMNS = (
    "thread, tree, name, metadata, origin, source, generation, head, head_hash, created_at, updated_at, active,"
    " retention, owner"
)


def listings(run: Run) -> list[Row]:
    few, many = run.count(FEW, 200), run.count(MANY, 2000)
    rows: list[Row] = []
    with PostgresServer(fsync=False) as server:
        for name, where in (("SQLite", None), ("PostgreSQL", server)):
            times = {}
            for count in (few, many):
                with _filled(where, run.folder, count) as store:
                    times[count] = {title: p95(search) for title, search in searches(store, count).items()}
            rows += [
                Row(f"{name}, {many:,} runs and threads: {title}", times[many][title], "ms", floor=times[few][title],
                    bar=BAR_MS, judged="ours", note=f"p95; floor: the same among {few:,}")
                for title in times[many]
            ]  # fmt: skip
    return rows


@contextmanager
def _filled(server: PostgresServer | None, folder: Path, count: int) -> Iterator[Store]:
    if server is None:
        url = str(folder / f"{count}.db")
        perdure.open(url, durability="normal").close()
        fill_sqlite(url, count)
    else:
        url = server.create_database(f"listed_{count}")
        perdure.open(url).close()
        fill_postgres(url, count)
    with perdure.open(url) as store:
        yield store


def statements(dialect: str, count: int, **columns: str) -> list[str]:
    """Return the SQL that makes the rows; the tenant has the number 1. `columns` are other values of runs."""
    made = _NUMBERS[dialect].format(count=count)
    of_input = (
        "input_of(f || '-' || k, f)" if dialect == "sqlite" else "(SELECT i.input FROM inputs i WHERE i.k = made.k)"
    )
    values = ", ".join((_RUN | columns).values())
    values = values.format(start=START_US, input=of_input, bytes="x'79'" if dialect == "sqlite" else "'y'::bytea")
    texts = [f"INSERT INTO run ({', '.join(_RUN)}) {made} SELECT {values} FROM made"]
    texts += [
        f"INSERT INTO run_tag (tenant, key, value, at, run) {made} SELECT 1, {tag}, {START_US} + k * 1000000, k FROM made"
        for tag in _TAGS
    ]
    threads = _THREADS.format(start=START_US).replace("'h'", "'h'::bytea" if dialect == "postgres" else "x'68'")
    texts.append(f"INSERT INTO thread (tenant, {_THREAD_COLUMNS}) {made} SELECT {threads} FROM made")
    # A thread's tags hold JSON.
    texts += [
        f"""INSERT INTO tag (tenant, key, value, thread) {made}
        SELECT 1, {tag.partition(",")[0]}, '"' || ({tag.partition(",")[2]}) || '"', k FROM made"""
        for tag in _TAGS
    ]
    return texts


def input_of(run_id: str, function: str) -> bytes:
    """Return what the column `input` of a run holds: a digest of its arguments, and a hash of that."""
    return bytes(with_hash(INPUT, 1, (run_id, function), b"x" * 16))


def fill_sqlite(path: str, count: int, **columns: str) -> None:
    connection = apsw.Connection(path)
    connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -200000; BEGIN")
    connection.execute("INSERT INTO tenant (tenant, name) VALUES (1, 'default')")
    connection.create_scalar_function("input_of", input_of, 2)  # type: ignore[arg-type]
    for text in statements("sqlite", count, **columns):
        connection.execute(text)
    connection.execute("UPDATE counter SET number = ?; COMMIT", (count + 1,))
    connection.close()


def fill_postgres(url: str, count: int, **columns: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET search_path = perdure; SET synchronous_commit = off")
        connection.execute("INSERT INTO tenant (tenant, name) VALUES (1, 'default')")
        # A trigger for each of a million rows would take minutes: the counts are added at once.
        connection.execute("ALTER TABLE run DISABLE TRIGGER USER")
        connection.execute("CREATE TEMP TABLE inputs (k bigint PRIMARY KEY, input bytea)")
        with connection.cursor().copy("COPY inputs FROM STDIN") as copy:
            for k in range(1, count + 1):
                function = f"fn{k * 40503 // 7 % 20}"
                copy.write_row((k, input_of(f"{function}-{k}", function)))
        for text in statements("postgres", count, **columns):
            connection.execute(text.encode())
        connection.execute(
            """INSERT INTO run_count (tenant, function, version, queue, status, shard, n)
            SELECT tenant, function, version, queue, status, 0, count(*) FROM run GROUP BY 1, 2, 3, 4, 5"""
        )
        connection.execute("ALTER TABLE run ENABLE TRIGGER USER")
        connection.execute("SELECT setval('number', %s)", (count + 1,))
        connection.execute("VACUUM ANALYZE run, run_tag, thread, tag, run_count")


def searches(store: Store, count: int) -> dict[str, Callable[[], object]]:
    chance = random.Random(1)

    def cursor() -> str:
        number = chance.randrange(count // 2, count)
        return f"{START_US + number * 1_000_000}.{number}"

    def customer() -> dict[str, str]:
        return {"customer": f"c-{chance.randrange(10_000)}"}

    def function() -> str:
        return f"fn{chance.randrange(20)}"

    return {
        "list": lambda: store.runs(before=cursor()),
        "a status": lambda: store.runs(statuses="failed", before=cursor()),
        "a function": lambda: store.runs(function=function(), before=cursor()),
        "function, queue, status": lambda: store.runs(function=function(), queue="slow", statuses="failed"),
        "a rare tag": lambda: store.runs(tags=customer(), before=cursor()),
        "a common tag": lambda: store.runs(tags={"env": "prod"}, before=cursor()),
        "two tags": lambda: store.runs(tags={"env": "test", **customer()}),
        "two common tags": lambda: store.runs(tags={"env": "prod", "model": "m3"}, before=cursor()),
        "a common tag and a status": lambda: store.runs(tags={"env": "prod"}, statuses="failed", before=cursor()),
        "a prefix of ids": lambda: store.runs(id_prefix=f"fn3-{chance.randrange(100, 999)}"),
        "a common prefix": lambda: store.runs(id_prefix="fn3-", before=cursor()),
        "count by status": lambda: store.count_runs(),
        "count by function, of a status": lambda: store.count_runs("function", statuses="failed"),
        "count a rare tag": lambda: store.count_runs(tags=customer()),
        "count a common tag": lambda: store.count_runs(tags={"env": "prod"}),
        "threads: list": lambda: store.threads(before=cursor()),
        "threads: a rare tag": lambda: store.threads(where=customer()),
        "threads: a common tag": lambda: store.threads(where={"env": "prod"}, before=cursor()),
        "threads: two tags": lambda: store.threads(where={"env": "test", **customer()}),
        "threads: a prefix": lambda: store.threads(name_prefix=f"thread-{chance.randrange(100, 999)}"),
        "threads: count a rare tag": lambda: store.count_threads(where=customer()),
        "threads: count": lambda: store.count_threads(),
    }


def p95(search: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the 95th percentile in milliseconds, after a first call that does not count."""
    search()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        search()
        times.append(time.perf_counter() - began)
    return sorted(times)[int(len(times) * 0.95)] * 1000
