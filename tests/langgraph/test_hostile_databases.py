"""Databases of LangGraph's savers from a hostile giver: what is imported are plain tables, and they are only read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver

from perdure.errors import UsageError
from perdure.langgraph import PerdureSaver, import_langgraph
from perdure.langgraph.saver_import import open_source

GRAPHS: dict[str, tuple[str, ...]] = {
    "a view for checkpoints": (
        "ALTER TABLE checkpoints RENAME TO hidden",
        "CREATE VIEW checkpoints AS SELECT * FROM hidden",
    ),
    "a view for writes": ("ALTER TABLE writes RENAME TO hidden", "CREATE VIEW writes AS SELECT * FROM hidden"),
    "a computed column": ("ALTER TABLE checkpoints ADD COLUMN bomb AS (hex(zeroblob(5000000))) VIRTUAL",),
    "a virtual table": (
        "DROP TABLE writes",
        "CREATE VIRTUAL TABLE writes USING fts5(thread_id, checkpoint_ns, checkpoint_id, task_id, idx, type, value)",
    ),
}


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.db"
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        SqliteSaver(connection).put(config, empty_checkpoint(), {}, {})
    return path


@pytest.mark.parametrize("change", GRAPHS)
def test_a_langgraph_database_whose_tables_are_code_is_refused(graph_file: Path, tmp_path: Path, change: str) -> None:
    path = tmp_path / "graph.db"
    path.write_bytes(graph_file.read_bytes())
    with PerdureSaver(str(tmp_path / "store.db")) as saver:
        assert import_langgraph(path, saver).checkpoints == 1
        with closing(sqlite3.connect(path)) as connection:
            for text in GRAPHS[change]:
                connection.execute(text)
            connection.commit()
        with pytest.raises(UsageError, match="is no plain table in it"):
            import_langgraph(path, saver)


def test_a_langgraph_database_is_only_read(graph_file: Path, tmp_path: Path) -> None:
    """Nothing that a connection to it runs can write, or reach another file."""
    with open_source(graph_file) as source:
        for text in (f"ATTACH '{tmp_path}/x.db' AS v", "DELETE FROM writes", "CREATE TABLE x (a)"):
            with pytest.raises(UsageError, match=r"too many attached|readonly"):
                source.rows(text)
    assert list(tmp_path.iterdir()) == []
