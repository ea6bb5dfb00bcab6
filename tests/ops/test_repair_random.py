"""Repair after any damage: bytes of the file, and values of rows, changed by chance.

Each case is a seed. What could be loaded still can, what is loaded is what was saved, the result verifies, what is gone
is named, and a second repair finds nothing to do.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from repair_kit import Scene, Scenes, build

import perdure
from perdure.storage.sqlite.opening import PAGE_BYTES
from perdure.testing.postgres_server import PostgresServer

SOAK = int(os.environ.get("PERDURE_SOAK") or 0)
PARTS = 8
SEEDS = 250 if SOAK else 1  # in each part


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Iterator[Scenes]:
    made = Scenes(tmp_path_factory.mktemp("scenes"), postgres_server, saves=14)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(str(tmp_path_factory.mktemp("plain") / "a.db"), saves=20)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A few bytes anywhere; many in one page; a page of nothing, of noise, or of another page."""
    changed = bytearray(data)
    page = chance.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
    how = chance.randrange(6)
    if how <= 1:
        for _ in range(chance.choice((1, 2, 5, 12))):
            changed[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    elif how == 2:
        for _ in range(40):
            changed[page + chance.randrange(PAGE_BYTES)] ^= chance.randrange(1, 256)
    elif how == 3:
        changed[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
    elif how == 4:
        changed[page : page + PAGE_BYTES] = chance.randbytes(PAGE_BYTES)
    else:
        other = chance.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
        changed[page : page + PAGE_BYTES] = data[other : other + PAGE_BYTES]
    return bytes(changed)


@pytest.mark.parametrize("part", range(PARTS))
def test_bytes_of_the_file(plain: Scene, tmp_path: Path, part: int) -> None:
    data = Path(plain.url).read_bytes()
    loaded = 0
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        scene = plain.at(str(tmp_path / f"{seed}.db"))
        Path(scene.url).write_bytes(damaged(data, random.Random(seed)))
        look = tmp_path / "look.db"
        shutil.copy(scene.url, look)
        before = plain.at(str(look)).loadable()
        try:
            done = scene.repair()
            examine(scene, done, before)
            loaded += len(scene.loadable(done))
            again = perdure.ops.repair_store(done.place, to=tmp_path / "again.db")
            assert not again.repaired, again.repaired
        except BaseException:
            print(f"seed {seed}")
            raise
        for path in tmp_path.iterdir():
            path.unlink()
    # One page may hold the full text of a long chain: what share is left says something of many seeds.
    assert loaded > (0.8 * SEEDS * len(plain.states) if SOAK else 0)


def examine(scene: Scene, done: perdure.ops.Repaired, before: set[tuple[str, str]]) -> None:
    """As `check`, but runs may be damaged too: these stay stopped, and verify says so."""
    after = scene.loadable(done)
    assert before <= after, f"lost by the repair: {sorted(before - after)}\n{done}"
    named_runs = {note.run for note in done.lost}
    problems = [problem for problem in done.report.problems if problem.run is None or problem.run not in named_runs]
    assert not [problem for problem in problems if "large result" not in problem.what], (problems, done)
    named = {note.checkpoint for note in done.lost}
    wholesale = [note for note in (*done.lost, *done.repaired) if note.checkpoint is None]
    for name, at in scene.states.keys() - after:
        assert at in named or wholesale, f"{name} {at} is gone, and nobody says so\n{done}"


# --- values

TABLES = ("thread", "record", "record", "record", "body", "body", "body", "pin", "tag", "run", "journal")


def change(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bytes):
        if not value or chance.random() < 0.2:
            return chance.randbytes(chance.randrange(40))
        at = chance.randrange(len(value))
        return value[:at] + bytes([value[at] ^ (1 << chance.randrange(8))]) + value[at + 1 :]
    if isinstance(value, int):
        return chance.choice((value ^ (1 << chance.randrange(63)), 0, -1, 2**62, value + 1))
    if isinstance(value, str):
        return chance.choice((value + "x", "", value[::-1]))
    return None


def damage_values(scene: Scene, chance: random.Random, times: int) -> list[str]:
    told = []
    for _ in range(times):
        table = chance.choice(TABLES)
        names = "SELECT name FROM pragma_table_info(?)"
        if not scene.is_file:
            names = """SELECT column_name::text FROM information_schema.columns
                WHERE table_name = ? AND table_schema = 'perdure' ORDER BY ordinal_position"""
        columns = [name for (name,) in scene.execute(names, (table,))]
        rows = scene.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {', '.join(columns[:3])}")
        if not rows:
            continue
        row = [bytes(cell) if isinstance(cell, memoryview) else cell for cell in chance.choice(rows)]
        at = chance.randrange(len(columns))
        if (table, columns[at]) == ("thread", "name"):
            continue  # nothing tells that a thread had another name
        wanted = change(row[at], chance)
        if chance.random() < 0.15:
            text, params = f"DELETE FROM {table}", []
        else:
            text, params = f"UPDATE {table} SET {columns[at]} = ?", [wanted]
        known = {name: cell for name, cell in zip(columns, row, strict=True) if cell is not None}
        where = " AND ".join(f"{name} = ?" for name in known)
        try:
            scene.execute(f"{text} WHERE {where}", [*params, *known.values()])
            told.append(f"{table}.{columns[at]}: {row[at]!r:.60} -> {wanted!r:.60}")
        except (apsw.Error, psycopg.Error):
            pass  # the database does not take it
    return told


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize("part", range(4))
def test_values_of_rows(
    scenes: Scenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str, part: int
) -> None:
    monkeypatch.chdir(tmp_path)
    many = (200 if database == "sqlite" else 40) if SOAK else 4
    for seed in range(part * many, (part + 1) * many):
        chance = random.Random(seed)
        scene = scenes.new(database)
        told = damage_values(scene, chance, chance.choice((1, 3, 8)))
        before = scene.loadable()
        try:
            done = scene.repair()
            examine(scene, done, before)
        except BaseException:
            print(f"seed {seed}: {told}")
            raise
