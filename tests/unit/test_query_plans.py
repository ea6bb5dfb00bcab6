"""How SQLite runs every statement: no scan of a large table, and no loop over one inside of another.

All statements are looked at without being listed: those that modules hold are found in memory, those that are put
together when they are run are caught while a scenario runs. With the statistics of a new store no index is missed; also
without any, nothing large is scanned.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import apsw
import pytest
from statements import sql_modules

import perdure
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Sql
from perdure.storage.sqlite import snapshot_views, writer
from perdure.storage.sqlite.statements import Text, prepare

# Part of a statement, and why it may read all of a table.
EXCEPTIONS = {
    "FROM ask WHERE status = 'open' AND kind = 'doubt'": "health counts what is open, by partial indexes",
    "SELECT 1 WHERE EXISTS": "it stops at the first row",
    "SELECT EXISTS (SELECT 1 FROM meta": "doctor: whether any thread has a retention",
    "sum(length(diff))": "stats adds up the whole store",
    "SELECT id FROM body WHERE tenant = :tenant EXCEPT": "verify compares all bodies with all records",
    "FROM memory_vector AS v WHERE": "verify and repair compare all vectors with all items",
    "SELECT count(*) FROM run WHERE status IN": "doctor: what finished runs leave, of all tenants",
    "SELECT substr(salt, 1, 3) FROM body": "doctor looks at the first bodies",
    "r.size > :large": "doctor: the largest heads of all threads",
    "policy FROM memory_space": "maintenance visits all namespaces that have a policy",
    "FROM memory_space ORDER BY items DESC": "doctor: the largest namespaces",
    "UPDATE run SET": "a restored store fences off all unfinished runs",
    "UPDATE thread SET generation = generation + 1048576": "a restored store fences off all threads",
    "(SELECT 0 AS n UNION ALL": "three rows per record",
    "WITH RECURSIVE family (run)": "no index leads from a run to those that it started",
    "WHERE 1 = 1": "a copy of the whole store, page by page",
    "AND (l.stamp < 0 OR l.stamp >": "verify of a snapshot looks at every row",
    "SELECT DISTINCT queue FROM run WHERE status IN": "a test's clock looks for due runs in all queues",
    "_past": "what snapshots keep is removed and counted as a whole",
    "NOT EXISTS (SELECT 1 FROM tenant": "repair looks for rows of unknown tenants",
    "UNION ALL SELECT 1 FROM run_count": "a worker looks once, when it starts, whether anything uses its queues",
    "count(*) AS drilled": "a drill counts the runs of its own stores",
}
LIVE_ONLY = {"r.parent >= :id": "removal asks whether a checkpoint is before another"}
_SMALL = {"deployment", "queue"}  # a row per function or queue
_TENANT_OR_TREE = re.compile(r"\(tenant=\?(?: AND tree=\?)?\)")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every statement of SQLite's, as far as it is known."""
    sql_modules()
    gc.unfreeze()  # else objects that were set aside are not listed
    statements = {text for sql in gc.get_objects() if type(sql) is Sql for text in sql.sqlite}
    gc.freeze()
    return statements | set(_run_scenario(tmp_path_factory.mktemp("plans") / "a.db"))


@pytest.fixture(scope="module", params=["as stores are made", "no statistics"])
def explain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> apsw.Connection:
    path = str(tmp_path_factory.mktemp("explain") / "a.db")
    with perdure.open(path, durability="normal") as store:
        store.thread("a").save({})
        store.snapshot("s")
    connection = apsw.Connection(path)
    if request.param == "no statistics":
        connection.execute("DELETE FROM sqlite_stat1")
        connection = apsw.Connection(path)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


def test_no_statement_scans_a_large_table(explain: apsw.Connection, texts: set[str]) -> None:
    partial = {name for (name,) in explain.execute("SELECT name FROM sqlite_schema WHERE sql LIKE '%INDEX% WHERE %'")}
    assert len(texts) > 400
    slow = {
        text: bad
        for text in map(_flat, texts)
        if not any(part in text for part in EXCEPTIONS) and (bad := list(_bad_loops(explain, text, partial)))
    }
    assert slow == {}


@pytest.fixture(scope="module")
def explain_at_a_snapshot(tmp_path_factory: pytest.TempPathFactory) -> apsw.Connection:
    path = str(tmp_path_factory.mktemp("explain_at") / "a.db")
    with perdure.open(path, durability="normal") as store:
        store.thread("a").save({})
        store.snapshot("s")
    connection = apsw.Connection(path)
    snapshot_views.show(connection, 1)
    return connection


def test_no_step_of_a_recursion_reads_a_whole_table_at_a_snapshot(
    explain_at_a_snapshot: apsw.Connection, texts: set[str]
) -> None:
    """There a table is a union. SQLite builds it whole, at each step, if the recursion joins it."""
    recursive = [text for text in map(_flat, texts) if text.startswith("WITH RECURSIVE") and "record r" in text]
    slow = [text for text in recursive if _built_unions(explain_at_a_snapshot, text)]
    assert len(recursive) > 6
    assert [text for text in slow if not any(part in text for part in LIVE_ONLY)] == []
    assert all(any(part in text for text in slow) for part in LIVE_ONLY)


def _built_unions(connection: apsw.Connection, text: str) -> list[str]:
    parameters: Mapping[str, Any] = defaultdict(lambda: None)
    try:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", parameters).fetchall()
    except apsw.SQLError:
        return []  # PostgreSQL's
    return [detail for *_, detail in plan if detail in {f"MATERIALIZE {name}" for name in versioned_tables()}]


def test_every_exception_is_one(explain: apsw.Connection, texts: set[str]) -> None:
    flat = [_flat(text) for text in texts]
    assert [part for part in EXCEPTIONS if not any(part in text for text in flat)] == []


def test_a_bad_order_of_a_join_is_seen(explain: apsw.Connection) -> None:
    walk = """WITH RECURSIVE line (id) AS (SELECT 1 UNION ALL
        SELECT r.parent FROM record r CROSS JOIN line l WHERE r.tenant = 1 AND r.tree = 1 AND r.id = l.id)
        SELECT id FROM line"""
    assert list(_bad_loops(explain, _flat(walk), set()))
    assert list(_bad_loops(explain, "SELECT 1 FROM record WHERE hash = :hash", set()))
    assert not list(_bad_loops(explain, "SELECT 1 FROM record WHERE tenant = :a AND tree = :b AND id = :c", set()))


def _bad_loops(connection: apsw.Connection, text: str, partial: set[str]) -> Iterator[str]:
    """The steps of a plan that read all of a large table, or all of anything once per row of another."""
    if not text:
        return
    names = dict(re.findall(r"(?:FROM|JOIN|UPDATE|INTO) (\w+)(?= (?:AS )?(\w+))", text))
    aliases = {alias: table for table, alias in names.items()}
    large = {name + end for name in versioned_tables().keys() - _SMALL for end in ("", "_past")}
    parameters: Mapping[str, Any] = defaultdict(lambda: None)
    inner: set[object] = set()
    try:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", parameters).fetchall()
    except apsw.SQLError:
        return  # PostgreSQL's
    for row in plan:
        parent, detail = row[1], str(row[3])
        step = re.match(r"(SCAN|SEARCH) (\w+)(.*)", detail)
        if step is None:
            continue
        kind, name, how = step[1], step[2], step[3]
        index = re.search(r"INDEX (\w+)", how)
        is_small = bool(index and index[1] in partial) or "VIRTUAL TABLE" in how
        is_large = {name, aliases.get(name)} & large
        is_inner = parent in inner
        table = aliases.get(name, name)
        misses = (
            bool(_statistics(connection))
            and "(tenant=?)" in how
            and any(
                re.search(rf"(?<!\w)(?:{name}\.)?{column} = :", text)
                for column in _second_columns(connection, str(table))
            )
        )
        scans = kind == "SCAN" and not is_small and (is_large or is_inner)
        repeats = kind == "SEARCH" and is_large and is_inner and _TENANT_OR_TREE.search(how)
        if "AUTOMATIC" in how or scans or repeats or misses:
            yield detail
        inner.add(parent)


def _statistics(connection: apsw.Connection) -> list[Any]:
    return connection.execute("SELECT 1 FROM sqlite_stat1 LIMIT 1").fetchall()


def _second_columns(connection: apsw.Connection, table: str) -> set[str]:
    """What the rows of a tenant can be searched by."""
    found = connection.execute(
        """SELECT c.name FROM pragma_index_list(?) i, pragma_index_info(i.name) c WHERE c.seqno = 1
        AND EXISTS (SELECT 1 FROM pragma_index_info(i.name) f WHERE f.seqno = 0 AND f.name = 'tenant')""",
        (table,),
    )
    return {str(name) for (name,) in found}


def _flat(text: str) -> str:
    return " ".join(text.split())


def _run_scenario(path: Path) -> set[str]:
    """The statements that are put together when they are run."""
    seen: set[str] = set()

    def catch(sql: Sql) -> tuple[Text, ...]:
        seen.update(sql.sqlite)
        return prepare(sql)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "prepare", catch)
        with perdure.open(str(path), durability="normal") as store:
            thread = store.thread("a", metadata={"user": "ann"})
            for number in range(3):
                thread.save({"n": number})
            fork = thread.fork(name="b")
            fork.save({"n": 4})
            store.threads(where={"user": "ann"})
            memory = store.memory("users/ann")
            memory.put("drink", "likes tea")
            memory.search("tea")
            first = store.snapshot("first")
            thread.save({"n": 5})
            second = store.snapshot("second")
            first.diff(second)
            store.restore(first)
            first.verify()
            first.held_bytes()
            first.release()
            store.ops.verify()
            store.ops.stats()
            store.ops.doctor()
            store.ops.health()
            store.ops.compact()
            store.ops.erase("b")
            store.ops.transfer(str(path.with_name("copy.db")))
    return {text for text in seen if re.match(r"\s*(SELECT|WITH|UPDATE|DELETE|INSERT)", text)}
