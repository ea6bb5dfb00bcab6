"""Files of Perdure and LangGraph as a hostile giver might hand them over: each change is made to a good one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import orjson
from blake3 import blake3

import perdure
from perdure.snapshots.signature import signed

Change = Callable[[apsw.Connection, str], None]  # of a file, with the path of another store


def statements(*texts: str) -> Change:
    """Run SQL on the file. In it, {attack} is what a name would do if it were taken for SQL; {text}: as a text."""

    def change(connection: apsw.Connection, victim: str) -> None:
        attack = f"ATTACH '{victim}' AS v; DELETE FROM v.thread; CREATE TABLE v.pwned (a); --"
        for text in texts:
            connection.execute(text.replace("{attack}", attack).replace("{text}", attack.replace("'", "''")))

    return change


def renamed(old: str, new: str) -> Change:
    """Change a table's SQL in the list of tables, where SQLite itself would refuse it."""
    return statements(
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_schema SET sql = {new} WHERE name = '{old}'",
        "PRAGMA writable_schema = OFF",
    )


# What no store has: to be refused before anything of the file is used.
STRANGE: dict[str, Change] = {
    "table": statements('CREATE TABLE "zz AS SELECT 1; {attack}/*_past" (a)'),
    "quoted table": statements('CREATE TABLE "zz"" AS SELECT 1; {attack}/*_past" (a)'),
    "table of a past": statements('CREATE TABLE "thread_past_past" (a, stamp, died)'),
    "ending as indexes of replication": statements('CREATE TABLE "x"" ; {attack}_changes" (a)'),
    "column": statements('ALTER TABLE thread ADD COLUMN "x FROM thread; {attack}" AS (1) VIRTUAL'),
    "computed column": statements("ALTER TABLE thread ADD COLUMN bomb AS (hex(zeroblob(5000000))) VIRTUAL"),
    "index": statements('CREATE INDEX "x; {attack}" ON thread (name)'),
    "index of an expression": statements("CREATE INDEX i ON thread (length(hex(zeroblob(1000))))"),
    "view": statements('CREATE VIEW "v; {attack}" AS SELECT 1'),
    "view for a table": statements(
        "ALTER TABLE tag RENAME TO hidden",
        "CREATE VIEW tag AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x AS tenant FROM n",
    ),
    "view for meta": statements(
        "ALTER TABLE meta RENAME TO hidden",
        "CREATE VIEW meta (key, value) AS WITH RECURSIVE n AS (SELECT 1 UNION ALL SELECT * FROM n) SELECT 1, 1 FROM n",
    ),
    "trigger": statements("CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM thread; END"),
    "trigger with a name of ours": statements(
        "DROP TRIGGER IF EXISTS thread_gone",
        "CREATE TRIGGER thread_gone AFTER DELETE ON thread BEGIN DELETE FROM body; END",
    ),
    "trigger that refuses and more": statements(
        "CREATE TRIGGER r BEFORE INSERT ON meta BEGIN SELECT RAISE(ABORT, 'a'); DELETE FROM thread; END"
    ),
    "trigger that is named almost as SQLite's statistics": statements(
        "CREATE TRIGGER sqlite1stat1 AFTER INSERT ON record BEGIN DELETE FROM thread; END"
    ),
    "trigger that is named as SQLite's statistics": statements(
        "CREATE TRIGGER t AFTER INSERT ON record BEGIN DELETE FROM thread; END",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET name = 'sqlite_stat9', sql = replace(sql, ' t ', ' sqlite_stat9 ') WHERE name = 't'",
        "PRAGMA writable_schema = OFF",
    ),
    "index with a name of ours": statements(
        "DROP INDEX thread_active", "CREATE UNIQUE INDEX thread_active ON thread (tenant, length(name))"
    ),
    "virtual table": statements("CREATE VIRTUAL TABLE search USING fts5(a)"),
    "virtual table for a table": statements(
        "DROP TABLE size_sample", "CREATE VIRTUAL TABLE size_sample USING fts5(at)"
    ),
}
# Contents of any kind: refused, or read without harm.
WRONG: dict[str, Change] = {
    "a schema that is no SQL": renamed("tag", "'{text}'"),
    "a schema that is two statements": renamed("tag", "sql || '; {text}'"),
    "a schema that is NULL": renamed("tag", "NULL"),
    "pages of another table": statements(
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name='tag') WHERE name='run'",
        "PRAGMA writable_schema = OFF",
    ),
    "a page that is not there": statements(
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET rootpage = 4000000000 WHERE name = 'thread'",
        "PRAGMA writable_schema = OFF",
    ),
    "another application": statements("PRAGMA application_id = 1"),
    "a later version": statements("PRAGMA user_version = 100000000", "UPDATE migration SET version = 999"),
    "types of versions": statements("UPDATE migration SET applied_at = '{text}'"),
    "no version": statements("DELETE FROM migration"),
    "names": statements("UPDATE thread SET name = 'x''; {text}'"),
    "types of threads": statements("UPDATE thread SET tree = 'x', metadata = x'ff', head = 1e300"),
    "types of snapshots": statements(
        "UPDATE snapshot SET epoch = '{text}', token = x'ff', manifest = 7, taken_at = 1e300"
    ),
    "epochs": statements("UPDATE epoch SET epoch = 9223372036854775807, held = 9223372036854775807"),
    "the store's id": statements("UPDATE meta SET value = x'00ff' WHERE key = 'store'"),
    "a backup's mark": statements('INSERT OR REPLACE INTO meta VALUES (\'backup\', \'{"id": [[1]], "at": "x"}\')'),
    "large values": statements("UPDATE thread SET metadata = zeroblob(1000000)"),
    "large texts": statements("UPDATE body SET full_text = zeroblob(1000000), diff = zeroblob(1000000)"),
    "nothing": statements("DELETE FROM tenant", "DELETE FROM thread", "DELETE FROM meta"),
}
# Bytes of the file's header (https://sqlite.org/fileformat2.html): place and value.
HEADERS = {
    "size of a page": (16, b"\x00\x03"),
    "size of the file": (28, struct.pack(">I", 0xFFFFFFFF)),
    "list of free pages": (32, struct.pack(">II", 2, 0xFFFFFFFF)),
    "version of the schema": (44, struct.pack(">I", 99)),
    "encoding": (56, struct.pack(">I", 3)),
    "cut short": (4096, None),
}


def changed(good: Path, to: Path, change: Change, victim: Path) -> Path:
    """A copy of a store's file with a change."""
    to.write_bytes(good.read_bytes())
    with closing(apsw.Connection(str(to))) as connection:
        connection.pragma("journal_mode", "delete")
        connection.pragma("synchronous", "off")
        for trigger in [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE name LIKE 'bundle\\_%' ESCAPE '\\'")
        ]:
            connection.execute(f"DROP TRIGGER {trigger}")  # they refuse writes
        change(connection, str(victim))
    with closing(apsw.Connection(str(to))) as connection:
        try:
            connection.pragma("journal_mode", "wal")
        except apsw.Error:  # its schema cannot be read any more
            pass
    return to


def header_changed(good: Path, to: Path, place: int, value: bytes | None) -> Path:
    content = bytearray(good.read_bytes())
    to.write_bytes(content[:place] if value is None else content[:place] + value + content[place + len(value) :])
    return to


def opened_bundle(bundle: Path, to: Path) -> dict[str, object]:
    """Take a bundle apart: its store goes to a file, its statement is returned."""
    content = bundle.read_bytes()
    end = content.rfind(b"\n")
    to.write_bytes(content[:end])
    facts = orjson.loads(orjson.loads(content[end + 1 :])["statement"])
    facts.pop("key", None)
    return dict(facts)


def closed_bundle(store: Path, facts: dict[str, object], to: Path) -> Path:
    """Make a bundle of a store's file: no key is needed for that."""
    body = store.read_bytes()
    to.write_bytes(body + b"\n" + signed(facts | {"blake3": blake3(body).hexdigest()}, None))
    return to


def make_store(path: Path) -> None:
    """A store with a snapshot, as bundles, backups and archives come from."""
    with perdure.open(path, durability="normal") as store:
        store.thread("x", metadata={"user": "ann"}).save({"a": 1, "text": "word " * 100})
        store.memory("facts").put("k", {"v": 1})
        store.snapshot("one")
        store.thread("x").save({"a": 2, "text": "word " * 100})
