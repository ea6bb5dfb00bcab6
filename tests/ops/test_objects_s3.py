"""The same through S3's protocol, against a server on this machine; and what a user sees of it at the terminal."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from far_kit import KEY, cells, check, fill, named, scene
from moto.server import ThreadedMotoServer

import perdure
from perdure.cli import main
from perdure.storage.objects import Objects


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    urllib.request.urlopen(urllib.request.Request(f"{server}/agents", method="PUT")).close()
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return "s3://agents/cold"


def listed(bucket: str) -> set[str]:
    import obstore
    from obstore.store import from_url

    store = from_url(bucket, client_options={"allow_http": True})
    return {meta["path"] for page in obstore.list(store) for meta in page}


def far(bucket: str, **options: Any) -> Objects:
    return Objects(bucket, **{"cold_s": 0.0, "min_bytes": 1024, "keep_s": 0.0, **options})


def test_s3_round_trip(url: str, bucket: str) -> None:
    with perdure.open(url, objects=far(bucket), keys=KEY) as store:
        fill(store, 70)
        before = scene(store)
        assert store.move_out().objects > 1
        assert listed(bucket) == named(store)
    with perdure.open(url, objects=far(bucket), keys=KEY) as store:
        assert scene(store) == before
        check(store)
        for name in ("fork", "a", "other"):
            store.delete(name)
        store.move_out()
        assert listed(bucket) == named(store)


async def test_s3_round_trip_async(url: str, bucket: str) -> None:
    with perdure.open(url, objects=far(bucket)) as store:
        ids = fill(store, 70)
        before = scene(store)
    async with perdure.open(url, objects=far(bucket)) as store:
        assert (await store.amove_out()).objects > 1
    async with perdure.open(url, objects=far(bucket)) as store:
        assert (await store.thread("a").aload(ids[-1])).state == before[f"a {ids[-1]}"][0]
        assert (await store.averify()).ok
        await store.abring_back()
        await store.amove_out(cold_s=10**6)
        assert listed(bucket) == set()


def test_a_missing_object_and_a_missing_bucket(url: str, bucket: str) -> None:
    import obstore
    from obstore.store import from_url

    with perdure.open(url, objects=far(bucket)) as store:
        ids = fill(store, 70)
        store.move_out()
        obstore.delete(from_url(bucket, client_options={"allow_http": True}), sorted(named(store)))
    with perdure.open(url, objects=far(bucket)) as store:
        with pytest.raises(perdure.ObjectMissing, match="s3://agents/cold"):
            store.thread("a").load(ids[-1])
        assert sum("is not at" in problem.what for problem in store.verify().problems) == len(cells(store))
    with perdure.open(url, objects=far("s3://nobodys/x")) as store:
        with pytest.raises(perdure.Unavailable, match="s3://nobodys/x") as caught:
            store.thread("a").load(ids[-1])
        assert "hush" not in str(caught.value)


def test_a_backup_in_s3_and_back(url: str, bucket: str, tmp_path: Path) -> None:
    place = "s3://agents/backups/monday.backup"
    with perdure.open(url, objects=far(bucket)) as store:
        fill(store, 70)
        before = scene(store)
        moved = store.move_out()
        made = store.backup(place)
        assert (made.path, made.objects) == (place, moved.objects)
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.backup(place)
        with pytest.raises(perdure.UsageError, match="names no object"):
            store.backup("s3://agents")
        assert store.try_restore(place).ok
    target = str(tmp_path / "restored.db")
    with pytest.raises(perdure.ObjectMissing, match="objects="):
        perdure.restore(place, target)
    assert not Path(target).exists()
    assert perdure.restore(place, target, objects=far(bucket)).ok
    with perdure.open(target, objects=far(bucket)) as restored:
        assert scene(restored) == before
        there = listed(bucket)
        for name in ("fork", "a", "other"):  # what it has let go belongs to the other store
            restored.delete(name)
        restored.compact()
        restored.move_out()
        assert listed(bucket) >= there
    with perdure.open(url, objects=far(bucket)) as store:
        assert scene(store) == before
    with pytest.raises(perdure.ObjectMissing, match="nothing"):
        perdure.restore("s3://agents/backups/nothing.backup", str(tmp_path / "x.db"))


def test_from_the_command_line(
    tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        fill(store, 70)
    monkeypatch.setenv("PERDURE_STORE", path)

    def run(*argv: str) -> Any:
        assert main([*argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    with_objects = ("--objects", bucket)
    assert run("objects", *with_objects) == {
        "place": bucket, "objects": 0, "bytes": 0, "let_go": 0, "unfinished": 0
    }  # fmt: skip
    moved = run("objects", "out", "--cold", "0s", *with_objects)
    assert moved["objects"] >= 1  # only what is large is worth it
    assert main(["verify"]) == 4
    assert "--objects URL" in capsys.readouterr().err
    monkeypatch.setenv("PERDURE_OBJECTS", bucket)
    assert main(["verify"]) == 0
    assert main(["show", "a"]) == 0
    capsys.readouterr()
    assert run("backup", "s3://agents/b/one")["objects"] == moved["objects"]
    assert main(["restore", "s3://agents/b/one", "--to", str(tmp_path / "b.db")]) == 0
    assert main(["restore", "s3://agents/b/one", "--test"]) == 0
    capsys.readouterr()
    assert run("objects", "back")["objects"] == moved["objects"]
    assert main(["objects"]) == 0
    said = capsys.readouterr().out
    assert "0 objects named by the store" in said
    assert "s3://agents/cold" in said
    assert main(["objects", "--cold", "3d"]) == 2
    monkeypatch.delenv("PERDURE_OBJECTS")
    assert main(["objects"]) == 2
