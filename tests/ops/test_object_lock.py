"""Backups and heads of audits that nobody can remove before a date: against moto's server, which keeps S3's locks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cli import main


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """S3's client for a server with two buckets; one has Object Lock."""
    from botocore.session import get_session
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"ACCESS_KEY_ID": "someone", "SECRET_ACCESS_KEY": "hush-hush", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    client = get_session().create_client("s3")
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    client.create_bucket(Bucket="plain")
    yield client
    client.close()
    server.stop()


@perdure.durable
def locked_trip() -> str:
    return "done"


def test_a_locked_backup_and_head_cannot_be_removed(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "agent.db")
    with perdure.open(place) as store:
        store.run(locked_trip, id="trip")
    store_option = ["--store", place]
    assert main(["store", "backup", "s3://locked/a/monday.db", "--retain-until", "90d", *store_option]) == 0
    assert (
        main(["audit", "trip", "--write", "s3://locked/trip.head", "--retain-until", "2099-01-01", *store_option]) == 0
    )
    assert main(["audit", "trip", "--check", "s3://locked/trip.head", *store_option]) == 0
    versions = s3.list_object_versions(Bucket="locked")["Versions"]
    assert {one["Key"] for one in versions} == {"a/monday.db", "trip.head"}
    for one in versions:
        with pytest.raises(s3.exceptions.ClientError, match="Access"):
            s3.delete_object(Bucket="locked", Key=one["Key"], VersionId=one["VersionId"])
    capsys.readouterr()
    for refused, why in (
        (["s3://plain/a.db", "--retain-until", "90d"], "Object Lock enabled"),
        (["s3://locked/b.db", "--retain-until", "2020-01-01"], "a time to come"),
        ([str(tmp_path / "b.db"), "--retain-until", "90d"], "only objects in S3"),
        (["hdfs://namenode/a.db"], "HDFS is not supported"),
    ):
        assert main(["store", "backup", *refused, *store_option]) == 2
        assert why in capsys.readouterr().err
    assert "Contents" not in s3.list_objects_v2(Bucket="plain")  # refused before it was uploaded
    with perdure.open(place) as store:
        with pytest.raises(perdure.UsageError, match="retain_until= wants a datetime"):
            store.ops.backup("s3://locked/c.db", retain_until="90d")  # type: ignore[arg-type]
        store.thread("a").save({})
        with pytest.raises(perdure.UsageError, match="HDFS is not supported"):
            store.ops.archive("a", "hdfs://namenode/a.db")
