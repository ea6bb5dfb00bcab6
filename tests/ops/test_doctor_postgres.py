"""The doctor on PostgreSQL: settings, connections, roles, transactions, the log, the clock, and the command."""

from __future__ import annotations

import json
import time

import psycopg
import pytest
from doctor_kit import said, text_of, worst
from role_kit import Roles

import perdure
from perdure.cli import main
from perdure.ops.doctor import postgres as doctor_postgres
from perdure.testing.postgres_server import PostgresServer


def test_a_server_that_does_not_sync_is_a_problem(postgres_url: str) -> None:
    """The tests' own server: fast, and not for data."""
    with perdure.open(postgres_url) as store:
        found = said(store)["durability"]
    assert worst(found) == "problem"
    assert "fsync and full_page_writes off" in text_of(found)


def test_a_server_as_it_should_be_and_commits_that_are_not() -> None:
    with PostgresServer(fsync=True, max_connections=20) as server:
        url = server.create_database("doctor")
        with perdure.open(url) as store:
            assert worst(said(store)["durability"]) in ("ok", "note")  # note: pages without checksums
        with perdure.open(url, durability="normal") as store:
            assert "synchronous_commit is off" in text_of(said(store)["durability"])
        with perdure.open(url, durability="replicated") as store:
            assert "the server names none" in text_of(said(store)["durability"])
        others = [psycopg.connect(url) for _ in range(14)]
        with perdure.open(url) as store:
            assert worst(said(store)["connections"]) == "warning"
        for other in others:
            other.close()


def test_a_transaction_that_somebody_forgot(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with perdure.open(postgres_url) as store, psycopg.connect(postgres_url) as other:
        assert worst(said(store)["transactions"]) == "ok"
        other.execute("SELECT 1")
        monkeypatch.setattr(doctor_postgres, "_LONG_S", 0)
        [found] = said(store)["transactions"]
        assert found.level == "warning"
        assert f"pg_terminate_backend({other.info.backend_pid})" in found.hint
        assert "idle in transaction" in found.message
        other.rollback()
        assert worst(said(store)["transactions"]) == "ok"


def test_roles_and_tenants(roles: Roles) -> None:
    with perdure.open(roles.owner) as store, perdure.open(roles.owner, tenant="acme") as other:
        store.thread("t").save({})
        assert worst(said(store)["roles"]) == "note"
        other.thread("t").save({})
        assert "only the application keeps them apart" in text_of(said(store)["roles"])
    with perdure.open(roles.app, tenant="acme") as store:
        found = said(store)
        assert worst(found["roles"]) == "ok"
        assert "one tenant at a time" in text_of(found["roles"])
        assert not [each for findings in found.values() for each in findings if "could not be checked" in each.message]
    with perdure.open(roles.tenant("acme"), tenant="acme") as store:
        found = said(store)
        assert "to tenant 'acme'" in text_of(found["roles"])
        assert not [each for findings in found.values() for each in findings if "could not be checked" in each.message]
    roles.execute("ALTER TABLE perdure.record NO FORCE ROW LEVEL SECURITY")
    with perdure.open(roles.owner) as store:
        assert (worst(said(store)["roles"]), "record" in text_of(said(store)["roles"])) == ("problem", True)


def test_a_clock_that_is_an_hour_off(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        found = said(store, clock_us=lambda: time.time_ns() // 1000 + 3_600_000_000)["clock"]
        assert worst(found) == "problem"
        found = said(store, clock_us=lambda: time.time_ns() // 1000 - 5_000_000)["clock"]
        assert worst(found) == "warning"


def test_a_server_that_is_not_there_and_no_password_in_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--store", "postgresql://app:sesame@127.0.0.1:1/app", "--json"]) == 1
    text = capsys.readouterr().out
    assert json.loads(text)["findings"][0]["check"] == "open"
    assert "sesame" not in text


def test_the_command(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    perdure.open(postgres_url).close()
    assert main(["doctor", "--store", postgres_url]) == 1  # fsync is off
    assert "problem  durability" in capsys.readouterr().out
