"""A restore that fails or is killed at any step has left what was there, or the whole store."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from backup_kit import fill
from copy_kit import everything, query
from soak import SOAK

import perdure
from perdure import UsageError
from perdure.testing.processes import ForkServer


@pytest.fixture
def backup(tmp_path: Path) -> str:
    with perdure.open(str(tmp_path / "source.db")) as store:
        fill(store)
        store.ops.backup(tmp_path / "backup")
    return str(tmp_path / "backup")


def test_a_file_is_whole_or_not_there_after_a_kill(backup: str, tmp_path: Path) -> None:
    target = tmp_path / "target.db"
    with perdure.open(str(tmp_path / "source.db")) as store:
        expected = everything(store, "rich")
    with ForkServer("copy_kit:restore_and_die") as nursery:
        for at in itertools.count(1, 1 if SOAK else 3):
            ended = list(nursery.start(backup, str(target), at).lines()) == ["done"]
            if target.exists():
                with perdure.open(str(target)) as store:
                    assert everything(store, "rich") == expected
                    assert store.ops.verify().ok
            if ended:
                break
            for end in ("", "-lock", "-lock-next", "-wal", "-shm"):
                Path(f"{target}{end}").unlink(missing_ok=True)
    assert at > 5
    assert not [path.name for path in tmp_path.iterdir() if ".part" in path.name]


def test_a_restore_into_postgresql_is_one_transaction_fences_once_and_can_be_repeated(
    backup: str, postgres_url: str
) -> None:
    class Fault(Exception):
        pass

    struck = {False: 0, True: 0}  # before the commit, and after it
    for at in itertools.count(4, 37):
        steps = itertools.count(1)

        def hook(point: str, steps: Any = steps, at: int = at) -> None:
            if next(steps) == at:
                raise Fault(point)

        try:
            done = perdure.ops.restore_backup(backup, postgres_url, hook=hook)
        except Fault:
            with perdure.open(postgres_url) as store:
                is_there = bool(store.threads())
                assert is_there or query(store, "SELECT count(*) FROM record") == [(0,)]
            struck[is_there] += 1
            continue
        break
    assert struck[False] > 3
    assert struck[True]
    assert done.ok
    with perdure.open(postgres_url) as store:
        assert query(store, "SELECT value FROM meta WHERE key = 'era'") == [("1",)]
        assert store.get_run("done").result() == sum(range(12))
    with pytest.raises(UsageError, match="not empty"):  # it may have been used since: only what was killed is repeated
        perdure.ops.restore_backup(backup, postgres_url)
