"""After `encrypt()` nothing plain is in the store's own files, as far as the database allows it; what may still hold it
is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from sealed_kit import CANARY, OLD, Raw, assert_sealed, fill

import perdure
from perdure import KeyFile, Store
from perdure.cli.app import main
from perdure.log import erasing


def opened(url: str, keys: Any = OLD, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


def relation_files(url: str) -> list[bytes]:
    """The files of all our tables and their indexes, with what is stored out of line, as they are on the disk."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CHECKPOINT")
        rows = connection.execute(
            """WITH ours AS (SELECT oid, reltoastrelid FROM pg_class WHERE relnamespace = 'perdure'::regnamespace
                AND relkind IN ('r', 'i')), every AS (SELECT oid FROM ours UNION SELECT reltoastrelid FROM ours)
            SELECT current_setting('data_directory'), pg_relation_filepath(oid) FROM every WHERE oid <> 0"""
        ).fetchall()
    return [Path(folder, path).read_bytes() for folder, path in rows if path is not None]


def test_full_leaves_nothing_plain_in_postgresqls_files(postgres_url: str) -> None:
    with opened(postgres_url, None) as store:
        fill(store)
    assert any(CANARY.encode() in part for part in relation_files(postgres_url))
    with opened(postgres_url) as store:
        done = store.ops.encrypt(full=True)
    assert not any(CANARY.encode() in part for part in relation_files(postgres_url))
    assert_sealed(Raw(postgres_url))
    assert not any("full=True" in told for told in done.may_remain)
    assert any("write-ahead log" in told for told in done.may_remain)


def test_the_dead_rows_are_vacuumed_and_what_they_leave_is_said(postgres_url: str) -> None:
    with opened(postgres_url, None) as store:
        fill(store)
    with opened(postgres_url) as store:
        done = store.ops.encrypt()
        assert any("full=True" in told for told in done.may_remain)
        dead = Raw(postgres_url)(
            """SELECT c.relname FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
            WHERE c.relnamespace = 'perdure'::regnamespace AND s.vacuum_count = 0 AND c.relname IN
            ('thread', 'tag', 'record', 'body', 'pack', 'write', 'run', 'run_value', 'journal', 'ask', 'answer',
             'signal', 'blob')"""
        )
        assert dead == [], "each table that held something plain was vacuumed"
        assert store.ops.rotate_keys().may_remain == (), "what was there before was not plain"


def test_postgresqls_statistics_hold_nothing_plain(postgres_url: str) -> None:
    """The planner keeps samples of columns, in the clear, where everybody who may read the table can read them."""
    with opened(postgres_url, None) as store:
        for number in range(30):
            store.thread(f"t{number}", metadata={"user": f"{CANARY} {number % 3}"}).save({}, note=f"{CANARY} {number}")
    raw = Raw(postgres_url)
    raw("ANALYZE perdure.tag, perdure.record, perdure.thread")
    stats = """SELECT tablename, attname FROM pg_stats WHERE schemaname = 'perdure' AND
        (most_common_vals::text ~ 'Kanarienvogel' OR histogram_bounds::text ~ 'Kanarienvogel')"""
    assert {table for table, _ in raw(stats)} >= {"tag", "record"}
    with opened(postgres_url) as store:
        store.ops.encrypt()
    assert raw(stats) == []


def test_a_role_that_may_not_vacuum_says_so(postgres_url: str) -> None:
    with opened(postgres_url, None) as store:
        fill(store)
    role = "encrypts_only"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x' BYPASSRLS")
        connection.execute(f"GRANT USAGE ON SCHEMA perdure TO {role}")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA perdure TO {role}")
        connection.execute(f"REVOKE MAINTAIN ON ALL TABLES IN SCHEMA perdure FROM {role}")
        connection.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA perdure TO {role}")
    try:
        url = psycopg.conninfo.make_conninfo(postgres_url, user=role, password="x")
        parts = psycopg.conninfo.conninfo_to_dict(url)
        url = f"postgresql://{role}:x@{parts['host']}:{parts['port']}/{parts['dbname']}"
        with opened(url) as store:
            assert any("may not vacuum" in told and "body" in told for told in store.ops.encrypt().may_remain)
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_a_log_that_somebody_reads_is_named_and_cut_off_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "_TRIES", 1)  # each waits a second
    path = tmp_path / "a.db"
    raw = Raw(str(path))
    with opened(str(path), None) as store:
        fill(store)
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN; SELECT count(*) FROM record").fetchall()
    with opened(str(path)) as store:
        assert any("-wal" in told for told in store.ops.encrypt().may_remain)
        assert any(CANARY.encode() in part for part in raw.everything())
        reader.close()
        assert not any("-wal" in told for told in store.ops.encrypt().may_remain)
        assert not any(CANARY.encode() in part for part in raw.everything()), "while the store is open"


def test_a_backup_that_was_made_before_is_named(tmp_path: Path) -> None:
    with opened(str(tmp_path / "a.db"), None) as store:
        store.thread("a").save({"n": 1})
        store.ops.backup(str(tmp_path / "copy.db"))
    with opened(str(tmp_path / "a.db")) as store:
        assert any("copy.db" in told for told in store.ops.encrypt().may_remain)


def test_the_command_says_what_may_still_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    with opened(str(tmp_path / "a.db"), None) as store:
        store.thread("a").save({"n": 1})
    common = ["--keys", str(file.path), "--store", str(tmp_path / "a.db")]
    assert main(["keys", "encrypt", *common]) == 0
    shown = capsys.readouterr().out
    assert "what may still hold it in the clear:" in shown
    assert "snapshots of the disk" in shown
    assert main(["keys", "encrypt", "--full", *common, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["may_remain"]
    assert main(["keys", "rotate", *common]) == 0
    assert "may still hold" not in capsys.readouterr().out
    assert main(["keys", "rotate", "--full", *common]) == 2
    assert "--full goes with" in capsys.readouterr().err
