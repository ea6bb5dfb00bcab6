"""Cold packs and large results in an object store: nobody notices, but for what goes wrong there, which is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from far_kit import KEY, at, blob, cells, check, fill, loose, named, rows, scene, stored
from role_kit import roles_of

import perdure
from perdure.storage.far import FarDriver
from perdure.storage.far_cells import MARK, far_cell, wanted_of
from perdure.storage.objects import Objects, show_url


@pytest.fixture(params=["plain", "encrypted"])
def keys(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"keys": KEY} if request.param == "encrypted" else {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(url: str, folder: Path) -> Iterator[perdure.Store]:
    with perdure.open(url, objects=at(folder)) as opened:
        yield opened


def test_what_was_moved_out_shows_the_same(url: str, folder: Path, keys: dict[str, Any]) -> None:
    with perdure.open(url, objects=at(folder), **keys) as store:
        fill(store)
        before = scene(store)
        moved = store.move_out()
        assert moved.objects > 3
        assert len(cells(store)) == moved.objects == len(stored(folder))
        assert named(store) == stored(folder)
        assert not loose(store)
        info = store.objects()
        assert (info.objects, info.bytes, info.let_go, info.unfinished) == (moved.objects, moved.bytes, 0, 0)
    with perdure.open(url, objects=at(folder), **keys) as again:  # nothing is in memory any more
        assert scene(again) == before
        check(again)
        thread = again.thread("a")
        state = thread.load().state
        thread.save({**state, "more": 1})
        assert thread.load().state == {**state, "more": 1}
        check(again)


async def test_what_was_moved_out_shows_the_same_to_async_callers(url: str, folder: Path, keys: dict[str, Any]) -> None:
    with perdure.open(url, objects=at(folder), **keys) as store:
        ids = fill(store)
        before = scene(store)
    async with perdure.open(url, objects=at(folder), **keys) as store:
        moved = await store.amove_out()
        assert moved.objects > 3
        assert (await store.aobjects()).objects == moved.objects
    async with perdure.open(url, objects=at(folder), **keys) as store:
        thread = store.thread("a")
        loaded = await asyncio.gather(*(thread.aload(id_) for id_ in ids))
        assert [checkpoint.state for checkpoint in loaded] == [before[f"a {id_}"][0] for id_ in ids]
    async with perdure.open(url, objects=at(folder), **keys) as store:
        report = await store.averify()
        assert report.ok, report.problems
        assert (await store.abring_back()).objects == moved.objects
        assert not cells(store)
    with perdure.open(url, **keys) as plain:
        assert scene(plain) == before


def test_objects_of_an_encrypted_store_are_encrypted(tmp_path: Path, folder: Path) -> None:
    with perdure.open(str(tmp_path / "a.db"), objects=at(folder), keys=KEY) as store:
        fill(store)
        store.move_out()
        contents = [(folder / name).read_bytes() for name in stored(folder)]
        assert contents
        assert all(content.startswith(b"\xf5s\x01") for content in contents)


def test_nothing_warm_or_small_is_moved(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder, cold_s=3600.0)) as store:
        fill(store)
        assert store.move_out().objects == 0
        assert store.move_out(cold_s=0).objects > 3
    with perdure.open(url, objects=at(folder, min_bytes=10**8)) as store:
        store.bring_back()
        assert store.move_out().objects == 0


def test_a_result_of_a_run_that_is_running_stays(store: perdure.Store, folder: Path) -> None:
    fill(store)
    rows(store, "UPDATE run SET status = 'running', owner = 'x' WHERE id = 'big' RETURNING 1")
    store.move_out()
    assert rows(store, "SELECT count(*) FROM blob WHERE substr(body, 1, 5) = :mark", mark=MARK) == [(0,)]


def test_compaction_moves_out_and_again_nothing(store: perdure.Store, folder: Path) -> None:
    fill(store)
    before = scene(store)
    assert store.compact().moved > 3
    there = stored(folder)
    assert store.compact().moved == 0
    assert stored(folder) == there
    assert scene(store) == before
    check(store)


def test_bringing_back_leaves_nothing_behind(store: perdure.Store, url: str, folder: Path) -> None:
    fill(store)
    before = scene(store)
    moved = store.move_out()
    assert store.bring_back() == perdure.Moved(moved.objects, moved.bytes)
    assert store.objects().let_go == moved.objects
    assert store.move_out(cold_s=10**6).removed == moved.objects
    assert stored(folder) == set()
    assert not loose(store)
    with perdure.open(url) as plain:
        assert scene(plain) == before
        check(plain)


def test_pruning_deleting_and_sweeping_let_objects_go(store: perdure.Store, folder: Path) -> None:
    fill(store)
    store.move_out()
    store.thread("a").prune(keep=30)
    check(store)
    store.move_out()
    assert stored(folder) == named(store)
    for name in ("fork", "a", "other"):
        store.delete(name)
    store.delete_run("big")
    store.compact()
    check(store)
    assert not cells(store)
    store.move_out()
    assert stored(folder) == set()
    assert not loose(store)


def test_objects_stay_as_long_as_backups_may_need_them(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder, keep_s=3600.0)) as store:
        fill(store)
        store.move_out()
        there = stored(folder)
        store.delete("fork")
        store.delete("a")
        store.compact()
        assert stored(folder) == there
        assert store.objects().let_go > 0


def test_erasing_removes_objects_at_once_and_says_what_may_remain(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder, keep_s=10.0**6)) as store:
        fill(store)
        store.move_out()
        store.delete("other")  # that is not erased: a backup may need it
        kept = {name for name, state in loose(store).items() if state == 1}
        assert kept
        rows(store, "UPDATE far_loose SET at = at - 7200000000 RETURNING 1")
        erased = store.erase("a", forks=True)
        assert stored(folder) == named(store) | kept
        assert any("versions" in line and str(folder) in line for line in erased.may_remain)
        store.erase_run("big")
        assert stored(folder) == kept


def test_erasing_a_checkpoint_removes_the_object_of_its_pack_at_once(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder, keep_s=10.0**6)) as store:
        ids = fill(store)
        store.move_out()
        store.delete("other")  # that is not erased: a backup may need it
        rows(store, "UPDATE far_loose SET at = at - 7200000000 RETURNING 1")
        kept = set(loose(store))
        before = stored(folder)
        erased = store.thread("a").erase(ids[10])
        assert stored(folder) == named(store) | kept
        assert stored(folder) < before
        assert set(loose(store)) == kept
        assert any("versions" in line and str(folder) in line for line in erased.may_remain)
        assert not any("until compact" in line for line in erased.may_remain)
        check(store)


def test_erasing_without_the_object_store_says_so(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder)) as store:
        fill(store)
        store.move_out()
    with perdure.open(url) as store:
        erased = store.erase("a", forks=True)
        assert any("objects in the object store" in line for line in erased.may_remain)
    with perdure.open(url, objects=at(folder, keep_s=10.0**6)) as store:
        store.compact()
        assert stored(folder) == named(store)


def test_rotating_keys_reaches_objects(url: str, folder: Path) -> None:
    new = bytes(range(1, 33))
    with perdure.open(url, objects=at(folder), keys=KEY) as store:
        fill(store)
        before = scene(store)
        store.move_out()
    both = perdure.StaticKeys([new, KEY])
    with perdure.open(url, objects=at(folder), keys=both) as store:
        store.rotate_keys()
        assert not cells(store)
        store.move_out()
        assert cells(store)
        assert store.rotate_keys().rows == 0  # they say in the column which key it is
        assert stored(folder) == named(store)
    with perdure.open(url, objects=at(folder), keys=new) as store:
        assert scene(store) == before
        check(store)


def test_encrypting_a_store_leaves_no_plain_object(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder, keep_s=10.0**6)) as store:
        fill(store)
        before = scene(store)
        store.move_out()
    with perdure.open(url, objects=at(folder, keep_s=10.0**6), keys=KEY) as store:
        store.encrypt()
        assert stored(folder) == set()
        store.move_out()
        assert scene(store) == before
        check(store)


def test_an_exported_thread_and_run_hold_what_was_moved_out(store: perdure.Store, folder: Path, tmp_path: Path) -> None:
    fill(store)
    before = scene(store)
    store.move_out()
    store.export_thread("a", tmp_path / "a.thread")
    store.export_run("big", tmp_path / "big.run", keep=True)
    with perdure.open(str(tmp_path / "b.db")) as other:
        other.import_thread(tmp_path / "a.thread")
        seen = scene(other)
        assert seen == {key: before[key] for key in seen}
        assert len(seen) == 140
        other.import_run(tmp_path / "big.run")
        assert blob(other) == blob(store)


def test_a_backup_used_as_a_store_removes_nothing_of_the_other(tmp_path: Path, folder: Path) -> None:
    with perdure.open(str(tmp_path / "a.db"), objects=at(folder)) as store:
        fill(store)
        before = scene(store)
        moved = store.move_out()
        assert store.backup(tmp_path / "copy.db").objects == moved.objects
        with perdure.open(str(tmp_path / "copy.db"), objects=at(folder)) as copy:
            assert scene(copy) == before
            for name in ("fork", "a", "other"):
                copy.delete(name)
            copy.compact()
        assert scene(store) == before
        check(store)


def test_objects_that_went_after_a_backup_are_missed_by_its_restoration(tmp_path: Path, folder: Path) -> None:
    with perdure.open(str(tmp_path / "a.db"), objects=at(folder)) as store:
        fill(store)
        store.move_out()
        store.backup(tmp_path / "copy.db")
        store.delete("other")
        store.move_out()
        tried = store.try_restore(tmp_path / "copy.db")
        assert not tried.ok
        assert any("is not at" in problem.what for problem in tried.report.problems)


def test_tenants_have_folders_of_their_own(store: perdure.Store, folder: Path) -> None:
    fill(store)
    other = store.tenant("other")
    fill(other)
    store.move_out()
    other.move_out()
    assert len({name.split("/")[1] for name in stored(folder)}) == 2
    assert store.objects().objects == other.objects().objects
    other.erase("a", forks=True)
    check(store)


def test_roles_that_are_held_to_their_tenant_move_and_remove(postgres_url: str, folder: Path) -> None:
    for roles in roles_of(postgres_url):
        with perdure.open(roles.tenant("acme"), tenant="acme", objects=at(folder)) as store:
            fill(store)
            assert store.move_out().objects > 3
            check(store)
            store.delete("other")
            assert store.objects().let_go > 0
            assert store.move_out().removed > 0
            assert store.objects().objects == len(stored(folder))
        with perdure.open(roles.app, tenant="acme", objects=at(folder)) as store:
            check(store)
            assert store.tenant("globex").objects().objects == 0
            store.erase("a", forks=True)
            assert store.objects().objects == len(stored(folder)) > 0


# --- what goes wrong


def test_without_the_object_store_it_says_what_to_give(url: str, folder: Path, keys: dict[str, Any]) -> None:
    with perdure.open(url, objects=at(folder), **keys) as store:
        ids = fill(store)
        store.move_out()
    with perdure.open(url, **keys) as store:
        with pytest.raises(perdure.ObjectMissing, match="objects=") as caught:
            store.thread("a").load(ids[-1])
        assert caught.value.name.split("/")[1] == "1"
        with pytest.raises(perdure.ObjectMissing, match="PERDURE_OBJECTS"):
            blob(store)
        with pytest.raises(perdure.ObjectMissing):
            store.verify()
        with pytest.raises(perdure.UsageError, match="objects="):
            store.objects()


def test_a_missing_object_is_an_error_and_never_an_older_state(url: str, folder: Path, keys: dict[str, Any]) -> None:
    with perdure.open(url, objects=at(folder), **keys) as store:
        ids = fill(store)
        store.move_out()
    with perdure.open(url, objects=at(folder), **keys) as store:
        for name in stored(folder):
            (folder / name).rename(folder / f"{name}.away")
        with pytest.raises(perdure.ObjectMissing) as caught:
            store.thread("a").load(ids[-1])
        assert str(folder) in str(caught.value)
        assert caught.value.name in str(caught.value)
        report = store.verify()
        assert sum("is not at" in problem.what for problem in report.problems) == len(cells(store))
        for name in stored(folder):
            (folder / name).rename(str(folder / name).removesuffix(".away"))
        check(store)


@pytest.mark.parametrize("harm", ["changed", "cut", "longer"])
def test_a_tampered_object_is_damage(url: str, folder: Path, keys: dict[str, Any], harm: str) -> None:
    with perdure.open(url, objects=at(folder), **keys) as store:
        ids = fill(store)
        store.move_out()
    for name in stored(folder):
        data = (folder / name).read_bytes()
        bad = {"changed": data[:50] + b"?" + data[51:], "cut": data[:-1], "longer": data + b"x"}[harm]
        (folder / name).write_bytes(bad)
    with perdure.open(url, objects=at(folder), **keys) as store:
        with pytest.raises(perdure.Damaged):
            store.thread("a").load(ids[-1], strict=True)
        report = store.verify()
        assert any("pack" in problem.what for problem in report.problems)
        assert any("large result" in problem.what for problem in report.problems)


def test_a_cell_that_does_not_say_where_is_damage(store: perdure.Store) -> None:
    ids = fill(store)
    store.move_out()
    rows(store, "UPDATE pack SET data = :data RETURNING 1", data=MARK + b"short")
    with pytest.raises(perdure.Damaged):
        store.thread("a").load(ids[-1], strict=True)
    assert not store.verify().ok


def test_an_object_store_that_cannot_be_reached_is_unavailable(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with perdure.open(url, objects=at(folder)) as store:
        ids = fill(store)
        store.move_out()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    far = Objects("s3://bucket/prefix", cold_s=0, min_bytes=1024, timeout_s=0.5)
    with perdure.open(url, objects=far) as store:
        with pytest.raises(perdure.Unavailable, match="s3://bucket/prefix") as caught:
            store.thread("a").load(ids[-1])
        assert not isinstance(caught.value, perdure.ObjectMissing)
        assert "hush" not in str(caught.value)
        assert caught.value.__cause__ is None
        with pytest.raises(perdure.Unavailable):
            store.verify()
    with perdure.open(url, objects=at(folder)) as store:
        check(store)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("ftp://x/y", "no object store"),
        ("s3://", "no object store"),
        ("s3://me:hush@bucket/x", "environment"),
        ("s3://bucket/x?sig=hush", "environment"),
        ("file://relative", "file:///absolute"),
        ("memory://", "lost with the process"),
    ],
)
def test_a_wrong_address_is_refused_without_showing_a_secret(tmp_path: Path, given: str, says: str) -> None:
    with pytest.raises(perdure.UsageError, match=says) as caught:
        perdure.open(str(tmp_path / "a.db"), objects=given)
    assert "hush" not in str(caught.value)
    assert not (tmp_path / "a.db").exists()


def test_a_store_in_memory_may_have_its_objects_there() -> None:
    from obstore.store import MemoryStore

    for place in ("memory://", MemoryStore()):
        with perdure.open(":memory:", objects=Objects(place, cold_s=0, min_bytes=1024)) as store:
            fill(store)
            before = scene(store)
            assert store.move_out().objects > 3
            assert scene(store) == before
            check(store)


def test_small_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(perdure.UsageError, match="min_bytes"):
        perdure.open(str(tmp_path / "a.db"), objects=at(tmp_path, min_bytes=10))


def test_a_cell_says_all_that_is_needed() -> None:
    cell = far_cell("store/1/x/y", b"hello, world: more than eleven")
    assert wanted_of(cell).name == "store/1/x/y"
    assert wanted_of(cell).size == 30
    assert show_url("s3://user:pass@bucket/p?sig=1#x") == "s3://bucket/p"


def test_what_is_kept_of_objects_is_bounded(store: perdure.Store, url: str, folder: Path) -> None:
    fill(store)
    store.move_out()
    driver = store._context.driver
    assert isinstance(driver, FarDriver)
    driver.cache._max = 20_000
    driver.cache.drop(stored(folder))
    check(store)
    assert 0 < driver.cache.bytes <= 20_000
    assert driver.cache.bytes == sum(map(len, driver.cache._kept.values()))
