"""Backups in an object store: through S3's protocol, against a server on this machine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fake_s3 import fake_s3

import perdure
from perdure.cli import main
from perdure.storage.objects import check_url, open_objects


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with fake_s3("agents") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield "s3://agents/files"


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


@pytest.fixture(params=["gs", "az"])
def other_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with fake_s3("agents") as url:
        account = {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", url)
        yield f"{request.param}://agents/files"


def test_a_backup_in_gcs_and_azure_and_back(other_bucket: str, tmp_path: Path) -> None:
    place, path = f"{other_bucket}/monday.backup", str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("a").save({"text": random.Random(7).randbytes(6_000_000)})  # more than one part
        store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="retention policy"):
            store.ops.backup(f"{other_bucket}/b", retain_until=datetime.now(UTC) + timedelta(days=1))
    assert perdure.ops.restore_backup(place, tmp_path / "b.db").ok
    objects = open_objects(other_bucket)
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


def test_errors_name_the_place_and_no_secret(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(perdure.NotFound, match="no bucket 'missing'"):
        open_objects("s3://missing/x").put_file("a", Path(__file__))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    objects = open_objects("s3://missing/x")
    with pytest.raises(perdure.errors.Unavailable, match="s3://missing/x") as caught:
        objects.put_file("a", Path(__file__))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "s3://", "s3://user:hush@bucket/a", "s3://bucket/a?key=hush", "file:///a"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(perdure.UsageError) as caught:
        check_url(url)
    assert "hush" not in str(caught.value)


def test_a_backup_in_s3_and_back(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, path = "s3://agents/backups/monday.backup", str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("a").save({"n": 1})
        assert store.ops.backup(place).path == place
        with pytest.raises(perdure.UsageError, match="exists already"):
            store.ops.backup(place)
        with pytest.raises(perdure.UsageError, match="names no object"):
            store.ops.backup("s3://agents")
        assert store.ops.test_backup(place).ok
    assert perdure.ops.restore_backup(place, str(tmp_path / "restored.db")).ok
    with perdure.open(str(tmp_path / "restored.db")) as restored:
        assert restored.thread("a").load().state == {"n": 1}
    with pytest.raises(perdure.NotFound, match="nothing"):
        perdure.ops.restore_backup("s3://agents/backups/nothing.backup", str(tmp_path / "x.db"))
    monkeypatch.setenv("PERDURE_STORE", path)
    assert main(["store", "backup", "s3://agents/b/one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "s3://agents/b/one"
    assert main(["store", "restore", "s3://agents/b/one", "--test"]) == 0


def test_an_archive_in_s3_and_back(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "s3://agents/threads/alice.db"
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
