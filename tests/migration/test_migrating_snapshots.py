"""A store that has snapshots is migrated: a new table and a new column are versioned, and old snapshots still show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.memory.domain import DOMAIN
from perdure.memory.tables import MEMORY_ITEM, TABLES
from perdure.ops.repair.rebuild import _problems
from perdure.storage import domains, migrate
from perdure.storage.domains import Column, Domain, Index, SchemaChange, Table
from perdure.storage.program import Batch, Program, Sql, drive, read, write
from perdure.storage.sqlite.foreign import check_foreign, store_schema

NEXT = migrate.newest("sqlite") + 1  # the version of the schema that the next Perdure has
SHINY_TABLE = Table(
    "shiny", (Column("k", "text"), Column("v", "text", null=True)), ("k",), finds_changes=True, since=NEXT
)
MOOD = Column("mood", "text", default="'calm'", since=NEXT)
FILL = "UPDATE memory_item SET mood = 'new' WHERE key = 'kept'"
NEWER = (
    Domain(
        "shiny",
        (SHINY_TABLE,),
        (SchemaChange(FILL, FILL, since=NEXT),),
    ),
    Domain(
        "memory",
        tuple(
            replace(
                table,
                columns=(*table.columns, MOOD),
                indexes=(*table.indexes, Index("memory_item_mood", "tenant, mood", since=NEXT)),
            )
            if table is MEMORY_ITEM
            else table
            for table in TABLES
        ),
        DOMAIN.changes,
    ),
)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "a.db")


@pytest.fixture
def newer() -> Iterator[Any]:
    """Call it to be the next version of Perdure: it declares one more table, column, index and change."""

    def upgrade() -> None:
        store_schema.cache_clear()
        for domain in NEWER:
            domains.register(domain)

    yield upgrade
    store_schema.cache_clear()
    domains._registered.clear()


def run(store: Any, *texts: str) -> list[Any]:
    def program() -> Program[list[Any]]:
        return (yield Batch(*(Sql(text)(tenant=1) for text in texts)))

    driver = store._context.driver.capabilities.base
    is_read = texts[0].startswith("SELECT")
    return list(drive(driver, read(program) if is_read else write(program, solo=True)))


MOODS = "SELECT key, mood FROM memory_item WHERE ended_at IS NULL AND gone IS NULL ORDER BY key"
SHINY = "SELECT k, v FROM shiny"


def test_a_store_with_snapshots_is_migrated(url: str, newer: Any) -> None:
    with perdure.open(url) as store:
        store.thread("t").save({"n": 1})
        store.memory("u").put("gone", {"n": 1})
        store.memory("u").put("kept", {"n": 1})
        store.snapshot("old")
        store.memory("u").delete("gone")
        if not url.startswith("postgres"):
            store.ops.backup(f"{url}.backup")
        store.thread("t").save({"n": 2})
    newer()
    with perdure.open(url) as store:
        old = store.get_snapshot("old")
        assert old.thread("t").load().state == {"n": 1}
        assert sorted(item.key for item in old.memory("u").list()) == ["gone", "kept"]
        assert run(old.store, MOODS, SHINY) == [[("gone", "calm"), ("kept", "calm")], []]
        assert run(store, MOODS) == [[("kept", "new")]]
        run(store, "INSERT INTO shiny (tenant, k, v) VALUES (1, 'a', 'first')", "UPDATE memory_item SET mood = 'glad'")
        middle = store.snapshot("middle")
        run(store, "UPDATE shiny SET v = 'second'", "UPDATE memory_item SET mood = 'sad'")
        store.thread("t").save({"n": 3})
        newest = store.snapshot("newest")
        run(store, "DELETE FROM shiny", "DELETE FROM memory_item")
        assert run(old.store, MOODS, SHINY) == [[("gone", "calm"), ("kept", "calm")], []]
        assert run(middle.store, MOODS, SHINY) == [[("kept", "glad")], [("a", "first")]]
        assert run(newest.store, MOODS, SHINY) == [[("kept", "sad")], [("a", "second")]]
        store.restore(old)
        assert store.thread("t").load().state == {"n": 1}
        assert sorted(item.key for item in store.memory("u").list()) == ["gone", "kept"]
        store.ops.erase("t")
        for snapshot in store.snapshots():
            snapshot.release()
        assert run(store, "SELECT 1 FROM shiny_past", "SELECT 1 FROM memory_item_past") == [[], []]
    with perdure.open(url) as store:  # it is not migrated twice
        assert store.memory("u").get("kept").value == {"n": 1}  # type: ignore[union-attr]
    if not url.startswith("postgres"):
        assert _problems(Path(url)) == [], "repair takes it for a store"
        check_foreign(Path(f"{url}.backup"))  # and so is a copy that an older version made
