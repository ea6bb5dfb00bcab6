"""A repair that lacks a key is refused, and never takes sound data for lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
import pytest
from keeping_kit import PLACES, place

import perdure
from perdure.cli import main

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))
WAYS: list[dict[str, Any]] = [{}, {"in_place": True}]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    return place(request, request.param)


def everything(url: str) -> list[Any]:
    """All that a store holds, as it is stored."""
    tables = ("thread", "record", "body", "pack", "journal", "run", "blob", "tenant_key", "quarantine")
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
        with pytest.raises(perdure.errors.KeyMissing, match="Nothing was changed") as caught:
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
        assert store.ops.verify().ok
        assert not store.tenant("acme").ops.verify().ok  # its head is as it was
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
    execute(url, "DELETE FROM tenant_key")
    before = everything(url)
    for keys, says in ((None, "PERDURE_KEYS"), ({"default": KEY, "acme": OTHER}, "the table `tenant_key`")):
        for way in WAYS:
            with pytest.raises(perdure.errors.KeyMissing, match=says):
                perdure.repair(url, keys=keys, **way)
    assert everything(url) == before


def test_the_command_says_what_to_do(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERDURE_KEYS", raising=False)
    two_tenants(url)
    before = everything(url)
    assert main(["store", "repair", "--store", url, "--in-place", "--yes"]) > 1
    said = capsys.readouterr().err
    assert "PERDURE_KEYS" in said
    assert "--leave default" in said
    assert everything(url) == before
    assert main(["store", "repair", "--store", url, "--dry-run", "--leave", "default", "--leave", "acme"]) == 0
    assert "tenant acme was left as it is" in capsys.readouterr().err
