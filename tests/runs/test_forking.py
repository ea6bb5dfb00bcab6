"""Forks: another run that shares history up to a step, copies nothing, and says whose keys its effects bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forking_kit import Agents
from lab import Lab

import perdure
from perdure.runs.journal.blobs import BLOB_MIN_BYTES
from perdure.storage.program import Batch, Program, Sql, drive, read


def count_rows(lab: Lab, run: perdure.Run) -> int:
    """How many journal rows a run has of its own."""

    def program() -> Program[int]:
        [[(count,)]] = yield Batch(
            Sql(
                """SELECT count(*) FROM journal j JOIN run r ON r.tenant = j.tenant AND r.run = j.run
                WHERE r.id = :id AND r.tenant = (SELECT tenant FROM tenant WHERE name = :name)"""
            )(id=run.id, name=lab.store._context.tenant_name)
        )
        return int(count)

    return int(drive(lab.store._context.driver, read(program)))


# --- what is shared


def test_a_fork_shares_history_up_to_its_step_and_goes_on_from_there(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0, id="source")
    assert run.result() == 4
    fork = lab.store.fork(run, at="2", id="fork")
    assert fork.refresh().status == "queued"
    assert fork.result() == 4
    assert lab.ran == [("add", n) for n in (0, 1, 2, 3, 2, 3)]
    assert [(step.path, step.shared) for step in fork.steps() if step.kind == "step"] == [
        ("1", True),
        ("2", True),
        ("3", False),
        ("4", False),
    ]
    assert fork.refresh().is_fork
    assert run.result() == 4


def test_a_step_is_named_by_path_number_or_step(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    for at in ("3", 3, run.steps()[2]):
        lab.ran.clear()
        assert lab.store.fork(run, at=at).result() == 4
        assert lab.ran == [("add", 3)]


def test_a_fork_of_everything_runs_nothing_again_and_one_of_nothing_all(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    lab.ran.clear()
    assert lab.store.fork(run).result() == 4
    assert lab.ran == []
    assert lab.store.fork(run, at=0).result() == 4
    assert len(lab.ran) == 4


def test_a_fork_copies_nothing(lab: Lab) -> None:
    agents = Agents(lab)

    @lab.durable(name=f"long-{id(lab)}")
    async def long(count: int) -> int:
        number = 0
        for _ in range(count):
            number = await lab(agents.add(number))
        return number

    run = lab.run(long, 60)
    fork = lab.store.fork(run, at=59)
    assert count_rows(lab, fork) == 1
    assert fork.result() == 60
    assert count_rows(lab, fork) == 2


def test_forks_of_forks_find_their_whole_history(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    first = lab.store.fork(run, at="2", changes={"2": 12})
    assert first.result() == 14
    second = lab.store.fork(first, at="3", changes={"3": 103})
    assert second.result() == 104
    lab.ran.clear()
    third = lab.store.fork(second)
    assert third.result() == 104
    assert lab.ran == []
    assert [step.result for step in third.steps() if step.kind == "step"] == [1, 12, 103, 104]


def test_a_fork_of_a_fork_that_was_archived_finds_its_whole_history(lab: Lab, tmp_path: Path) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    first = lab.store.fork(run, at="2", changes={"2": 12})
    assert first.result() == 14
    lab.store.ops.archive_run(first.id, tmp_path / "archive.db")
    lab.store.ops.unarchive_run(first.id)
    lab.ran.clear()
    assert lab.store.fork(first.id).result() == 14
    assert lab.store.fork(first.id, at="1").result() == 4
    assert lab.ran == [("add", 1), ("add", 2), ("add", 3)]


def test_a_fork_inside_what_a_fork_shares_keeps_the_changes_made_there(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    first = lab.store.fork(run, at="3", changes={"3": 50})
    assert first.result() == 51
    lab.ran.clear()
    second = lab.store.fork(first, at="3")
    assert second.result() == 51
    assert lab.ran == [("add", 50)]
    # The change was to a step behind this point: it is not part of what is shared.
    lab.ran.clear()
    assert lab.store.fork(first, at="2").result() == 4


def test_a_fork_of_a_fork_survives_that_its_origin_begins_anew(lab: Lab) -> None:
    agents = Agents(lab)

    @lab.durable(name=f"endless-{id(lab)}")
    async def endless(round: int) -> int:
        number = await lab(agents.add(round))
        number = await lab(agents.add(number))
        if round == 0 and "go" in lab.ran:
            perdure.continue_as_new(10)
        if "go" not in lab.ran:
            await lab(perdure.ask("Well?"))
        return int(number)

    run = lab.run(endless, 0)
    fork = lab.store.fork(run, at="1")
    assert lab.store.fork(fork, at="1").status == "queued"
    middle = lab.store.run(endless, 0, id="middle")
    below = lab.store.fork(middle, at="1", id="below")
    with pytest.raises(TimeoutError):
        below.result(timeout_s=0.05)
    last = lab.store.fork(below, at="2", id="last")
    lab.ran.append("go")
    lab.store.answer("below", 1)
    assert below.result() == 12  # it began anew, with other arguments
    assert [step.path for step in below.steps()] == ["1", "2"]
    assert not lab.store.get_run("below").steps()[0].shared
    assert [step.path for step in last.steps() if step.shared] == ["1", "2"]
    assert last.result() == 12


def test_a_large_result_is_shared_and_changed(lab: Lab) -> None:
    @lab.step(name="make")
    def make(size: int) -> str:
        import random

        return random.Random(size).randbytes(size).hex()

    @lab.durable(name=f"large-{id(lab)}")
    async def large() -> int:
        return len(await lab(make(BLOB_MIN_BYTES * 2)))

    run = lab.run(large)
    assert lab.store.fork(run).result() == BLOB_MIN_BYTES * 4
    import random

    other = random.Random(1).randbytes(BLOB_MIN_BYTES * 3).hex()
    fork = lab.store.fork(run, changes={"1": other})
    assert fork.result() == len(other)
    assert lab.store.fork(fork, at="1").result() == len(other)


# --- other results


def test_a_kept_step_may_have_another_result(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    fork = lab.store.fork(run, at="2", changes={"2": 40})
    assert fork.result() == 42
    assert run.result() == 4
    assert lab.step_at(fork, "2").result == 40


def test_a_changed_result_does_not_hide_that_the_code_goes_another_way(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    fork = lab.store.fork(run, at="3", changes={"1": 7})  # step 2 was called with 1, and is now called with 7
    with pytest.raises(perdure.RunStuck, match="at step 2: recorded add"):
        fork.result()


def test_an_error_and_an_answer_may_be_changed_too(lab: Lab) -> None:
    @lab.step(name="fails")
    def fails() -> str:
        raise ValueError("no")

    @lab.durable(name=f"trying-{id(lab)}")
    async def trying() -> list[Any]:
        try:
            found = await lab(fails())
        except ValueError:
            found = "failed"
        return [found, await lab(perdure.ask("Which?", options=["a", "b"])), perdure.random()]

    run = lab.run(trying, id="trying")
    lab.store.answer("trying", "a")
    run = lab.run(trying, id="trying")
    found, answer, chance = run.result()
    assert (found, answer) == ("failed", "a")
    fork = lab.store.fork(run, changes={"1": "fine", "2": "b", "3": 0.5})
    assert fork.result() == ["fine", "b", 0.5]
    assert lab.step_at(fork, "1").error is None
    assert run.result() == ["failed", "a", chance]


def test_changes_that_cannot_be_are_refused(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    with pytest.raises(perdure.UsageError, match="does not keep this step"):
        lab.store.fork(run, at="2", changes={"3": 1})
    with pytest.raises(perdure.NotFound, match="no step '9'"):
        lab.store.fork(run, at="2", changes={"9": 1})
    with pytest.raises(perdure.Unstorable):
        lab.store.fork(run, at="2", changes={"2": object()})
    with pytest.raises(perdure.UsageError, match="mapping"):
        lab.store.fork(run, changes=[1])  # type: ignore[arg-type]
    assert len(lab.store.runs()) == 1
