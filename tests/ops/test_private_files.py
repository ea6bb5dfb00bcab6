"""What Perdure writes is for its owner alone, and is never written through a name that something else has taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backup_kit import fill, run_of

import perdure
from perdure import Store


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The umask that hides nothing: what is private is so by the mode it was made with."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path, start: str) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name.startswith(start)}


def test_a_store_and_the_files_beside_it_are_for_their_owner_alone(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "agent.db") as store:
        store.run(run_of, 2, id="a")
        found = modes(tmp_path, "agent.db")
    assert {"agent.db", "agent.db-wal", "agent.db-shm", "agent.db-lock", "agent.db-lock-next"} < set(found)
    assert set(found.values()) == {0o600}


def test_a_store_that_exists_keeps_its_mode_and_the_files_beside_it_get_it(tmp_path: Path) -> None:
    perdure.open(tmp_path / "agent.db").close()
    for path in tmp_path.glob("agent.db-*"):
        path.unlink()
    (tmp_path / "agent.db").chmod(0o660)
    with perdure.open(tmp_path / "agent.db") as store:
        store.run(run_of, 2, id="a")
        found = modes(tmp_path, "agent.db")
    assert len(found) >= 5
    assert set(found.values()) == {0o660}


def test_a_lock_file_is_not_opened_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "agent.db-lock").symlink_to(victim)
    with pytest.raises(perdure.errors.OpenError, match=r"agent\.db-lock"):
        perdure.open(tmp_path / "agent.db")
    assert not victim.exists()


Copy = Callable[[Store, Path], object]


def _restore(store: Store, path: Path) -> None:
    store.ops.backup(path.with_name("backup"))
    perdure.ops.restore_backup(path.with_name("backup"), str(path))


COPIES: dict[str, Copy] = {
    "backup": lambda store, path: store.ops.backup(path),
    "restore": _restore,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with perdure.open(tmp_path / "source.db") as store:
        fill(store)
        yield store


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_is_for_its_owner_alone_and_removes_what_a_killed_one_left(
    store: Store, tmp_path: Path, copy: Copy
) -> None:
    stale = tmp_path / ".copy.part-1"
    stale.mkdir()
    (stale / "copy").write_bytes(b"stale")
    (tmp_path / ".copy.part-2").symlink_to(tmp_path)
    copy(store, tmp_path / "copy")
    assert modes(tmp_path, "copy") == {"copy": 0o600}
    assert [path.name for path in tmp_path.glob(".copy.part-*")] == [".copy.part-2"]
