"""The doctor on SQLite: the place, the log, permissions, old and foreign files, and the command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import apsw
import pytest
from doctor_kit import said, text_of, worst

import perdure
from perdure.cli import main
from perdure.ops.doctor import sqlite as doctor_sqlite

MOUNTS = "25 1 8:1 / / rw - {} /dev/sda1 rw\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "agent.db"
    with perdure.open(str(made)) as store:
        store.thread("t").save({"n": 1})
    made.chmod(0o600)
    return made


def digest(folder: Path) -> dict[str, str]:
    """What is in a folder, without the memory that readers share."""
    files = [file for file in sorted(folder.iterdir()) if not file.name.endswith("-shm")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


# --- the place


def test_a_store_in_memory_is_a_problem() -> None:
    with perdure.open(":memory:") as store:
        found = said(store)
    assert worst(found["place"]) == "problem"
    assert "PostgreSQL" in text_of(found["place"])


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", "ok"), ("nfs4", "problem"), ("tmpfs", "warning"), ("overlay", "warning"), ("fuse.mergerfs", "warning")],
)
def test_the_file_system(path: Path, kind: str, level: str) -> None:
    with perdure.open(str(path)) as store:
        assert worst(said(store, mounts=MOUNTS.format(kind))["place"]) == level


def test_who_may_read_the_file(path: Path) -> None:
    with perdure.open(str(path)) as store:
        path.parent.chmod(0o755)
        assert worst(said(store)["permissions"]) == "ok"
        path.chmod(0o644)
        assert worst(said(store)["permissions"]) == "warning"
        path.parent.chmod(0o700)  # nobody gets that far
        assert worst(said(store)["permissions"]) == "ok"
        path.chmod(0o666)
        assert worst(said(store)["permissions"]) == "problem"
        path.chmod(0o600)
        path.parent.chmod(0o777)
        assert worst(said(store)["permissions"]) == "problem"
        path.parent.chmod(0o700)


# --- the log


def test_a_large_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with perdure.open(str(path)) as store:
        store.thread("t").save({"n": 2})
        assert worst(said(store)["log"]) == "ok"
        monkeypatch.setattr(doctor_sqlite, "_LOG_LARGE", 1)
        assert worst(said(store)["log"]) == "warning"
        monkeypatch.setattr(doctor_sqlite, "_LOG_HUGE", 1)
        assert worst(said(store)["log"]) == "problem"


# --- the command


def test_the_command_changes_nothing_and_says_what_to_do(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digest(path.parent)
    code, text = command(capsys, "--store", str(path))
    assert code == 0
    assert "no backup was ever made" in text
    assert "run `perdure store backup FILE`" in text
    assert "0 problems" in text
    after = digest(path.parent)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) <= {"agent.db-lock", "agent.db-lock-next"}


def test_warnings_fail_only_with_strict(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "--store", str(path))[0] == 0
    assert command(capsys, "--store", str(path), "--strict")[0] == 1
    path.chmod(0o666)
    assert command(capsys, "--store", str(path))[0] == 1


def test_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(capsys, "--store", str(path), "--json")
    found = json.loads(text)
    assert (code, found["ok"], found["counts"]["problem"]) == (0, True, 0)
    assert {"check", "level", "message", "hint"} == set(found["findings"][0])


@pytest.mark.parametrize("what", ["missing", "text", "foreign", "folder", "damaged"])
def test_a_store_that_cannot_be_opened(path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    other = path.parent / "other.db"
    if what == "text":
        other.write_text("these are notes, not a store")
    elif what == "foreign":
        connection = apsw.Connection(str(other))
        connection.execute("CREATE TABLE users (id)")
        connection.close()
    elif what == "folder":
        other.mkdir()
    elif what == "damaged":
        data = bytearray(path.read_bytes())
        data[100:8192] = bytes(8092)
        other.write_bytes(data)
    code, text = command(capsys, "--store", str(other))
    assert code == 1
    assert "problem  open" in text
