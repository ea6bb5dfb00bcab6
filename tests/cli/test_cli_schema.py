"""`--schema` and PERDURE_SCHEMA: every family of commands on a store in a schema of its own, on a real PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from cli_runs_kit import Run

import perdure


@pytest.fixture
def url(empty_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with a store in schema `agents`, and none in the usual one. The commands find it by PERDURE_STORE."""
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERDURE_STORE", empty_postgres_url)
    with perdure.open(empty_postgres_url, schema="agents") as store:
        alice = store.thread("alice")
        for n in range(3):
            alice.save({"n": n}, note=f"turn {n}")
    return empty_postgres_url


# In this order: the last ones remove something.
COMMANDS = [
    (["threads"], "alice"),
    (["log", "alice"], "turn 2"),
    (["show", "alice"], '"n": 2'),
    (["diff", "alice", "@0"], "~ n: 0 -> 2"),
    (["thread", "fork", "alice", "--name", "bob"], "as bob"),
    (["store", "verify"], "no problems"),
    (["store", "stats"], "checkpoints"),
    (["store", "health"], "last save"),
    (["retention", "threads=30d"], "30d"),
    (["thread", "pin", "alice", "--name", "good"], "pinned"),
    (["store", "compact", "--dry-run"], "dry run"),
    (["store", "repair"], "no damage: 3 checkpoints"),
    (["thread", "transfer", "alice", "alice.db"], "1 thread with 3 checkpoints"),
    (["store", "role", "app", "schema_reader", "--apply"], "role schema_reader is ready: app"),
    (["thread", "rollback", "alice", "@0"], "alice is back"),
    (["thread", "prune", "alice", "--keep", "1", "--yes"], "of alice removed"),
    (["thread", "erase", "bob", "--yes"], "erased bob"),
]


def test_every_command_looks_where_it_is_told(run: Run, url: str) -> None:
    for command, words in COMMANDS:
        code, _, err = run(*command)
        assert code in (2, 4), [*command, err]  # there is nothing in the usual schema
        code, out, err = run(*command, "--schema", "agents")
        assert (code, words in out) == (0, True), [*command, out + err]


def test_the_environment_names_the_schema_and_the_option_goes_before_it(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_SCHEMA", "agents")
    assert run("threads")[0] == 0
    assert run("threads", "--schema", "agents")[0] == 0
    code, _, err = run("--schema", "others", "threads")
    assert code == 4
    assert 'no Perdure store in schema "others": check the URL and the schema (schema=…, --schema)' in err
    perdure.open("file.db").close()
    assert (
        run("store", "verify", "--store", "file.db")[0] == 0
    )  # a file has no schema, and the variable is not meant for it


def test_a_schema_of_a_file_and_a_name_that_is_none_are_refused(run: Run, url: str) -> None:
    perdure.open("file.db").close()
    code, _, err = run("threads", "--store", "file.db", "--schema", "agents")
    assert (code, "--schema is for PostgreSQL" in err) == (2, True)
    code, _, err = run("threads", "--schema", "Agents; DROP")
    assert (code, "a schema's name is" in err) == (2, True)
    code, _, err = run("drill", "app.py:travel", "--schema", "agents")
    assert (code, "a store of its own" in err) == (2, True)


def test_a_backup_is_tried_and_restored_into_another_schema(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run("store", "backup", "agents.backup", "--schema", "agents")
    assert code == 0, err
    assert "`perdure store restore agents.backup --test`" in err
    code, out, err = run("store", "restore", "agents.backup", "--test", "--schema", "agents")
    assert (code, "can be restored: 1 thread, 3 checkpoints" in out) == (0, True), err
    code, out, err = run("store", "restore", "agents.backup", url, "--schema", "copy")
    assert (code, 'schema "copy"' in out) == (0, True), err
    code, out, _ = run("threads", "--json", "--schema", "copy")
    assert json.loads(out)["name"] == "alice"
    monkeypatch.setenv("PERDURE_SCHEMA", "second_copy")
    code, out, err = run("store", "restore", "agents.backup", url)
    assert (code, 'schema "second_copy"' in out) == (0, True), err
    code, out, err = run("store", "restore", "agents.backup", url)
    assert (code, "--schema" in err) == (2, True), err  # in this side's words: it is not empty


def test_a_thread_and_a_langgraph_database_are_imported_there(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("thread", "transfer", "alice", "alice.db", "--schema", "agents")
    monkeypatch.setenv("PERDURE_SCHEMA", "new_one")
    code, _, err = run("thread", "transfer", "alice", url, "--store", "alice.db")
    monkeypatch.delenv("PERDURE_SCHEMA")
    assert code == 0, err
    assert run("log", "alice", "--schema", "new_one")[0] == 0
    with closing(sqlite3.connect("old.sqlite")) as old:
        old.executescript(
            """CREATE TABLE checkpoints (thread_id TEXT, checkpoint_ns TEXT, checkpoint_id TEXT,
                 parent_checkpoint_id TEXT, type TEXT, checkpoint BLOB, metadata BLOB);
               CREATE TABLE writes (thread_id TEXT, checkpoint_ns TEXT, checkpoint_id TEXT, task_id TEXT, idx INTEGER,
                 channel TEXT, type TEXT, value BLOB);"""
        )
    code, out, err = run("store", "import-langgraph", "old.sqlite", "--schema", "newer")
    assert (code, "imported 0 checkpoints" in out) == (0, True), err
    assert run("threads", "--schema", "newer")[0] == 0


def test_a_worker_serves_it(run: Run, url: str, tmp_path: Path) -> None:
    app = tmp_path / "schema_app.py"
    app.write_text(
        "import perdure\n\n\n@perdure.durable(name='schema-greet')\ndef greet(who):\n    return f'hello {who}'\n"
    )
    from perdure.runs.workers.loading import load_app

    with perdure.open(url, schema="agents") as store:
        store.start(load_app(str(app)).greet, "ann", id="greet-1")
    code, out, err = run("worker", str(app), "--once", "--schema", "agents")
    assert (code, "1 done" in out) == (0, True), err
    code, out, _ = run("runs", "--schema", "agents", "--json")
    assert json.loads(out)["status"] == "done"


def test_keys_rotate_there(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KEYS", "keys.json")
    assert run("key", "new")[0] == 0
    with perdure.open(url, schema="sealed", keys="env") as store:
        store.thread("alice").save({"n": 1})
    code, _, err = run("key", "rotate", "--new", "--schema", "sealed")
    assert code == 0, err
    assert run("show", "alice", "--schema", "sealed")[0] == 0


def test_the_doctor_looks_there(run: Run, url: str) -> None:
    _, out, _ = run("doctor")
    assert "check the URL and the schema (schema=…, --schema)" in out
    _, out, err = run("doctor", "--schema", "agents", "--json")
    found = {finding["check"]: finding for finding in json.loads(out)["findings"]}
    assert found["place"]["level"] == "ok", err


def test_a_schema_in_the_url_is_told_where_it_belongs(run: Run, url: str) -> None:
    """As other libraries have it. libpq would refuse the whole URL."""
    for query in ("schema=agents", "currentSchema=agents"):
        code, _, err = run("threads", "--store", f"{url}?{query}")
        assert code in (2, 4)
        assert f"leave {query.partition('=')[0]}= out of it, and give it as schema=… (--schema)" in err
        assert "%40" not in err  # nothing is wrong with the password
    code, _, err = run("store", "import-langgraph", f"{url}?schema=old")
    assert (code, "?options=-csearch_path%3DNAME" in err) == (2, True), err


def test_a_file_is_transferred_into_a_schema(run: Run, url: str) -> None:
    with perdure.open("local.db") as store:
        store.memory("users").put("ann", {"fact": "hikes"})
    code, out, err = run("store", "transfer", url, "--store", "local.db", "--schema", "agents")
    assert (code, "the target is not empty: name another file or schema" in err) == (2, True), err
    code, out, err = run("store", "transfer", url, "--store", "local.db", "--schema", "fresh")
    assert (code, err) == (0, "")
    assert out.endswith(": 0 threads with 0 checkpoints, 0 runs, 1 version of items of memory\n")
    with perdure.open(url, schema="fresh") as store:
        assert [item.value for item in store.memory("users").list()] == [{"fact": "hikes"}]
