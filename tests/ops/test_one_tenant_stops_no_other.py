"""What is wrong with one run or one tenant is recorded there and told by the doctor; all others are served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sealed_kit import Raw

import perdure

FENCE_MAX = 2**63 - 1


@perdure.durable(name="isolated.add")
def add(a: int, b: int) -> int:
    return a + b


def work(store: perdure.Store) -> None:
    perdure.Worker(store, [add], all_tenants=True).run(until_idle=True)


@pytest.mark.parametrize("fence", [FENCE_MAX, -1])
def test_a_run_whose_row_makes_no_sense_is_left_alone_and_the_others_run(url: str, fence: int) -> None:
    with perdure.open(url, tenant="bad") as store:
        for name in ("first", "second"):
            store.start(add, 1, 2, id=name)
            store.tenant("good").start(add, 1, 2, id=name)
        Raw(url)("UPDATE run SET fence = ? WHERE run = (SELECT min(run) FROM run)", (fence,))
        work(store)
        assert [store.tenant("good").get_run(name).result() for name in ("first", "second")] == [3, 3]
        assert store.get_run("second").result() == 3
        assert store.get_run("first").refresh().status == "queued"
        assert "its fence" in store.ops.verify().problems[0].what


def test_the_daily_maintenance_of_one_tenant_fails_and_the_others_have_theirs(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = Raw(url)
    with perdure.open(url, tenant="bad") as store:
        for one in (store, store.tenant("good")):
            one.ops.retention(checkpoints=2, runs="0s")
            one.run(add, 1, 2, id="a").result()
        [(key,)] = raw("SELECT key FROM meta WHERE substr(key, 1, 10) = 'retention ' ORDER BY key LIMIT 1")
        raw("UPDATE meta SET value = '{' WHERE key = ?", (key,))
        worker = perdure.Worker(store, [add], all_tenants=True)
        worker._maintain()
        assert "maintenance of tenant 'bad' failed: " in caplog.text
        assert [one.message for one in store.ops.doctor() if one.check == "maintenance" and "'bad'" in one.message]
        assert raw("SELECT count(*) FROM meta WHERE substr(key, 1, 12) = 'maintenance '") == [(2,)]


def test_a_forgotten_key_of_one_tenant_ends_no_other_tenants_maintenance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path, tenant="bad", keys=os.urandom(32)) as store:
        store.ops.retention(checkpoints=1)
        for number in range(3):  # what stays is encoded anew, with the key
            store.thread("a").save({"n": number})
    with perdure.open(path, tenant="good", keys=os.urandom(32)) as store:
        store.thread("a").save({})
        perdure.Worker(store, [add], all_tenants=True)._maintain()
        assert "KeyMissing" in caplog.text
        maintained = Raw(path)("SELECT count(*) FROM meta WHERE substr(key, 1, 12) = 'maintenance '")
        assert maintained == [(2,)]


def test_garbage_in_one_tenants_rows_ends_no_check_of_the_doctor(tmp_path: Path) -> None:
    """SQLite keeps values of any type in any column."""
    url = str(tmp_path / "a.db")
    with perdure.open(url) as store:
        store.thread("a").save({"n": 1})
        checks = {finding.check for finding in store.ops.doctor()}
        Raw(url)("UPDATE thread SET active = x'fffe'")
        findings = store.ops.doctor()
    assert any("damaged" in finding.message for finding in findings)
    assert {finding.check for finding in findings} == checks
