"""A repair that lacks a key or an object store is refused, and never takes sound data for lost; an object that is lost
takes with it what was in it, and nothing else. Verify and the doctor name it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import doctor_kit
import psycopg
import pytest
from far_kit import at, fetch, grow, pack, rows, stored
from keeping_kit import PLACES, place

import perdure
from perdure.cli import main
from perdure.storage.far_cells import wanted_of

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))
WAYS: list[dict[str, Any]] = [{}, {"in_place": True}]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    return place(request, request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "objects"
    made.mkdir()
    return made


@pytest.fixture
def moved(url: str, folder: Path) -> dict[str, list[str]]:
    """A store whose packs and large results are in a folder; the names of the objects by their table."""
    with perdure.open(url, objects=at(folder)) as store:
        fill(store)
        named = {
            "pack": [wanted_of(bytes(cell)).name for (cell,) in rows(store, "SELECT data FROM pack ORDER BY pack")],
            "blob": [wanted_of(bytes(cell)).name for (cell,) in rows(store, "SELECT body FROM blob")],
        }
        assert len(named["pack"]) == 2
        assert len(named["blob"]) == 1
    return named


def fill(store: perdure.Store) -> None:
    """Two threads whose differences are packed, one of them with a fork, and a run with a large result; moved out."""
    ids = grow(store.thread("a"), 30, words=1500)
    store.thread("a").fork(ids[20], name="fork").save({"mine": 1})
    grow(store.thread("other"), 12, seed=3, words=1500)
    store.run(fetch, 1, id="big").result(timeout_s=30)
    pack(store)
    assert store.move_out().objects == 3


def everything(url: str) -> list[Any]:
    """All that a store holds, as it is stored."""
    tables = ("thread", "record", "body", "pack", "journal", "run", "blob", "seal", "quarantine")
    if url.startswith("postgresql"):
        with psycopg.connect(url, options="-c search_path=perdure", autocommit=True) as other:
            schemas = other.execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'perdure%'").fetchall()
            return [schemas, *(sorted(other.execute(f"SELECT * FROM {table}"), key=repr) for table in tables)]
    import apsw

    connection = apsw.Connection(url)
    try:
        found = [sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables]
    finally:
        connection.close()
    return [sorted(name for name in os.listdir(os.path.dirname(url)) if "-" not in name.rpartition(".")[2]), *found]


def execute(url: str, text: str) -> None:
    if url.startswith("postgresql"):
        with psycopg.connect(url, options="-c search_path=perdure", autocommit=True) as other:
            other.execute(text)
        return
    import apsw

    connection = apsw.Connection(url)
    connection.execute(text)
    connection.close()


def harm(url: str) -> None:
    """Something that a repair has to do, so that it would write: a thread whose head is another record's."""
    execute(url, "UPDATE thread SET head_hash = NULL WHERE name = 'a'")


# --- keys


def two_tenants(url: str) -> None:
    with perdure.open(url, keys={"default": KEY, "acme": OTHER}) as store:
        for name in ("default", "acme"):
            thread = store.tenant(name).thread("a")
            for number in range(4):
                thread.save({"of": name, "n": number})
    harm(url)


@pytest.mark.parametrize(
    "keys",
    [None, {"default": OTHER, "acme": OTHER}, {"default": KEY}],
    ids=["none", "one wrong", "one missing"],
)
def test_without_the_right_keys_it_is_refused_and_nothing_is_changed(url: str, keys: Any) -> None:
    two_tenants(url)
    before = everything(url)
    for way in WAYS:
        with pytest.raises(perdure.KeyMissing, match="Nothing was changed") as caught:
            perdure.repair(url, keys=keys, **way)
        assert f"leave=[{caught.value.tenant!r}]" in str(caught.value)
    assert everything(url) == before
    done = perdure.repair(url, keys={"default": KEY, "acme": OTHER}, in_place=True)
    assert done.ok
    assert done.report.checkpoints == 8


def test_a_tenant_whose_key_is_gone_is_left_as_it_is(url: str) -> None:
    two_tenants(url)
    before = everything(url)
    done = perdure.repair(url, keys={"default": KEY}, leave=["acme"], in_place=True)
    assert (done.ok, done.left, done.report.checkpoints, done.rows) == (True, ("acme",), 4, 1)
    with perdure.open(url, keys={"default": KEY, "acme": OTHER}) as store:
        assert store.verify().ok
        assert not store.tenant("acme").verify().ok  # its head is as it was
        assert store.tenant("acme").thread("a").history(limit=1) is not None
    after = everything(url)
    assert after[3] == before[3]  # bodies
    with pytest.raises(perdure.UsageError, match="no such tenant"):
        perdure.repair(url, keys={"default": KEY}, leave=["nobody"])


def test_a_tenant_without_data_needs_no_key(url: str) -> None:
    with perdure.open(url, keys={"default": KEY}) as store:
        store.thread("a").save({"n": 1})
    execute(url, "INSERT INTO tenant (tenant, name) VALUES (777, 'empty')")
    harm(url)
    done = perdure.repair(url, keys={"default": KEY}, in_place=True)
    assert (done.ok, done.left) == (True, ())


def test_an_encrypted_store_whose_keys_are_not_listed_any_more_is_refused(url: str) -> None:
    two_tenants(url)
    execute(url, "DELETE FROM seal")
    before = everything(url)
    for keys, says in ((None, "PERDURE_KEYS"), ({"default": KEY, "acme": OTHER}, "the table `seal`")):
        for way in WAYS:
            with pytest.raises(perdure.KeyMissing, match=says):
                perdure.repair(url, keys=keys, **way)
    assert everything(url) == before


def test_the_command_says_what_to_do(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERDURE_KEYS", raising=False)
    two_tenants(url)
    before = everything(url)
    assert main(["repair", "--store", url, "--in-place", "--yes"]) > 1
    said = capsys.readouterr().err
    assert "PERDURE_KEYS" in said
    assert "--leave default" in said
    assert everything(url) == before
    assert main(["repair", "--store", url, "--dry-run", "--leave", "default", "--leave", "acme"]) == 0
    assert "tenant acme was left as it is" in capsys.readouterr().err


# --- objects


def test_a_lost_pack_takes_its_checkpoints_and_nothing_else(
    url: str, folder: Path, moved: dict[str, list[str]]
) -> None:
    gone = moved["pack"][0]
    with perdure.open(url, objects=at(folder)) as store:
        [(first, last)] = rows(store, "SELECT first, last FROM pack ORDER BY pack LIMIT 1")
        packed = {
            pd_id(number)
            for (number,) in rows(
                store, "SELECT id FROM record WHERE id BETWEEN :first AND :last AND body = -1", first=first, last=last
            )
        }
        states = {
            (info.name, one.id): one.state
            for info in store.threads(limit=None)
            for one in store.thread(info.name).history(limit=None)
        }
    (folder / gone).unlink()
    with perdure.open(url, objects=at(folder)) as store:
        named = [problem.what for problem in store.verify().problems if gone in problem.what]
        assert len(named) == 1
        assert "thread 'a'" in named[0]
    done = perdure.repair(url, objects=at(folder), in_place=True)
    assert done.report.ok
    assert not done.ok
    lost = {mend.checkpoint for mend in done.lost if mend.checkpoint}
    assert lost == packed
    assert [mend.what for mend in done.lost if gone in mend.what] == named
    assert done.quarantine is not None
    assert gone.encode() in _decoded(Path(done.quarantine))  # where its object was
    with perdure.open(url, objects=at(folder)) as store:
        for (name, number), state in states.items():
            if number not in lost:
                assert store.thread(name).load(number, strict=True).state == state
            else:
                with pytest.raises(perdure.PerdureError):
                    store.thread(name).load(number, strict=True)
        grow_on(store)
    assert not perdure.repair(url, objects=at(folder), in_place=True).changed


def _decoded(path: Path) -> bytes:
    import base64
    import json

    found = [json.loads(line) for line in path.read_text().splitlines()]
    return b"".join(base64.b64decode(row["row"]["data"]["base64"]) for row in found if row["table"] == "pack")


def pd_id(number: int) -> str:
    from perdure.log.ids import show_id

    return show_id(number)


def grow_on(store: perdure.Store) -> None:
    thread = store.thread("a")
    saved = thread.save({**thread.load().state, "after": "the repair"})
    assert thread.load(strict=True).id == saved.id
    assert store.verify().ok


def test_all_lost_but_the_database_is_mended_too(url: str, folder: Path, moved: dict[str, list[str]]) -> None:
    for name in (moved["pack"][0], *moved["blob"]):
        (folder / name).unlink()
    harm(url)
    copy = perdure.repair(url, objects=at(folder))
    assert any("head" in mend.what for mend in copy.mended)
    assert not any(moved["pack"][1] in mend.what for mend in copy.lost)
    assert [mend.thread for mend in copy.lost if moved["pack"][0] in mend.what] == ["a"]
    assert [mend.run for mend in copy.lost if moved["blob"][0] in mend.what] == ["big"]


@perdure.step(name="unreadable.more")
def more_words() -> str:
    return "".join(str(number * number) for number in range(40_000))


@perdure.durable(name="unreadable.asks")
def asks() -> str:
    more_words()
    return str(perdure.ask("Go on?"))


def test_runs_that_need_a_lost_result_are_named_and_stop(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder)) as store:
        store.run(fetch, 1, id="done").result(timeout_s=30)
        store.run(asks, id="waits")
        assert store.move_out().objects == 2
    for name in stored(folder):
        (folder / name).rename(folder / f"{name}.away")
    done = perdure.repair(url, objects=at(folder), objects_lost=True, in_place=True)
    assert {mend.run for mend in done.lost} == {"done", "waits"}
    assert [mend.run for mend in done.mended] == ["waits"]
    for name in stored(folder):
        (folder / name).rename(str(folder / name).removesuffix(".away"))
    with perdure.open(url, objects=at(folder)) as store:  # they have come back: nothing was removed
        assert store.get_run("waits").info().status == "stuck"
        assert store.get_run("done").steps()[0].result is not None
        assert store.verify().ok


def test_if_no_object_is_there_the_place_is_taken_for_wrong(
    url: str, folder: Path, moved: dict[str, list[str]], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    before = everything(url)
    for way in WAYS:
        with pytest.raises(perdure.ObjectMissing, match="wrong place"):
            perdure.repair(url, objects=at(wrong), **way)
        with pytest.raises(perdure.ObjectMissing, match="PERDURE_OBJECTS"):
            perdure.repair(url, **way)
    assert everything(url) == before
    assert not perdure.repair(url, objects=at(folder)).changed
    done = perdure.repair(url, objects=at(wrong), objects_lost=True, dry_run=True)
    assert sum("is not at" in mend.what for mend in done.lost) == 3


def test_an_encrypted_store_with_a_lost_object(url: str, folder: Path) -> None:
    with perdure.open(url, objects=at(folder), keys=KEY) as store:
        fill(store)
        gone = wanted_of(bytes(rows(store, "SELECT data FROM pack ORDER BY pack")[0][0])).name
    (folder / gone).unlink()
    with pytest.raises(perdure.KeyMissing):
        perdure.repair(url, objects=at(folder), in_place=True)
    done = perdure.repair(url, objects=at(folder), keys=KEY, in_place=True)
    assert done.report.ok
    assert any(gone in mend.what for mend in done.lost)
    with perdure.open(url, objects=at(folder), keys=KEY) as store:
        grow_on(store)


# --- the doctor


def test_the_doctor_names_missing_objects(url: str, folder: Path, moved: dict[str, list[str]], tmp_path: Path) -> None:
    with perdure.open(url, objects=at(folder)) as store:
        [fine] = doctor_kit.said(store)["objects"]
        assert (fine.level, fine.says.startswith("3 objects at")) == ("ok", True)
    gone = moved["pack"][0]
    (folder / gone).unlink()
    with perdure.open(url, objects=at(folder)) as store:
        [found] = doctor_kit.said(store)["objects"]
        assert found.level == "problem"
        assert gone in found.says
        assert "thread 'a'" in found.says
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    with perdure.open(url, objects=at(wrong)) as store:
        [found] = doctor_kit.said(store)["objects"]
        assert "none of 3 objects" in found.says
        assert "right place?" in found.do
    with perdure.open(url) as store:
        [found] = doctor_kit.said(store)["objects"]
        assert "opened without it" in found.says


def test_the_doctor_says_nothing_of_objects_where_there_are_none(url: str) -> None:
    with perdure.open(url) as store:
        store.thread("a").save({"n": 1})
        assert "objects" not in doctor_kit.said(store)


def test_a_pack_that_is_still_here_needs_no_object_store(url: str) -> None:
    with perdure.open(url) as store:
        grow(store.thread("a"), 20, words=1500)
        pack(store)
    harm(url)
    assert perdure.repair(url).report.ok
