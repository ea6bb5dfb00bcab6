"""What an operator is told: commands that work as printed, damage that names its way out, words that fit."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cli import main
from perdure.storage.sqlite.opening import PAGE_BYTES


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> str:
    return request.getfixturevalue("postgres_url") if database == "postgres" else str(tmp_path / "a store.db")


@pytest.fixture
def backup(url: str, tmp_path: Path) -> Path:
    with perdure.open(url) as store:
        for number in range(20):
            store.thread(f"t{number}").save({"n": os.urandom(3000).hex()})
        store.ops.backup(tmp_path / "b")
    return tmp_path / "b"


both = pytest.mark.parametrize("database", ["sqlite", "postgres"])


@pytest.mark.parametrize("database", ["sqlite"])
def test_to_and_test_exclude_each_other(backup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "restore", str(backup), "x.db", "--test"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["store", "restore", str(backup)]) == 2
    assert "restore where?" in capsys.readouterr().err


@both
def test_a_backup_that_is_cut_short_is_damaged_and_nothing_is_restored(
    url: str, backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    whole = backup.read_bytes()
    for part in (0.3, 0.9):
        cut.write_bytes(whole[: int(len(whole) * part)])
        for where in ([str(tmp_path / "new.db")], ["--test", "--store", url]):
            assert main(["store", "restore", str(cut), *where]) == 4
            message = capsys.readouterr().err
            assert re.search(r"cut is damaged \(.*malformed\): take another backup, or repair it", message), message
        assert not (tmp_path / "new.db").exists()


@both
def test_the_command_that_backup_prints_works(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    with perdure.open(url) as store:
        store.thread("a").save({"n": 1})
    assert main(["store", "backup", "my backup", "--store", url]) == 0
    found = re.search("`perdure (.*)`", capsys.readouterr().err)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    monkeypatch.setenv("PERDURE_STORE", url)
    assert main(["store", "backup", "another"]) == 0
    assert "--store" not in capsys.readouterr().err


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_damaged_file_names_repair(url: str, backup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(url, "r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(os.urandom(PAGE_BYTES * 12))
    assert main(["store", "verify", "--store", url]) == 4
    assert "perdure store repair" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["abc", "9464", 1.5, None, True])
def test_a_port_is_a_number(port: Any) -> None:
    with pytest.raises(perdure.UsageError, match="a port is a number"):
        perdure.ops.metrics.serve(port=port)
