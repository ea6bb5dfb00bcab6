"""A repair that lacks a key leaves the tenant as it is, and never takes sound data for lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
import pytest
from keeping_kit import PLACES, place

import perdure

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    return place(request, request.param)


def everything(url: str) -> list[Any]:
    """All that a store holds, as it is stored."""
    tables = ("thread", "record", "body", "journal", "run", "blob", "tenant_key")
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
    ("keys", "left"),
    [(None, ("default", "acme")), ({"default": OTHER, "acme": OTHER}, ("default",)), ({"default": KEY}, ("acme",))],
    ids=["none", "one wrong", "one missing"],
)
def test_a_tenant_whose_key_is_missing_is_copied_as_it_is(url: str, keys: Any, left: tuple[str, ...]) -> None:
    two_tenants(url)
    before = everything(url)
    to = "repaired.db" if "://" not in url else "repaired"
    done = perdure.ops.repair_store(url, keys=keys, to=to)
    assert everything(url)[1:] == before[1:]
    assert (done.ok, sorted(done.left), done.lost) == (True, sorted(left), ())
    if done.changed:
        options: dict[str, Any] = {} if "://" not in url else {"schema": to}
        with perdure.open(url if options else to, keys={"default": KEY, "acme": OTHER}, **options) as store:
            for name in ("default", "acme"):
                assert store.tenant(name).ops.verify().ok == (name not in left)
                assert len(list(store.tenant(name).thread("a").branches())) == 1


def test_a_store_whose_data_keys_are_lost_is_not_taken_for_damaged(url: str) -> None:
    two_tenants(url)
    execute(url, "DELETE FROM tenant_key")
    for keys in (None, {"default": KEY, "acme": OTHER}):
        done = perdure.ops.repair_store(url, keys=keys)
        assert (sorted(done.left), done.changed) == (["acme", "default"], False)
