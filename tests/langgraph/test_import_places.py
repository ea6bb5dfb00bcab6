"""Sources that cannot be imported, and why; each error names what to do. Nothing is made or changed for them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import psycopg
import pytest
from graph_kit import at, human, talking
from import_kit import everything, stock

import perdure
from perdure.errors import NotFound, OpenError, UsageError
from perdure.langgraph import PerdureSaver
from perdure.langgraph.importing import import_langgraph


@pytest.fixture
def old(tmp_path: Path) -> str:
    path = str(tmp_path / "old.sqlite")
    with stock(path) as saver:
        talking(saver).invoke({"messages": [human("hi")]}, at("t"))
    return path


def refused(tmp_path: Path, source: str | Path, error: type[Exception], said: str) -> None:
    """The import is refused, and no store was made."""
    target = tmp_path / "never.db"
    with pytest.raises(error, match=said):
        import_langgraph(source, str(target))
    assert not target.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path, tmp_path / "no.sqlite", OpenError, "there is no file .*no.sqlite")
    refused(tmp_path, tmp_path, OpenError, "there is no file")
    refused(tmp_path, ":memory:", UsageError, "a database in memory")
    refused(tmp_path, "mysql://host/db", UsageError, "no driver for mysql")


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to be one" * 100])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "old.sqlite"
    path.write_bytes(content)
    refused(tmp_path, path, UsageError, "is not a database of LangGraph's checkpointers")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE writes", "it has no table 'writes'"),
        ("DROP TABLE checkpoints", "it has no table 'checkpoints'"),
        ("ALTER TABLE checkpoints DROP COLUMN metadata", "'checkpoints' has no column metadata"),
        ("ALTER TABLE checkpoints RENAME COLUMN checkpoint_id TO thread_ts", "very old version"),
        ("ALTER TABLE writes RENAME TO w; CREATE VIEW writes AS SELECT * FROM w", "it has no table 'writes'"),
    ],
)
def test_other_tables(tmp_path: Path, old: str, change: str, said: str) -> None:
    connection = sqlite3.connect(old)
    connection.executescript(change)
    connection.close()
    refused(tmp_path, old, UsageError, said)


def test_a_perdure_store_is_no_source(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.db")
    perdure.open(path).close()
    refused(tmp_path, path, UsageError, "it is a Perdure store")


def test_source_and_store_are_the_same_file(tmp_path: Path, old: str) -> None:
    before = sorted(os.listdir(tmp_path))
    (tmp_path / "link.db").symlink_to(old)
    for same in (old, f"sqlite:///{old}", str(tmp_path / "link.db")):
        with pytest.raises(UsageError, match="the same file"):
            import_langgraph(old, same)
    assert {name for name in os.listdir(tmp_path) if "lock" in name} == set()
    assert set(before) <= set(os.listdir(tmp_path))


def test_threads_that_are_not_there(tmp_path: Path, old: str) -> None:
    with PerdureSaver(str(tmp_path / "new.db")) as saver:
        with pytest.raises(NotFound, match="the source has no thread 'x'"):
            import_langgraph(old, saver, threads=["t", "x"])
        with pytest.raises(UsageError, match=r"threads=\['t'\]"):
            import_langgraph(old, saver, threads="t")
        assert everything(saver) == {}


def test_a_row_whose_id_is_not_its_checkpoints(tmp_path: Path, old: str) -> None:
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE checkpoints SET checkpoint_id = 'other' WHERE rowid = 1")
    with pytest.raises(perdure.errors.Undecodable, match="its row says other, but it says itself"):
        import_langgraph(old, str(tmp_path / "new.db"))


def test_ids_that_are_no_uuids(tmp_path: Path) -> None:
    """Any text is an id, and the newest is the greatest, as in the stock savers."""
    path = str(tmp_path / "old.sqlite")
    with stock(path) as saver:
        for number, id_ in enumerate(("b", "a", "ü", "c", "1efffe")):
            checkpoint = {
                "v": 4,
                "id": id_,
                "ts": "not a time",
                "channel_values": {"n": number},
                "channel_versions": {"n": 1},
                "versions_seen": {},
            }
            saver.put(at("t", checkpoint_ns=""), checkpoint, {}, {"n": 1})  # type: ignore[arg-type]
    with PerdureSaver(str(tmp_path / "new.db")) as mine, stock(path) as theirs:
        assert import_langgraph(path, mine).ok
        assert [key[2] for key in everything(mine)] == ["ü", "c", "b", "a", "1efffe"]
        assert mine.get_tuple(at("t")) == theirs.get_tuple(at("t"))


def test_a_database_without_the_tables(tmp_path: Path, postgres_url: str) -> None:
    refused(tmp_path, postgres_url, UsageError, r'database "test_\d+" .*: it has no table \'checkpoints\'')


def test_the_tables_of_the_shallow_saver(tmp_path: Path, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE checkpoints (thread_id text, checkpoint_ns text, checkpoint jsonb)")
    refused(tmp_path, postgres_url, UsageError, "ShallowPostgresSaver, which keeps no history")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path, "postgresql://nobody:secret@127.0.0.1:1/x", OpenError, "cannot open database")


def test_into_the_database_that_the_source_is_in(postgres_url: str) -> None:
    """Perdure has a schema of its own: a database can take over itself."""
    with stock(postgres_url) as theirs, PerdureSaver(postgres_url) as mine:
        talking(theirs).invoke({"messages": [human("hi")]}, at("t"))
        assert import_langgraph(postgres_url, mine).ok
        assert everything(mine).keys() == everything(theirs).keys()


def test_the_source_is_opened_read_only(postgres_url: str) -> None:
    from perdure.langgraph.importing_postgres import PostgresSource

    with stock(postgres_url):
        source = PostgresSource(postgres_url)
        with pytest.raises(perdure.errors.ReadOnlyStore):
            source._rows("DELETE FROM checkpoints RETURNING thread_id")
        source.close()
