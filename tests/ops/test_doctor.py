"""The doctor on both databases: each line of its list in a real situation, and that it never changes anything."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doctor_kit import DAY_US, now_us, raw, said, text_of, worst

import perdure
from perdure.cli.app import main
from perdure.encryption.keys import key_id
from perdure.log.store_size import Sample, add_sample, size_and_samples
from perdure.ops.doctor import checklist as doctor
from perdure.regions import replicate
from perdure.storage.program import Transaction
from perdure.transfers.catalogue import BackupRow, add_backup, mark_tested

GB = 10**9


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "d.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def store(url: str) -> Any:
    with perdure.open(url) as opened:
        opened.thread("t").save({"n": 1})
        yield opened


CHECKS = {
    "place",
    "durability",
    "backups",
    "retention",
    "disk",
    "clock",
    "runs",
    "encryption",
}


def test_every_line_of_the_list_is_there(store: perdure.Store) -> None:
    own = (
        {"log", "permissions"}
        if store._context.driver.dialect == "sqlite"
        else {"connections", "roles", "transactions"}
    )
    found = said(store)
    assert CHECKS | own <= set(found)
    assert not [
        finding for findings in found.values() for finding in findings if "could not be checked" in finding.message
    ]


async def test_awaited_it_says_the_same(url: str) -> None:
    async with perdure.open(url) as store:
        found = await asyncio.to_thread(store.ops.doctor)
    assert {finding.check for finding in found} >= CHECKS
    assert all(isinstance(finding, perdure.ops.Finding) for finding in found)


def test_it_only_reads(store: perdure.Store) -> None:
    class OnlyReads:
        def __init__(self, inner: Any) -> None:
            self._below = inner

        def __getattr__(self, name: str) -> Any:
            if name == "inner":
                raise AttributeError
            return getattr(self._below, name)

        def run(self, transaction: Transaction) -> Any:
            assert not transaction.write
            return self._below.run(transaction)

    driver = store._context.driver
    store._context.driver = OnlyReads(driver)
    try:
        assert said(store)
    finally:
        store._context.driver = driver


def test_durability_that_was_lowered_is_named(url: str) -> None:
    with perdure.open(url, durability="normal") as store:
        assert worst(said(store)["durability"]) in ("warning", "problem")  # the tests' server has fsync off
        assert "normal" in text_of(said(store)["durability"]) or "fsync" in text_of(said(store)["durability"])


def test_backups(store: perdure.Store) -> None:
    run = store._context.driver.run
    [never] = said(store)["backups"]
    assert (never.level, "never" in never.message or "no backup" in never.message) == ("warning", True)
    run(Transaction(lambda: add_backup(BackupRow("b1", "backup", "/b", None, now_us() - 5 * DAY_US, 10)), write=True))
    assert (worst(said(store)["backups"]), "5 days ago" in text_of(said(store)["backups"])) == ("warning", True)
    run(Transaction(lambda: add_backup(BackupRow("b2", "backup", "/b", None, now_us(), 10)), write=True))
    found = said(store)
    assert found["backups"][0].level == "ok"
    assert "no backup was ever restored" in text_of(found["restore"])
    run(Transaction(lambda: mark_tested("b2", now_us() - 200 * DAY_US), write=True))
    assert worst(said(store)["restore"]) == "warning"
    run(Transaction(lambda: mark_tested("b2", now_us()), write=True))
    assert worst(said(store)["restore"]) == "ok"


def test_a_replica_that_gets_no_rounds_any_more(store: perdure.Store) -> None:
    assert "replication" not in said(store)
    with perdure.open(":memory:") as target:
        replicate(store, target)
    assert worst(said(store)["replication"]) == "ok"
    raw(store, f"UPDATE snapshot SET taken_at = taken_at - {3 * DAY_US}")
    [found] = said(store)["replication"]
    assert (found.level, "3 days ago" in found.message) == ("warning", True)
    store.get_snapshot(found.hint.rpartition(" ")[2].strip("`")).release()
    assert "replication" not in said(store)


def test_checkpoints_that_are_kept_for_ever(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(said(store)["retention"]) == "note"
    monkeypatch.setattr(doctor, "_LARGE_BYTES", 1000)
    assert worst(said(store)["retention"]) == "warning"
    raw(store, "UPDATE thread SET retention = '{}'")
    assert worst(said(store)["retention"]) == "ok"


def test_growth_and_when_the_disk_is_full(store: perdure.Store) -> None:
    """From the sizes that were noted, which here were smaller by a gigabyte each day back."""
    context = store._context
    size, _ = context.driver.run(Transaction(lambda: size_and_samples(now_us())))
    for days in (4, 3, 2, 1):
        sample = Sample(now_us() - days * DAY_US, size.bytes - days * GB, 0)
        context.driver.run(Transaction(partial(add_sample, sample), write=True))
    [found] = said(store, free_bytes=5 * GB)["disk"]
    assert "it grows by 1.0 GB a day" in found.message
    if context.driver.dialect == "sqlite" or "cannot be seen" not in found.message:
        assert (found.level, "the disk is full in 5 days" in found.message) == ("problem", True)
        assert worst(said(store, free_bytes=40 * GB)["disk"]) == "warning"
        assert worst(said(store, free_bytes=400 * GB)["disk"]) == "ok"


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "f.db")) as store:
        assert worst(said(store, free_bytes=100 * 1024**2)["disk"]) == "problem"
        assert worst(said(store, free_bytes=50 * GB)["disk"]) == "ok"


def test_checkpoints_from_the_future(store: perdure.Store) -> None:
    assert worst(said(store)["clock"]) == "ok"
    raw(store, "UPDATE thread SET active = active + 600")
    found = said(store)["clock"]
    assert (worst(found), "in the future" in text_of(found)) == ("warning", True)


@perdure.durable(name="doctor_stuck")
def stuck() -> Any:
    return object()  # cannot be stored


@perdure.effect(name="doctor_doubtful", on_doubt="ask")
def doubtful() -> None:
    raise TimeoutError


@perdure.durable(name="doctor_in_doubt")
def in_doubt() -> None:
    doubtful()


@perdure.durable(name="doctor_waits")
def waits() -> Any:
    return perdure.ask("?")


def test_runs_that_need_somebody(store: perdure.Store) -> None:
    store.start(waits, id="late")
    assert worst(found := said(store)["runs"]) == "ok"
    assert "none has waited for a worker for more than 10 minutes" in text_of(found)
    assert store.run(stuck, id="s").status == "stuck"
    assert "1 run stuck" in text_of(said(store)["runs"])
    raw(store, "UPDATE run SET wake_at = 1, changed_at = 1 WHERE id = 'late'")
    assert "due, and no worker" in text_of(said(store)["runs"])
    raw(store, "UPDATE run SET status = 'running', owner = 'x', lease_until = 1 WHERE id = 'late'")
    text = text_of(said(store)["runs"])
    assert "no worker took them over" in text
    assert "due, and" not in text


def test_effects_in_doubt(store: perdure.Store) -> None:
    store.run(in_doubt, id="d")
    found = said(store)["runs"]
    assert (worst(found), "in doubt" in text_of(found)) == ("warning", True)


def test_encryption_and_the_keys_that_do_not_fit(url: str) -> None:
    assert importlib.util.find_spec("cryptography") is not None
    with perdure.open(url, keys=bytes(range(32))) as store:
        store.thread("t").save({"n": 1})
        assert worst(said(store)["encryption"]) == "ok"
    with perdure.open(url) as store:
        found = said(store)["encryption"]
        assert (worst(found), "without keys" in text_of(found)) == ("problem", True)
    with perdure.open(url, keys=bytes(32)) as store:
        found = said(store)["encryption"]
        assert (worst(found), key_id(bytes(range(32))).hex() in text_of(found)) == ("problem", True)
    with perdure.open(url, keys={"acme": bytes(32)}) as store:
        found = said(store)["encryption"]
        assert (worst(found), "this process has no key for: default" in text_of(found)) == ("problem", True)


def test_what_the_store_keeps_about_a_key_is_damaged(url: str) -> None:
    with perdure.open(url, keys=bytes(range(32))) as store:
        store.thread("t").save({"n": 1})
        raw(store, "UPDATE tenant_key SET wrapped = :wrapped", wrapped=bytes(60))
        found = said(store)["encryption"]
        assert (worst(found), "does not open" in text_of(found)) == ("problem", True)


def test_a_key_service_that_does_not_answer_is_asked_once(url: str) -> None:
    class Down:
        asked = 0

        def keys_for(self, tenant: str) -> perdure.encryption.Keys:
            self.asked += 1
            raise ConnectionError

    for tenant in ("default", "acme", "globex"):
        with perdure.open(url, keys=bytes(range(32)), tenant=tenant) as store:
            store.thread("t").save({"n": 1})
    keys = Down()
    with perdure.open(url, keys=keys) as store:
        found = said(store)["encryption"]
        assert (worst(found), "could not be asked" in text_of(found), keys.asked) == ("problem", True, 1)


def test_the_key_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = perdure.encryption.KeyFile(tmp_path / "keys.json")
    for tenant in ("default", "acme"):
        file.new(tenant)
        with perdure.open(url, keys=file, tenant=tenant) as store:
            store.thread("t").save({"n": 1})
    file.forget("acme")
    with perdure.open(url, keys=file) as store:
        found = said(store)["encryption"]
        assert (worst(found), "this process has no key for: acme" in text_of(found)) == ("note", True)
        assert "perdure keys" not in text_of(found)
        file.path.chmod(0o640)
        found = said(store)["encryption"]
        assert (worst(found), f"chmod 600 {file.path}" in text_of(found)) == ("warning", True)
        file.path.chmod(0o600)
    for keys, level in ((str(file.path), "ok"), (str(tmp_path / "no.json"), "problem"), ("", "problem")):
        monkeypatch.setenv("PERDURE_KEYS", keys)
        main(["doctor", "--store", url, "--json"])
        lines = json.loads(capsys.readouterr().out)["findings"]
        levels = {line["level"] for line in lines if line["check"] == "encryption"} - {"note"}
        assert max(levels) == level, lines


def test_a_check_that_fails_takes_no_other_with_it(store: perdure.Store) -> None:
    raw(store, "DROP TABLE copy")
    found = said(store)
    assert "could not be checked" in text_of(found["backups"])
    assert found["clock"][0].level == "ok"
