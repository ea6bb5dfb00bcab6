"""A store that has snapshots can be backed up, restored and transferred."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshot_kit import change_everything, fill, seen

import perdure


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_backup_of_a_store_with_snapshots(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, empty_postgres_url: str
) -> None:
    url = str(tmp_path / "a.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    target = str(tmp_path / "b.db") if kind == "sqlite" else empty_postgres_url
    with perdure.open(url) as store:
        fill(store)
        snapshot = store.snapshot("s")
        before = seen(snapshot)
        change_everything(store)
        now = seen(store)
        store.ops.backup(str(tmp_path / "backup.db"))
    perdure.restore(str(tmp_path / "backup.db"), target)
    with perdure.open(target) as copy:
        assert seen(copy)["history"] == now["history"]
        if kind == "sqlite":  # a copy of the file
            assert seen(copy.get_snapshot("s")) == before
        assert seen(copy.snapshot("new"))["items"] == now["items"]
        assert copy.ops.verify().problems == ()
