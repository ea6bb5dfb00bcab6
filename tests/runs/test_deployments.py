"""A deployment decides which version new runs get; a canary that fails significantly more is taken back by itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copy_kit import query

import perdure
from perdure.runs.maintenance.deployments import Outcomes, fisher
from perdure.runs.workers import worker as worker_module


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
    assert [store.get_run(name).info().version for name in ("before", "after")] == ["v1", "v2"]
    assert work(store, old) == {"done": 1}
    assert work(store, code("v2")) == {"done": 1}
    assert [store.get_run(name).result() for name in ("before", "after")] == ["v1", "v2"]


def test_a_share_of_the_ids_goes_to_the_canary_the_same_ones_each_time(store: perdure.Store) -> None:
    old = code("v1")
    store.ops.deploy(old, "v1")
    store.ops.deploy(old, "v2", canary=0.2)
    for number in range(500):
        store.start(old, number, id=f"run-{number}")
    chosen = {info.id for info in store.runs(limit=None) if info.version == "v2"}
    assert 60 <= len(chosen) <= 140  # 100; the ids are fixed, so this is no chance
    other = store.tenant("other")  # its deployments are its own
    other.start(old, 0, id=min(chosen))
    assert other.get_run(min(chosen)).info().version == "v1"
    other.ops.deploy(old, "v1")
    other.ops.deploy(old, "v2", canary=0.2)
    again = sorted(chosen)[1]
    assert other.start(old, 0, id=again).info().version == "v2"
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
    assert store.fork("here", at=0, id="fork", keys="new").info().version == "v1"


def test_wrong_deployments_are_refused(store: perdure.Store) -> None:
    with pytest.raises(perdure.UsageError, match="deploy the one in use first"):
        store.ops.deploy("deployed", "v2", canary=0.1)
    store.ops.deploy("deployed", "v1")
    with pytest.raises(perdure.UsageError, match="version v1 of deployed is deployed already"):
        store.ops.deploy("deployed", "v1", canary=0.1)
    for share in (0, 1, -0.1, 5, 0.00001, float("nan"), "5%"):
        with pytest.raises(perdure.UsageError, match="a share between 0 and 1"):
            store.ops.deploy("deployed", "v2", canary=share)  # type: ignore[arg-type]
    [found] = store.ops.deployments()
    assert (found.version, found.canary, found.share) == ("v1", None, 0.0)


# --- taking a canary back


def test_fishers_exact_test() -> None:
    """The tea of the lady, and counts for which it was computed with exact integers."""
    assert math.isclose(fisher(Outcomes(4, 3), Outcomes(4, 1)), 17 / 70)
    for tried, runs in [((40, 7), (760, 3)), ((100, 5), (1900, 95)), ((5, 5), (0, 0)), ((5000, 300), (95000, 5000))]:
        total, failed = tried[0] + runs[0], tried[1] + runs[1]
        exact = sum(
            math.comb(failed, n) * math.comb(total - failed, tried[0] - n)
            for n in range(tried[1], min(tried[0], failed) + 1)
        )
        expected = exact * 10**30 // math.comb(total, tried[0]) / 10**30
        assert math.isclose(fisher(Outcomes(*tried), Outcomes(*runs)), expected, rel_tol=1e-6)


def run_canary(store: perdure.Store, failing: int) -> tuple[int, int]:
    """40 runs, of which some go to a canary that fails for its first ones. How many it had, and how many failed."""
    old = code("v1")
    store.ops.deploy(old, "v1")
    store.ops.deploy(old, "v2", canary=0.3)
    for number in range(40):
        store.start(old, number, id=f"run-{number}")
    tried = [int(info.id.removeprefix("run-")) for info in store.runs(limit=None) if info.version == "v2"]
    assert len(tried) >= 6
    work(store, old)
    work(store, code("v2", lambda number: number in tried[:failing]))
    return len(tried), failing


def test_a_canary_that_fails_significantly_more_is_reverted(store: perdure.Store) -> None:
    count, _ = run_canary(store, failing=5)
    then = store.snapshot("then").store
    assert isinstance(then, perdure.Store)
    assert [found.canary for found in then.ops.deployments()] == ["v2"]  # a look at a snapshot changes nothing
    [found] = store.ops.deployments()
    assert (found.version, found.canary, found.share) == ("v1", None, 0.0)
    assert str(found.reverted).startswith(
        f"version v2 was reverted: 5 of {count} runs failed, and 0 of {40 - count} of version v1 (p = 0.00"
    )
    before = versions(store)["v2"]
    for number in range(100):
        store.start(code("v1"), number, id=f"later-{number}")
    assert versions(store)["v2"] == before
    store.ops.deploy("deployed", "v3", canary=0.5)  # counted from here on
    [found] = store.ops.deployments()
    assert (found.canary, found.reverted, found.canary_runs, found.runs) == ("v3", None, Outcomes(0, 0), Outcomes(0, 0))


def test_four_failures_are_too_few(store: perdure.Store) -> None:
    count, _ = run_canary(store, failing=4)
    [found] = store.ops.deployments()
    assert (found.canary, found.reverted) == ("v2", None)
    assert (found.canary_runs, found.runs) == (Outcomes(count, 4), Outcomes(40 - count, 0))


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
    assert [store.get_run(kind).info().version for kind in ("same", "other")] == ["v2", "v1"]
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
    assert run.info().version == "v1"


def test_a_tenant_takes_its_deployments_along(store: perdure.Store, tmp_path: Path) -> None:
    count, failed = run_canary(store, failing=4)
    store.ops.transfer(tmp_path / "other.db", tenant="default", move=True)
    with perdure.open(tmp_path / "other.db") as other:
        [found] = other.ops.deployments()
    assert (found.canary, found.share, found.canary_runs) == ("v2", 0.3, Outcomes(count, failed))
