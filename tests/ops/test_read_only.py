"""A store that is opened read-only: the database refuses what writes, and everything can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
from perdure.errors import OpenError, ReadOnlyStore


@perdure.durable
def answered() -> int:
    return 42


def test_reads_work_and_the_database_refuses_writes(url: str) -> None:
    with perdure.open(url) as store:
        store.thread("t").save({"n": 1})
        store.run(answered, id="r", tags={"kind": "x"})
    with perdure.open(url, read_only=True) as store:
        assert store.thread("t").load().state == {"n": 1}
        assert store.get_run("r").outcome() is not None
        assert [info.id for info in store.runs(tags={"kind": "x"})] == ["r"]
        assert store.ops.health().threads == 1
        assert store.ops.deployments() == []
        for write in (
            lambda: store.thread("t").save({"n": 2}),
            lambda: store.run(answered),
            lambda: store.delete_run("r"),
            lambda: store.memory("m").put("a", "b"),
            lambda: store.ops.compact(),
        ):
            with pytest.raises(ReadOnlyStore):
                write()
    with perdure.open(url) as store:
        assert store.thread("t").load().state == {"n": 1}


def test_a_missing_store_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(OpenError):
        perdure.open(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()
