"""Opening an SQLite store: what is accepted, what is refused and in which words, and what is set."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import OpenError, UsageError
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.storage.sqlite import opening as sqlite_open
from perdure.storage.sqlite.driver import SqliteDriver


def ask(text: str) -> Program[Any]:
    [rows] = yield Batch(Sql(text)(), last=True)
    return rows


def refused(path: Path, words: str, **options: Any) -> None:
    with pytest.raises(OpenError, match=words) as caught:
        SqliteDriver(path, **options)
    assert path.name in str(caught.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "is a directory")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpenError, match=r"folder .*nowhere does not exist"):
        SqliteDriver(tmp_path / "nowhere" / "a.db")


def test_create_false_refuses_a_missing_file_and_makes_none(tmp_path: Path) -> None:
    refused(tmp_path / "a.db", "no store at", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [5, 100, 5000])
def test_a_file_that_is_not_sqlite_is_refused_and_left_alone(tmp_path: Path, size: int) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"n" * size)
    refused(path, "not an SQLite file")
    assert path.read_bytes() == b"n" * size


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (a)")
    connection.close()
    before = path.read_bytes()
    refused(path, "not a Perdure store")
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    SqliteDriver(tmp_path / "a.db").close()
    SqliteDriver(tmp_path / "a.db", create=False).close()


def test_a_store_of_a_newer_perdure_is_refused(tmp_path: Path) -> None:
    SqliteDriver(tmp_path / "a.db").close()
    connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    connection.execute("INSERT INTO migration SELECT max(version) + 1, 0 FROM migration")
    connection.close()
    refused(tmp_path / "a.db", r"written by a newer Perdure: schema \d+, this one knows \d+; upgrade")


def test_an_unknown_durability_is_refused() -> None:
    with pytest.raises(UsageError, match="full"):
        SqliteDriver(":memory:", durability="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [-1, float("inf"), float("nan")])
def test_a_deadline_that_cannot_be_kept_is_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        SqliteDriver(":memory:", timeout_s=timeout_s)


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/team\040files rw - nfs4 server:/export rw
31 30 8:2 / /mnt/team\040files/local rw - xfs /dev/sdb1 rw
32 22 0:50 / /home/me/ssh rw - fuse.sshfs me@host:/ rw
33 22 0:51 / /over rw - cifs //host/share rw
34 22 8:3 / /over rw - ext4 /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/a.db", None),
        ("/mnt/team files/a.db", "nfs4"),
        ("/mnt/team files/local/a.db", None),
        ("/mnt/team files-not/a.db", None),
        ("/home/me/ssh/deep/a.db", "fuse.sshfs"),
        ("/over/a.db", None),
    ],
)
def test_network_file_systems_are_recognised(path: str, kind: str | None) -> None:
    assert sqlite_open.network_file_system(path, MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"40 22 0:60 / {os.path.realpath(tmp_path)} rw - nfs server:/export rw"
    monkeypatch.setattr(sqlite_open, "read_mountinfo", lambda: line)
    refused(tmp_path / "a.db", "network file system .nfs.")
    assert list(tmp_path.iterdir()) == []


def test_every_name_of_a_store_leads_to_one_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first, second = SqliteDriver(tmp_path / "real" / "a.db"), SqliteDriver(tmp_path / "link" / "a.db")
    assert first.path == second.path
    first.close()
    second.close()


def test_concurrent_openers_of_a_new_store_all_succeed(tmp_path: Path) -> None:
    def open_it(_: int) -> Any:
        driver = SqliteDriver(tmp_path / "a.db")
        identity = driver.run(Transaction(partial(ask, "SELECT value FROM meta WHERE key = 'store'")))
        versions = driver.run(Transaction(partial(ask, "SELECT count(*), count(DISTINCT version) FROM migration")))
        driver.close()
        return identity, versions

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(open_it, range(16)))
    assert all(answer == answers[0] for answer in answers)
    [(store_id,)] = answers[0][0]
    assert len(bytes.fromhex(store_id)) == 16


def test_every_connection_has_the_settings(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db", durability="normal")
    expected = {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "cell_size_check": 1}
    expected |= {"trusted_schema": 0, "mmap_size": 0, "application_id": sqlite_open.APPLICATION_ID}
    for name, value in expected.items():
        for write in (False, True):
            assert driver.run(Transaction(partial(ask, f"PRAGMA {name}"), write=write)) == [(value,)], name
    driver.close()
    driver = SqliteDriver(tmp_path / "a.db")
    assert driver.run(Transaction(partial(ask, "PRAGMA synchronous"), write=True)) == [(2,)]
    driver.close()


# Read-only disks. Run as a user without rights, because the superuser may write anywhere.

READ_ONLY = """
import os, sys
from perdure.errors import ReadOnlyStore
from perdure.storage.sqlite.driver import SqliteDriver
SqliteDriver(":memory:").close()  # everything is imported before the rights are given up
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    SqliteDriver(sys.argv[1])
except ReadOnlyStore as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def read_only_process(path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", READ_ONLY, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("what", ["folder", "file", "new"])
def test_a_store_that_cannot_be_written_is_refused(shared_folder: Path, what: str) -> None:
    path = shared_folder / "a.db"
    if what != "new":
        SqliteDriver(path).close()
        path.chmod(0o666 if what == "folder" else 0o444)
    shared_folder.chmod(0o777 if what == "file" else 0o555)
    assert "refused" in read_only_process(path).stderr


def test_a_file_that_is_not_sqlite_is_left_alone(tmp_path: Path) -> None:
    """No lock files appear beside another program's file."""
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a store")
    refused(path, "not an SQLite file")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
