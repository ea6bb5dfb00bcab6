"""A deployment decides which version new runs get; a canary that fails more often is reverted."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copy_kit import query

import perdure
from perdure.runs.maintenance.deployments import evidence, revert_failing
from perdure.runs.workers import worker as worker_module
from perdure.storage.program import drive


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def code(version: str | None, fails: Callable[[int], bool] = lambda number: False) -> Any:
    """The function as a process with that version has it; each definition replaces the one before."""

    @perdure.durable(name="deployed", version=version)
    def deployed(number: int) -> str:
        if fails(number):
            raise ValueError("broken")
        return version or ""

    return deployed


def work(store: perdure.Store, fn: Any) -> Counter[str]:
    worker = perdure.Worker(store, [fn])
    worker.run(until_idle=True)
    return worker.counts


def column(store: perdure.Store, name: str) -> Any:
    """Of the only deployment, as it is in the table: to list deployments would look at canaries too."""
    [[value]] = query(store, f"SELECT {name} FROM deployment")
    return value


def versions(store: perdure.Store) -> Counter[str]:
    return Counter(info.version for info in store.runs(limit=None))


# --- which version a run gets


def test_new_runs_get_the_deployed_version_and_its_worker_takes_them(store: perdure.Store) -> None:
    old = code("v1")
    store.start(old, 0, id="before")
    store.ops.deploy("deployed", "v2")
    store.start(old, 1, id="after")
    assert [store.get_run(name).refresh().version for name in ("before", "after")] == ["v1", "v2"]
    assert work(store, old) == {"done": 1}
    assert work(store, code("v2")) == {"done": 1}
    assert [store.get_run(name).result() for name in ("before", "after")] == ["v1", "v2"]
    store.ops.deploy("deployed", None)
    assert store.start(old, 2).refresh().version == "v1"


def test_a_share_of_new_runs_gets_the_canary(store: perdure.Store) -> None:
    old = code("v1")
    store.ops.deploy(old, "v1")
    store.ops.deploy(old, "v2", canary=0.2)
    for number in range(500):
        store.start(old, number, id=f"run-{number}")
    assert 50 <= versions(store)["v2"] <= 150  # 100, with a standard deviation of 9
    before = [info.version for info in store.runs(limit=None)]
    for number in range(500):
        store.start(old, number, id=f"run-{number}")
    assert [info.version for info in store.runs(limit=None)] == before
    other = store.tenant("other")  # its deployments are its own
    other.start(old, 0)
    assert versions(other) == {"v1": 1}
    assert other.ops.deployments() == []
    [found] = store.ops.deployments()
    assert (found.version, found.canary, found.share, found.reverted) == ("v1", "v2", 0.2, None)


def test_what_a_process_runs_itself_has_its_own_version(store: perdure.Store) -> None:
    old = code("v1")
    store.ops.deploy(old, "v2")
    assert store.run(old, 1, id="here").result() == "v1"

    @perdure.durable(name="deployed parent")
    def parent() -> str:
        return str(perdure.spawn(old, 2, id="child").result())

    assert store.run(parent).result() == "v1"
    assert store.fork("here", at=0, id="fork", keys="new").refresh().version == "v1"


def test_wrong_deployments_are_refused(store: perdure.Store) -> None:
    with pytest.raises(perdure.UsageError, match="deploy the one in use first"):
        store.ops.deploy("deployed", "v2", canary=0.1)
    store.ops.deploy("deployed", "v1")
    with pytest.raises(perdure.UsageError, match="version v1 of deployed is deployed already"):
        store.ops.deploy("deployed", "v1", canary=0.1)
    for share in (0, 1, -0.1, 5, 0.00001, float("nan"), "5%"):
        with pytest.raises(perdure.UsageError, match="a share between 0 and 1"):
            store.ops.deploy("deployed", "v2", canary=share)  # type: ignore[arg-type]
    for version in (5, "a\0b", "v" * 1000):
        with pytest.raises(perdure.UsageError, match="version"):
            store.ops.deploy("deployed", version)  # type: ignore[arg-type]
    [found] = store.ops.deployments()
    assert (found.version, found.canary, found.share) == ("v1", None, 0.0)


# --- taking a canary back


def test_a_canary_as_good_is_reverted_in_one_of_a_hundred_cases_however_often_it_is_looked_at() -> None:
    chance, share = random.Random(20261117), 0.1
    reverted = 0
    for _ in range(2000):
        tried = 0
        for failed in range(1, 150):  # a failure of the other version only lowers the evidence: no look is needed
            if chance.random() < share:
                tried += 1
                if evidence(share, tried, failed - tried) >= 100:
                    reverted += 1
                    break
    assert 4 <= reverted <= 20


def test_a_bad_canary_is_reverted_after_few_failures() -> None:
    """5 % of the runs, of which half fail, beside 1 % of the others: 7 of 10 failures are the canary's."""
    chance = random.Random(20261117)
    needed = []
    for _ in range(200):
        counts = [0, 0]
        while evidence(0.05, *counts) < 100:
            counts[chance.random() >= 0.05 * 0.5 / (0.05 * 0.5 + 0.95 * 0.01)] += 1
        needed.append(sum(counts))
    assert sorted(needed)[100] <= 4
    assert sorted(needed)[190] <= 12
    assert evidence(0.5, 10**6, 10**6) < 1e-6 < 100 < evidence(0.5, 10**6, 10**5)


def run_canary(store: perdure.Store, failing: int) -> None:
    """Runs of two versions, of which the canary's first ones fail."""
    old = code("v1")
    store.ops.deploy(old, "v1")
    store.ops.deploy(old, "v2", canary=0.3)
    number = 0
    while versions(store)["v2"] < 6:
        store.start(old, number, id=f"run-{(number := number + 1)}")
    tried = [int(info.id.removeprefix("run-")) - 1 for info in store.runs(limit=None) if info.version == "v2"]
    work(store, old)
    work(store, code("v2", lambda number: number in tried[:failing]))


def test_a_canary_that_fails_more_often_is_reverted(store: perdure.Store) -> None:
    run_canary(store, failing=5)
    then = store.snapshot("then").store
    for looked_at in (then, store):  # a look changes nothing
        [found] = looked_at.ops.deployments()
        assert (found.canary, found.canary_failed, found.failed) == ("v2", 5, 0)
    drive(store._context.driver, revert_failing(None))  # as workers do
    [found] = store.ops.deployments()
    assert (found.version, found.canary, found.share) == ("v1", None, 0.0)
    assert found.reverted == "version v2 was reverted: 5 failed runs of it and 0 of version v1, with 30% of the runs"
    before = versions(store)["v2"]
    for number in range(100):
        store.start(code("v1"), number)
    assert versions(store)["v2"] == before
    store.ops.deploy("deployed", "v3", canary=0.5)  # counted from here on
    [found] = store.ops.deployments()
    assert (found.canary, found.reverted, found.canary_failed, found.failed) == ("v3", None, 0, 0)


def test_only_runs_count_whose_version_was_chosen(store: perdure.Store) -> None:
    run_canary(store, failing=2)
    new = code("v2", lambda number: True)

    @perdure.durable(name="deployed parent")
    def parent() -> None:
        with contextlib.suppress(perdure.RunFailed):
            perdure.spawn(new, 0).result()

    store.run(parent)
    for number in range(5):  # what a process runs itself, and forks
        store.run(new, number, id=f"here-{number}")
        store.fork(f"here-{number}", at=0, keys="new")
    for number in range(5):
        while (run := store.start(new, number)).refresh().version == "v2":
            run.cancel()
    assert [found.is_ok for found in store.ops.move_runs(code("v2"))] == [True] * 5
    assert work(store, code("v2", lambda number: True)) == {"failed": 10}
    [found] = store.ops.deployments()
    assert (found.canary, found.canary_failed, found.failed) == ("v2", 2, 0)


def test_a_worker_reverts_for_all_tenants(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_CANARIES_EVERY_S", 0.0)
    with perdure.open(url, tenant="alice", durability="normal") as store:
        old = code("v1")
        store.ops.deploy(old, "v1")
        store.ops.deploy(old, "v2", canary=0.5)
        for number in range(40):
            store.start(old, number)
        work(store, old)
        perdure.Worker(store.tenant("bob"), [code("v2", lambda number: True)], all_tenants=True).run(until_idle=True)
        assert "version v2 was reverted" in column(store, "reverted")


# --- open runs


def _asking(version: str, first: str) -> Any:
    @perdure.step
    def search() -> int:
        return 1

    @perdure.step
    def weather() -> int:
        return 2

    @perdure.durable(name="deployed.asking", version=version)
    def asking(kind: str) -> Any:
        (search if kind == "same" else {"search": search, "weather": weather}[first])()
        return [version, perdure.ask("Which?")]

    return asking


def test_open_runs_move_if_their_replay_passes(store: perdure.Store) -> None:
    old = _asking("v1", "search")
    for kind in ("same", "other"):
        store.run(old, kind, id=kind)
    new = _asking("v2", "weather")
    store.ops.deploy(new, "v2")
    moved, left = store.ops.move_runs(new)
    assert (moved.run, moved.is_ok) == ("same", True)
    assert (left.run, left.verdict) == ("other", "differs")
    assert "search() before, and now weather()" in str(left.problem)
    assert [store.get_run(kind).refresh().version for kind in ("same", "other")] == ["v2", "v1"]
    for kind in ("same", "other"):
        store.answer(kind, "yes")
    assert work(store, new) == {"done": 1}
    assert store.get_run("same").result() == ["v2", "yes"]
    assert work(store, _asking("v1", "search")) == {"done": 1}


def test_a_run_that_is_running_is_not_moved(store: perdure.Store) -> None:
    found: list[Any] = []

    @perdure.durable(name="deployed", version="v2")
    def new(number: int) -> None:
        pass

    @perdure.durable(name="deployed", version="v1")
    def old(number: int) -> None:
        found.extend(store.ops.move_runs(new))

    run = store.run(old, 1)
    assert run.result() is None
    assert [(finding.run, finding.verdict) for finding in found] == [(run.id, "running")]
    assert run.refresh().version == "v1"


def test_a_tenant_takes_its_deployments_along(store: perdure.Store, tmp_path: Path) -> None:
    run_canary(store, failing=2)
    store.ops.transfer(tmp_path / "other.db", tenant="default", move=True)
    with perdure.open(tmp_path / "other.db") as other:
        [found] = other.ops.deployments()
    assert (found.canary, found.share, found.canary_failed) == ("v2", 0.3, 2)
