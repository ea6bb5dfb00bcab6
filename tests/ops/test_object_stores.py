"""Files in object stores, by the protocols of S3, GCS and Azure: backups, archives and bundles."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from object_places import object_place

import perdure
from perdure.cli import main
from perdure.storage.objects import check_url, open_objects


@pytest.fixture(params=["s3", "azurite"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with object_place(request.param, tmp_path / "azurite", monkeypatch) as url:
        yield url


def test_files_under_names(bucket: str, tmp_path: Path) -> None:
    objects = open_objects(bucket)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 30_000)
    assert not objects.exists("a/one")
    objects.put_file("a/one", source)
    assert objects.exists("a/one")
    objects.get_file("a/one", target)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(perdure.NotFound, match="a/two"):
        objects.get_file("a/two", target)


@pytest.mark.parametrize("bucket", ["gs", "az", "azurite"], indirect=True)
def test_a_backup_in_gcs_and_azure_and_back(bucket: str, tmp_path: Path) -> None:
    place, path = f"{bucket}/monday.backup", str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("a").save({"text": random.Random(7).randbytes(6_000_000)})  # more than one part
        store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="retention policy"):
            store.ops.backup(f"{bucket}/b", retain_until=datetime.now(UTC) + timedelta(days=1))
    assert perdure.ops.restore_backup(place, tmp_path / "b.db").ok
    objects = open_objects(bucket)
    objects.put_file("one", Path(__file__), create=True)
    with pytest.raises(perdure.UsageError, match="already"):
        objects.put_file("one", Path(__file__), create=True)
    with pytest.raises(perdure.NotFound, match="two"):
        objects.get_file("two", tmp_path / "two")
    objects.put("a/value", b"large")
    assert objects.get("a/value") == b"large"
    for _ in range(2):  # a second time it is gone
        objects.delete("a/value")
    with pytest.raises(perdure.NotFound, match="a/value"):
        objects.get("a/value")


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_errors_name_the_place_and_no_secret(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(perdure.NotFound, match="no bucket 'missing'"):
        open_objects("s3://missing/x").put_file("a", Path(__file__))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    objects = open_objects("s3://missing/x")
    with pytest.raises(perdure.errors.Unavailable, match="s3://missing/x") as caught:
        objects.put_file("a", Path(__file__))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("bucket", ["azurite"], indirect=True)
def test_a_wrong_key_is_named_as_the_cause(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_objects(bucket).put("a", b"kept")
    with monkeypatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"hush" * 16).decode())
        objects = open_objects(bucket)
        calls = (partial(objects.put, "a", b""), partial(objects.get, "a"), partial(objects.delete, "a"))
        for call in calls:
            with pytest.raises(perdure.errors.Unavailable, match=r"refused the request .* check the credentials"):
                call()
    assert open_objects(bucket).get("a") == b"kept"


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "s3://", "s3://user:hush@bucket/a", "s3://bucket/a?key=hush", "file:///a"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(perdure.UsageError) as caught:
        check_url(url)
    assert "hush" not in str(caught.value)


def test_a_backup_in_a_bucket_and_back(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, path = f"{bucket}/monday.backup", str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("a").save({"n": 1})
        assert store.ops.backup(place).path == place
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="names no object"):
            store.ops.backup(bucket.removesuffix("/files"))
        assert store.ops.test_backup(place).ok
    assert perdure.ops.restore_backup(place, str(tmp_path / "restored.db")).ok
    with perdure.open(str(tmp_path / "restored.db")) as restored:
        assert restored.thread("a").load().state == {"n": 1}
    with pytest.raises(perdure.NotFound, match="nothing"):
        perdure.ops.restore_backup(f"{bucket}/nothing.backup", str(tmp_path / "x.db"))
    monkeypatch.setenv("PERDURE_STORE", path)
    assert main(["store", "backup", f"{bucket}/b/one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == f"{bucket}/b/one"
    assert main(["store", "restore", f"{bucket}/b/one", "--test"]) == 0


def test_an_archive_in_a_bucket_and_back(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{bucket}/alice.db"
    with perdure.open(tmp_path / "a.db") as store:
        for name in ("alice", "bob"):
            store.thread(name).save({"n": name})
        with monkeypatch.context() as patch:
            patch.setattr("perdure.transfers.archive._remove_thread", None)  # as if killed after the upload
            with pytest.raises(TypeError):
                store.ops.archive("alice", place)
        assert store.thread("alice").load().state == {"n": "alice"}
        assert store.ops.archive("alice", place).place == place
        with pytest.raises(perdure.Archived, match=place):
            store.thread("alice").load()
        with pytest.raises(perdure.NotFound):
            store.ops.archive("bob", place)
        store.ops.unarchive("alice")
        assert store.thread("alice").load().state == {"n": "alice"}
        assert store.thread("bob").load().state == {"n": "bob"}


def test_a_bundle_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    from perdure.ops import open_bundle

    place = f"{bucket}/incident.db"
    with perdure.open(tmp_path / "store.db") as store:
        store.thread("one").save({"name": "one"})
        assert store.snapshot("s").export(place).place == place
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.snapshot("t").export(place)
    with open_bundle(place) as found:
        assert [info.name for info in found.threads()] == ["one"]
    with pytest.raises(perdure.NotFound), open_bundle(f"{bucket}/other.db"):
        pass
