"""Every table of a tenant's rows is versioned: whatever statements change its rows, a snapshot shows what it held.

The oracle is the table itself: its rows are read when a snapshot is taken, and compared with what each snapshot that is
still kept shows after further changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from soak import SOAK

import perdure
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Batch, Program, Sql, Statement, drive, read, write

ROUNDS = 100 if SOAK else 12
STORES = pytest.mark.parametrize("store", ["sqlite", "memory", "postgres"], indirect=True)
# Of the store itself; what was erased, which no snapshot may bring back; what running steps emit; what operators did;
# what stores of a team agreed on, which a restore changes by their protocol alone; which values states refer to, that
# are kept as long as a snapshot shows such a state.
_UNVERSIONED = {
    *("external", "external_use"),
    *(
        "tenant",
        "tenant_key",
        "tenant_role",
        "copy",
        "erased",
        "run_count",
        "emitted",
        "memory_index",
        "operator_action",
    ),
    *("team_store", "team_view", "peer_key"),
}
_NOT_COPIED = {"thread": {"owner", "autosave"}}  # columns that are of this store alone: transfers leave them out
_COLUMNS = Sql(
    sqlite="""SELECT t.name, c.name, c.type FROM sqlite_schema t, pragma_table_info(t.name) c
    WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite%' ORDER BY t.name, c.cid""",
    postgres="""SELECT table_name::text, column_name::text, data_type::text FROM information_schema.columns
    WHERE table_schema = current_schema() ORDER BY table_name, ordinal_position""",
)
Types = dict[str, dict[str, str]]


def columns() -> Program[Types]:
    [rows] = yield Batch(_COLUMNS())
    found: Types = {}
    for table, column, kind in rows:
        found.setdefault(table, {})[column] = kind.lower()
    return found


def leftovers() -> Program[list[str]]:
    found = yield Batch(*(Sql(f"SELECT 1 FROM {name}_past LIMIT 1")() for name in versioned_tables()))
    return [name for name, rows in zip(versioned_tables(), found, strict=True) if rows]


def contents() -> Program[dict[str, list[Any]]]:
    tables = versioned_tables()
    found = yield Batch(*(Sql(f"SELECT {', '.join(tables[name].names)} FROM {name}")() for name in tables))
    return {name: sorted(rows, key=repr) for name, rows in zip(tables, found, strict=True)}


class Changes:
    """Random statements. Keys are few, so that they meet; every other value is new, so that no two rows are alike."""

    def __init__(self, types: Types) -> None:
        self.types = types
        self.chance = random.Random(14)
        self.number = 0

    def batch(self) -> Program[None]:
        for name in versioned_tables():
            for _ in range(self.chance.randint(0, 3)):
                yield Batch(*self.statements(name))

    def statements(self, name: str) -> Iterator[Statement]:
        table, chance = versioned_tables()[name], self.chance
        values = {"tenant": 1} | {column: self.value(name, column, chance.randint(1, 3)) for column in table.key}
        others = table.names[len(table.key) :]
        values |= {column: self.value(name, column, self.fresh()) for column in others}
        change = chance.choice(["nothing", "upsert", "replace", "update", "rekey", "delete", "delete all"])
        if name == "run_blob":  # refers to blobs
            blob = "INSERT INTO blob (tenant, hash, body) VALUES (:tenant, :hash, :body) ON CONFLICT DO NOTHING"
            yield Sql(blob)(tenant=1, hash=values["hash"], body=b"")
        elif name == "blob":
            yield Sql("DELETE FROM run_blob WHERE tenant = :tenant")(tenant=1)
        numbered = name == "body"  # by the database: PostgreSQL lets no number be changed
        own = "OVERRIDING SYSTEM VALUE" if numbered else ""
        into = f"INTO {name} ({', '.join(values)}) {own} VALUES ({', '.join(f':{column}' for column in values)})"
        key = table.key if numbered or name in ("memory_item", "memory_vector") else ("tenant", *table.key)
        sets = ", ".join(f"{column} = :{column}" for column in others or key)
        where = " AND ".join(f"{column} = :{column}" for column in ("tenant", *table.key))
        upsert = f"INSERT {into} ON CONFLICT ({{}}) DO UPDATE SET {sets}".format
        on_sqlite = {"upsert": upsert(", ".join(key)), "replace": f"INSERT OR REPLACE {into}"}
        on_postgres = dict.fromkeys(on_sqlite, upsert(", ".join(("tenant", *table.key))))
        on_both = {
            "nothing": f"INSERT {into} ON CONFLICT DO NOTHING",
            "update": f"UPDATE {name} SET {sets} WHERE {where}",
            "rekey": f"UPDATE {name} SET {table.key[0]} = :moved WHERE {where}",
            "delete": f"DELETE FROM {name} WHERE {where}",
            "delete all": f"DELETE FROM {name} WHERE tenant = :tenant",
        }
        values["moved"] = self.value(name, table.key[0], self.fresh())
        change = "update" if change == "rekey" and numbered else change
        sqlite, postgres = (on_both | on_sqlite)[change], (on_both | on_postgres)[change]
        yield Sql(sqlite=sqlite.replace("OVERRIDING SYSTEM VALUE", ""), postgres=postgres)(**values)

    def fresh(self) -> int:
        self.number += 1
        return 1000 + self.number

    def value(self, table: str, column: str, number: int) -> Any:
        kind = self.types[table][column]
        if kind in ("text", "any"):
            return str(number)
        if kind == "smallint":
            return number % 30_000
        return str(number).encode() if kind in ("blob", "bytea") else number


@STORES
def test_a_snapshot_shows_the_rows_of_every_table_after_any_statement(store: perdure.Store) -> None:
    driver = store._context.driver.capabilities.base
    changes = Changes(drive(driver, read(columns)))
    drive(driver, write(changes.batch))
    kept: list[tuple[Any, dict[str, list[Any]]]] = []
    for number in range(ROUNDS):
        kept.append((store.snapshot(f"s{number}"), drive(driver, read(contents))))
        for _ in range(changes.chance.randint(0, 3)):
            drive(driver, write(changes.batch))
        if changes.chance.random() < 0.4:
            kept.pop(changes.chance.randrange(len(kept)))[0].release()
        driver.maintain("reclaim")  # which numbers rows anew
        for snapshot, rows in kept:
            shown = drive(snapshot.store._context.driver.capabilities.base, read(contents))
            assert shown == rows, snapshot
    for snapshot, _ in kept:
        snapshot.release()
    assert drive(driver, read(leftovers)) == []


@STORES
def test_every_table_of_a_tenant_is_versioned_with_all_its_columns(store: perdure.Store) -> None:
    store.snapshot("s")
    found = drive(store._context.driver.capabilities.base, read(columns))
    live = {t for t, names in found.items() if "tenant" in names and not t.endswith("_past")}
    assert live - _UNVERSIONED == set(versioned_tables())
    for name, table in versioned_tables().items():
        assert set(found[name]) - _NOT_COPIED.get(name, set()) == {"tenant", "stamp", *table.names}, name
        assert list(found[f"{name}_past"]) == [*found[name], "died"], name
