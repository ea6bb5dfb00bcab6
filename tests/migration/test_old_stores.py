"""Files written by every earlier format open, load, verify, and can be written to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import make_store
import pytest

import holdfast
from holdfast.testing.samples import every_type, same

DATA = Path(__file__).parent.parent / "data"
FOLDERS = sorted(folder.name for folder in DATA.glob("v*"))


@pytest.fixture(params=FOLDERS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A copy of an old store, and what it must hold."""
    folder = DATA / request.param
    shutil.copy(folder / "store.db", tmp_path / "store.db")
    expected = json.loads((folder / "expected.json").read_text())["tenants"]
    return str(tmp_path / "store.db"), expected


def test_there_is_a_store_of_the_first_format() -> None:
    assert "v1" in FOLDERS
    assert not list(DATA.glob("v*/*-wal"))


@pytest.mark.parametrize("tenant", make_store.TENANTS)
def test_an_old_store_holds_what_was_saved(old: tuple[str, dict[str, Any]], tenant: str) -> None:
    url, expected = old
    with holdfast.open(url, create=False, tenant=tenant) as store:
        assert make_store.describe(store) == expected[tenant]
        report = store.verify()
        assert report.ok, [str(problem) for problem in report.problems]


@pytest.mark.parametrize("tenant", make_store.TENANTS)
def test_an_old_stores_values_come_back_as_objects(old: tuple[str, dict[str, Any]], tenant: str) -> None:
    with holdfast.open(old[0], tenant=tenant) as store:
        newest, first = store.thread("types").history()
        assert same(first.state, every_type())
        changed = every_type()
        changed["plan"].steps.append("rest")
        assert same(newest.state, changed)
        states = [one.state for one in store.thread("states that are no mappings").history()]
        assert same(states, [{}, (1, 2), [1, 2], "text", 1, None])
        line = [one.state for one in store.thread("fork").history()]
        assert line[6:] == make_store.growing(60)[30::-1]  # before them: five saves and an update


@pytest.mark.parametrize("tenant", make_store.TENANTS)
def test_an_old_store_can_be_worked_with(old: tuple[str, dict[str, Any]], tenant: str) -> None:
    url, expected = old
    with holdfast.open(url, tenant=tenant) as store:
        for described in expected[tenant]:
            thread = store.thread(described["name"])
            thread.load()
            made = thread.save({"written": "later"})
            assert (made.is_head, made.parent) == (True, described["head"])
            oldest = described["history"][-1]
            thread.rollback(oldest["id"])
            assert make_store.brief(make_store.plain(thread.load(raw=True).state)) == oldest["raw"]
            thread.fork(oldest["id"], name=f"new fork of {thread.name}").save({"forked": "later"})
        assert store.verify().ok
        for described in expected[tenant]:
            store.thread(described["name"]).prune(keep=2)
        store.delete("main")
        assert store.verify().ok


def test_a_store_made_now_is_as_the_newest_format_says(tmp_path: Path) -> None:
    """The script that writes these files still works, and what it writes is what it says."""
    make_store.make(tmp_path / "now")
    expected = json.loads((tmp_path / "now" / "expected.json").read_text())["tenants"]
    with holdfast.open(str(tmp_path / "now" / "store.db")) as store:
        assert make_store.describe(store) == expected["default"]
