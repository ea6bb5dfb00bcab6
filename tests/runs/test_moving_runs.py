"""Moving a run to another store: all of it in one file, fenced at the source, and never going on in two places."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mover  # noqa: F401 - for the children: it must be found
import pytest
from lab import Lab, hooked
from moving_kit import Stop, agent_of

import perdure
from perdure.runs.execution.hooks import Point
from perdure.runs.journal.blobs import BLOB_MIN_BYTES


def result_of(place: str, message: Any) -> list[Any]:
    state = {"plan": [place], "flights": [f"{place}1", f"{place}2"], "done": True}
    return [f"B-{place}1", f"B-{place}2", BLOB_MIN_BYTES * 4, message, state]


# --- the whole of it


def test_a_parked_run_goes_on_in_another_store(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    agent = agent_of(lab)
    run = lab.run(agent, "NYC", id="trip")
    lab.store.send("trip", "sunny", topic="news")
    before, steps = list(lab.ran), run.steps()
    state = run.state_at()
    path = lab.store.ops.export_run("trip", tmp_path / "trip.run")
    assert path == tmp_path / "trip.run"
    assert sorted(os.listdir(tmp_path)) == ["trip.run"]
    assert run.status == "exported"
    moved = target.ops.import_run(path)
    assert (moved.id, moved.status) == ("trip", "waiting")
    assert [(step.path, step.name, step.status, step.result) for step in moved.steps()] == [
        (step.path, step.name, step.status, step.result) for step in steps
    ]
    assert moved.state_at() == state
    assert [(ask.run, ask.question) for ask in target.asks()] == [("trip", "Which?")]
    target.answer("trip", "NYC2")
    assert moved.result() == result_of("NYC", "sunny")
    assert lab.ran[: len(before)] == before
    assert lab.ran[len(before) :] == [("book", "NYC2", lab.ran[-1][2])]
    assert moved.state_at("1") == {"plan": ["NYC"]}
    assert target.ops.verify().ok
    assert target.thread("run:trip").load().state == moved.state_at()


def test_the_source_is_fenced(lab: Lab, tmp_path: Path) -> None:
    agent = agent_of(lab)
    run = lab.run(agent, "NYC", id="trip")
    lab.store.ops.export_run(run, tmp_path / "trip.run")
    assert lab.store.asks() == []
    with pytest.raises(perdure.RunCancelled, match="exported"):
        lab.run(agent, "NYC", id="trip").result()
    with pytest.raises(perdure.errors.AnswerRefused):
        lab.store.answer("trip", "NYC2", step="5")
    with pytest.raises(perdure.NotFound, match="exported"):
        lab.store.send("trip", 1)
    assert (run.cancel(), run.pause(), run.resume()) == ("exported", "exported", "exported")
    assert len(lab.ran) == 3


def test_a_run_that_somebody_runs_is_not_exported(lab: Lab, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    lab.store._run(_claim(lab.store, "trip"))
    with pytest.raises(perdure.UsageError, match="is running"):
        lab.store.ops.export_run("trip", tmp_path / "trip.run")
    assert os.listdir(tmp_path) == []


def _claim(store: perdure.Store, run_id: str) -> Any:
    from perdure.runs.engine import flows
    from perdure.runs.journal import rows
    from perdure.storage.program import write

    def flow() -> Any:
        tenant, row = yield from flows.locate(store._context, run_id)
        yield from write(
            lambda: rows.claim(
                tenant, row.run, fence=row.fence, owner="me", lease=10**12, now=store._context.clock_us(), early=True
            )
        )

    return flow()


@pytest.mark.parametrize("status", ["queued", "paused", "stuck", "done", "failed", "waiting"])
def test_a_run_of_any_status_that_is_not_running_moves(
    lab: Lab, target: perdure.Store, tmp_path: Path, status: str
) -> None:
    mended: list[bool] = []

    @lab.step(name="plain")
    def plain() -> int:
        return 7

    @lab.durable(name=f"any-{id(lab)}-{status}")
    async def agent() -> Any:
        if status == "stuck" and not mended:
            return object()
        value = await lab(plain())
        if status == "failed":
            raise LookupError("no")
        if status == "waiting":
            value += await lab(perdure.receive())
        return value

    run = lab.store.start(agent, id="any") if status in ("queued", "paused") else lab.run(agent, id="any")
    if status == "paused":
        run.pause()
    assert run.status == status
    info = run.info()
    moved = target.ops.import_run(lab.store.ops.export_run(run, tmp_path / "any.run"))
    assert moved.status == status
    assert moved.info().waiting_for == info.waiting_for
    mended.append(True)
    if status == "paused":
        moved.resume()
    if status == "stuck":
        moved = target.run(agent, id="any")
    if status == "waiting":
        target.send("any", 3)
    if status == "failed":
        with pytest.raises(perdure.RunFailed, match="LookupError: no"):
            moved.result()
    else:
        assert moved.result() == (10 if status == "waiting" else 7)


def test_keys_stay_the_same_and_a_doubt_stays_a_doubt(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    agent = agent_of(lab)

    def stop(point: Point) -> None:
        if (point.kind, point.path, point.when) == ("body", "2", "after"):
            raise Stop

    with hooked(stop), pytest.raises(Stop):
        lab.run(agent, "NYC", id="trip")
    [key] = [one[2] for one in lab.ran if one[0] == "book"]
    moved = target.ops.import_run(lab.store.ops.export_run("trip", tmp_path / "trip.run"))
    with pytest.raises(TimeoutError):
        moved.result(timeout_s=0.05)
    [doubt] = target.asks()
    assert (doubt.kind, doubt.key) == ("doubt", key)


def test_a_child_goes_along_and_is_not_exported_alone(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    @lab.effect(name="reserve", undo=lambda name: lab.ran.append(f"undo {name}"))
    def reserve(name: str) -> str:
        lab.ran.append(name)
        return name

    @lab.durable(name=f"grandchild-{id(lab)}")
    async def grandchild() -> str:
        return str(await lab(perdure.receive()))

    @lab.durable(name=f"child-{id(lab)}")
    async def child(name: str) -> str:
        await lab(reserve(name))
        below = await lab(perdure.spawn(grandchild))
        return f"{name}{await lab(below.result())}"

    @lab.durable(name=f"parent-{id(lab)}")
    async def parent() -> str:
        first = await lab(perdure.spawn(child, "a"))
        return str(await lab(first.result()))

    run = lab.run(parent, id="family")
    assert run.status == "waiting"
    with pytest.raises(perdure.UsageError, match="started by another run"):
        lab.store.ops.export_run("family/1", tmp_path / "child.run")
    path = lab.store.ops.export_run(run, tmp_path / "family.run")
    assert {info.status for info in lab.store.runs()} == {"exported"}
    moved = target.ops.import_run(path)
    assert sorted(info.id for info in target.runs()) == ["family", "family/1", "family/1/2"]
    target.send("family/1/2", "!")
    assert moved.result() == "a!"
    moved.rollback()
    with pytest.raises(perdure.RolledBack):
        moved.result()
    assert lab.ran == ["a", "undo a"]


def test_a_fork_takes_what_it_shares_along_and_undoes_only_its_own(
    lab: Lab, target: perdure.Store, tmp_path: Path
) -> None:
    @lab.effect(name="reserve", undo=lambda name: lab.ran.append(f"undo {name}"))
    def reserve(name: str) -> str:
        lab.ran.append(name)
        return name

    @lab.durable(name=f"forked-{id(lab)}")
    async def forked() -> list[Any]:
        first = await lab(reserve("first"))
        chosen = await lab(perdure.ask("Which?"))
        second = await lab(reserve("second"))
        return [first, chosen, second, await lab(perdure.receive())]

    lab.run(forked, id="source")
    lab.store.answer("source", "a")
    lab.run(forked, id="source")
    fork = lab.store.fork("source", at="2", id="fork", changes={"2": "b"}, keys="new")
    with pytest.raises(TimeoutError):
        fork.result(timeout_s=0.05)
    moved = target.ops.import_run(lab.store.ops.export_run(fork, tmp_path / "fork.run"))
    assert {step.path: step.shared for step in moved.steps() if step.kind == "effect"} == {"1": True, "3": False}
    target.send("fork", "x")
    assert moved.result() == ["first", "b", "second", "x"]
    assert target.replay(moved).result == moved.result()
    moved.rollback()
    with pytest.raises(perdure.RolledBack):
        moved.result()
    assert [one for one in lab.ran if one.startswith("undo")] == ["undo second"]
    assert lab.store.get_run("source").status == "waiting"


def test_an_imported_fork_can_be_forked_and_moved_on(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    fork = lab.store.fork("trip", at="1", id="fork", changes={"1": ["X1", "X2"]}, keys="new")
    with pytest.raises(TimeoutError):
        fork.result(timeout_s=0.05)
    moved = target.ops.import_run(lab.store.ops.export_run(fork, tmp_path / "one.run"))
    again = target.fork(moved, at="1", id="again", keys="new")
    with pytest.raises(TimeoutError):
        again.result(timeout_s=0.05)
    assert lab.ran[-2][:2] == ("book", "X1")
    target.answer("again", "X2")
    target.send("again", 1, topic="news")
    assert again.result()[:2] == ["B-X1", "B-X2"]
    back = lab.store.ops.import_run(target.ops.export_run(again, tmp_path / "two.run"))
    assert back.result()[:2] == ["B-X1", "B-X2"]
    assert back.state_at("1") == {"plan": ["NYC"]}


def test_a_run_comes_back_to_the_store_that_it_left(lab: Lab, target: perdure.Store, tmp_path: Path) -> None:
    agent = agent_of(lab)
    lab.run(agent, "NYC", id="trip")
    lab.store.fork("trip", id="fork", keys="new")
    moved = target.ops.import_run(lab.store.ops.export_run("trip", tmp_path / "out.run"))
    target.answer("trip", "NYC2")
    with pytest.raises(TimeoutError):
        moved.result(timeout_s=0.05)
    back = lab.store.ops.import_run(target.ops.export_run("trip", tmp_path / "back.run"))
    assert moved.status == "exported"
    lab.store.send("trip", "late", topic="news")
    assert back.result() == result_of("NYC", "late")
    assert lab.ran.count("search") == 1
    assert back.state_at("1") == {"plan": ["NYC"]}
    # What a fork shares with what was left behind is still there.
    assert [step.path for step in lab.store.get_run("fork").steps()][:3] == ["1", "2", "3"]
    assert lab.store.ops.verify().ok
