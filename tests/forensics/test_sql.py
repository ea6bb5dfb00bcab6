"""SQL over what a tenant stores, on every kind of store: contents, not encodings. A query reaches nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cli import main
from perdure.forensics import export_parquet, sql, sql_tables

HOSTILE = {"nul": "a\x00b", "surrogate": "\ud800", "big": 2**70, "quote": "'; DROP TABLE states; --", "none": None}


@perdure.step
def look_up(city: str) -> dict[str, Any]:
    return {"city": city, "api_key": "sk-1234567890abcdef"}


@perdure.durable
def sql_trip(city: str) -> str:
    return str(look_up(city)["city"])


def fill(store: perdure.Store) -> None:
    """Save two threads (one with a branch), a run and an item of memory."""
    thread = store.thread("alice", metadata={"team": "red"})
    first = thread.save({"city": "Oslo", "n": 1, "password": "hunter2"})
    thread.save({"city": "Oslo", "n": 2})
    thread.rollback(first)
    thread.save({"city": "Rome", "n": 3})
    store.thread("bob").save(HOSTILE)
    store.run(sql_trip, "Oslo", id="trip")
    store.memory("users", "a/b").put("home", {"city": "Oslo"})
    store.memory("users", "a/b").put("home", {"city": "Rome"})
    store.tenant("other").thread("carol").save({"city": "Oslo"})


def test_a_query_sees_contents_of_its_tenant_alone(store: perdure.Store) -> None:
    fill(store)

    def rows(query: str) -> list[tuple[Any, ...]]:
        return sql(store, query).rows

    assert rows("SELECT tenant, thread, metadata->>'team' FROM threads ORDER BY thread") == [
        ("default", "alice", "red"),
        ("default", "bob", None),
    ]
    cities = "SELECT state->>'city', count(*) FROM states WHERE thread = 'alice' GROUP BY 1 ORDER BY 1"
    assert rows(cities) == [("Oslo", 3), ("Rome", 1)]  # with the branch that was left, and the rollback
    heads = (
        "SELECT state->>'n' FROM states JOIN checkpoints USING (tenant, checkpoint) WHERE is_head AND size_bytes > 0"
    )
    assert ("3",) in rows(heads)
    assert rows("SELECT run, status, arguments->>'city', result->>'$' FROM runs") == [("trip", "done", "Oslo", "Oslo")]
    assert rows("SELECT name, ended_at >= started_at, result->>'city' FROM steps") == [("look_up", True, "Oslo")]
    memory = "SELECT namespace[2], value->>'city', is_current FROM memory ORDER BY version"
    assert rows(memory) == [("a/b", "Oslo", False), ("a/b", "Rome", True)]
    assert sql(store.tenant("other"), "SELECT tenant, thread FROM threads").rows == [("other", "carol")]


def test_secrets_are_masked_and_any_value_is_json(store: perdure.Store) -> None:
    fill(store)
    [(text,)] = sql(store, "SELECT state FROM states WHERE thread = 'bob'").rows
    shown = json.loads(text)
    assert shown["big"] == 2**70
    assert shown["quote"] == HOSTILE["quote"]
    assert shown["none"] is None
    query = "SELECT result->>'api_key' FROM steps UNION ALL SELECT state->>'password' FROM states WHERE step = 0"
    assert {row[0] for row in sql(store, query).rows} == {"***", None}
    assert {row[0] for row in sql(store, query, reveal=True).rows} == {"sk-1234567890abcdef", "hunter2", None}


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM 'https://example.org/a.parquet'",
        "COPY (SELECT 1) TO 'out.csv'",
        "SELECT 1; COPY (SELECT 1) TO 'out.csv'",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM store",  # a variable of this process
        "SELECT nothing FROM threads",
        "SELEC",
    ],
)
def test_a_query_reaches_neither_files_nor_the_network(query: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with perdure.open(":memory:") as store, pytest.raises(perdure.UsageError):
        sql(store, query)
    assert not list(tmp_path.iterdir())


def test_a_query_that_may_read_files_does() -> None:
    with perdure.open(":memory:") as store:
        assert sql(store, "SELECT count(*) > 0 FROM glob('/*')", files=True).rows == [(True,)]


def test_parquet_has_the_schema_and_every_row(tmp_path: Path, store: perdure.Store) -> None:
    import duckdb

    fill(store)
    counts = export_parquet(store, tmp_path / "out")
    assert counts == {
        "threads.parquet": 2,
        "checkpoints.parquet": 5,
        "states.parquet": 5,
        "runs.parquet": 1,
        "steps.parquet": 1,
        "memory.parquet": 2,
    }
    for name, columns in sql_tables().items():
        read = duckdb.execute(f"DESCRIBE SELECT * FROM read_parquet('{tmp_path}/out/{name}.parquet')").fetchall()
        assert {row[0]: row[1] for row in read} == columns
    store.thread("carol").save({"n": 1})
    assert export_parquet(store, tmp_path / "out")["threads.parquet"] == 3, "files of these names are replaced"
    assert {(file.suffix, file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()} == {
        (".parquet", 0o600)
    }
    store.delete_thread("carol")
    one = tmp_path / "one.parquet"
    assert export_parquet(store, one, query="SELECT thread FROM threads") == {"one.parquet": 2}
    assert duckdb.execute(f"SELECT * FROM '{one}' ORDER BY 1").fetchall() == [("alice",), ("bob",)]


def test_a_snapshot_and_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "agent.db")
    with perdure.open(place) as store:
        store.thread("alice").save({"n": 1})
        snapshot = store.snapshot("friday")
        store.thread("alice").save({"n": 2})
        assert len(sql(snapshot, "SELECT * FROM states").rows) == 1
    query = "SELECT thread, state->>'n' AS n, saved_at FROM states ORDER BY step"
    assert main(["store", "sql", query, "--store", place]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["thread", "n", "saved_at"]
    assert main(["store", "sql", query, "--json", "--store", place, "--snapshot", "friday"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == "1"
    assert main(["store", "sql", "--store", place]) == 0
    assert "states" in capsys.readouterr().out
    assert main(["store", "sql", query, "--parquet", str(tmp_path / "n.parquet"), "--store", place]) == 0
    assert main(["store", "parquet", str(tmp_path / "all"), "--store", place]) == 0
    assert sorted(file.stem for file in (tmp_path / "all").iterdir()) == sorted(sql_tables())
    assert main(["store", "sql", "DELETE FROM threads", "--store", place]) == 2
