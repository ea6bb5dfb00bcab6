"""Forks: whose keys effects bear, what is open at the fork, and names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from forking_kit import Agents
from lab import Lab, hooked, unhashed

import perdure
from perdure.runs.execution.hooks import Point
from perdure.storage.program import Batch, Program, Sql, drive


def keys(lab: Lab) -> list[str]:
    return [one[2] for one in lab.ran if one[0] == "book"]


# --- keys


def test_whoever_forks_before_effects_must_say_whose_keys_they_bear(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.booking, "LH")
    with pytest.raises(perdure.UsageError, match=r'keys="new".*keys="same"'):
        lab.store.fork(run, at="1")
    assert len(lab.store.runs()) == 1
    before = keys(lab)
    assert lab.store.fork(run, at="1", keys="new").result() == "B-LH2 B-LH3"
    assert not set(keys(lab)[2:]) & set(before)
    assert lab.store.fork(run, at="1", keys="same").result() == "B-LH2 B-LH3"
    assert keys(lab)[4:] == before


def test_no_keys_are_asked_for_where_no_effect_follows(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.booking, "LH")
    assert lab.store.fork(run).result() == "B-LH2 B-LH3"
    assert len(keys(lab)) == 2


def test_an_effect_in_a_child_behind_the_point_counts(lab: Lab) -> None:
    agents = Agents(lab)

    @lab.durable(name=f"parent-{id(lab)}")
    async def parent() -> Any:
        await lab(agents.add(1))
        child = await lab(perdure.spawn(agents.booking, "UA"))
        return await lab(child.result())

    run = lab.run(parent)
    assert run.result() == "B-UA2 B-UA3"
    before = keys(lab)
    with pytest.raises(perdure.UsageError, match="keys="):
        lab.store.fork(run, at="1")
    assert lab.store.fork(run, at="1", keys="same").result() == "B-UA2 B-UA3"
    assert keys(lab)[2:] == before
    # Forked behind the spawn, it waits for the child that the origin has started.
    assert lab.store.fork(run, at="2").result() == "B-UA2 B-UA3"
    assert len(keys(lab)) == 4


def test_a_fork_undoes_only_its_own_effects(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.booking, "LH", id="source")
    assert run.result() == "B-LH2 B-LH3"
    fork = lab.store.fork(run, at="3", id="fork", keys="new")
    assert fork.result() == "B-LH2 B-LH3"
    fork.undo()
    with pytest.raises(perdure.RunUndone):
        fork.result()
    assert [one for one in lab.ran if one[0] == "cancel"] == [("cancel", "LH3")]
    assert run.refresh().status == "done"


def test_a_fork_of_what_was_undone_is_refused_and_one_before_it_is_not(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.booking, "LH", fail=True)
    with pytest.raises(perdure.RunFailed):
        run.result()
    with pytest.raises(perdure.UsageError, match="has undone step 2"):
        lab.store.fork(run, keys="new")
    with pytest.raises(perdure.UsageError, match="belongs to its undoing"):
        lab.store.fork(run, at="undo:2", keys="new")
    lab.ran.append("mended")
    assert lab.store.fork(run, at="1", keys="new").result() == "B-LH2 B-LH3"


class Stop(BaseException):
    """Ends the process's part where a test wants it."""


def test_an_effect_in_doubt_is_not_shared_unless_the_keys_are(lab: Lab) -> None:
    agents = Agents(lab)

    def stop(point: Point) -> None:
        if (point.kind, point.path, point.when) == ("body", "2", "after"):
            raise Stop

    with hooked(stop), pytest.raises(Stop):
        lab.run(agents.booking, "LH", id="doubtful")
    assert lab.step_at(lab.store.get_run("doubtful"), "2").status == "in doubt"
    with pytest.raises(perdure.UsageError, match="keys="):
        lab.store.fork("doubtful")
    [key] = keys(lab)
    new = lab.store.fork("doubtful", keys="new")
    assert [step.path for step in new.steps()] == ["1"]
    assert new.result() == "B-LH2 B-LH3"
    assert key not in keys(lab)[1:]
    same = lab.store.fork("doubtful", keys="same", id="same")
    assert lab.step_at(same, "2").status == "in doubt"
    with pytest.raises(TimeoutError):
        same.result(timeout_s=0.05)
    [doubt] = lab.store.questions("same")
    assert (doubt.kind, doubt.key) == ("doubt", key)
    same.resolve("2", done="B-found")
    assert same.result() == "B-found B-LH3"


# --- what is open


def test_an_open_question_is_asked_again_by_the_fork(lab: Lab) -> None:
    @lab.durable(name=f"asking-{id(lab)}")
    async def asking() -> Any:
        return await lab(perdure.ask("Which?", options=["a", "b"]))

    run = lab.run(asking, id="asking")
    assert run.refresh().status == "waiting"
    fork = lab.store.fork(run, id="asked-again")
    while fork.id not in [
        question.run for question in lab.store.questions()
    ]:  # the call runs the fork, however long that takes
        with pytest.raises(TimeoutError):
            fork.result(timeout_s=0.05)
    assert [ask.run for ask in lab.store.questions()] == ["asking", "asked-again"]
    lab.store.answer("asked-again", "b")
    assert fork.result() == "b"
    assert run.refresh().status == "waiting"
    assert lab.store.fork(run, changes={"1": "a"}).result() == "a"


def test_an_approval_is_for_one_request(lab: Lab) -> None:
    ran: list[str] = []

    @lab.effect(name="pay", approve=True, on_doubt="fail")
    def pay(amount: int, key: perdure.IdempotencyKey) -> int:
        ran.append(str(key))
        return amount

    @lab.durable(name=f"paying-{id(lab)}")
    async def paying() -> int:
        return int(await lab(pay(5)))

    run = lab.run(paying, id="paying")
    lab.store.answer("paying", True)
    assert lab.run(paying, id="paying").result() == 5
    approval = next(step for step in run.steps() if step.path == "1~approve")
    fork = lab.store.fork(run, at=approval, keys="new", id="pays-again")
    while fork.id not in [
        question.run for question in lab.store.questions()
    ]:  # the call runs the fork, however long that takes
        with pytest.raises(TimeoutError):
            fork.result(timeout_s=0.05)
    assert [ask.run for ask in lab.store.questions()] == ["pays-again"]
    assert len(ran) == 1


def test_a_run_that_lives_is_forked_while_it_goes_on(lab: Lab) -> None:
    """Also in the middle of a commit: an entry that comes late, with a lower number, belongs to the run alone."""
    reached, go_on = threading.Event(), threading.Event()

    @lab.step(name="slow")
    def slow(number: int) -> int:
        if number == 2 and not reached.is_set():
            reached.set()
            assert go_on.wait(30)
        return number * 10

    @lab.durable(name=f"living-{id(lab)}")
    async def living() -> list[int]:
        return [await lab(slow(1)), await lab(slow(2)), await lab(slow(3))]

    thread = threading.Thread(target=lambda: lab.run(living, id="living"))
    thread.start()
    assert reached.wait(30)
    fork = lab.store.fork("living", id="fork")
    assert fork.result() == [10, 20, 30]
    assert lab.step_at(fork, "1").shared
    assert not lab.step_at(fork, "2").shared
    go_on.set()
    thread.join()
    assert lab.store.get_run("living").result() == [10, 20, 30]
    assert [step.path for step in fork.steps()] == ["1", "2", "3"]


def test_a_number_that_is_written_later_is_no_part_of_the_fork(store: perdure.Store) -> None:
    """Two branches commit in another order than they took their numbers in."""
    import asyncio

    lab = Lab(store, "async")
    held, release = asyncio.Event(), asyncio.Event()

    @perdure.step(name="parallel")
    async def parallel(number: int) -> int:
        return number

    @perdure.durable(name=f"branches-{id(lab)}")
    async def branches() -> list[int]:
        return list(await asyncio.gather(parallel(1), parallel(2)))

    async def main() -> None:
        driver = lab.store._context.driver
        before = type(driver).arun

        async def arun(self: Any, transaction: Any) -> Any:
            drafted = getattr(transaction.op, "keywords", {}).get("drafted")
            if drafted and drafted.lines[0].seq == 1 and self is driver and not held.is_set():
                held.set()
                await release.wait()
            return await before(self, transaction)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(driver), "arun", arun)
            running = asyncio.create_task(lab.store.arun(branches, id="branches"))
            await held.wait()
            while len(await (await lab.store.aget_run("branches")).asteps()) < 1:
                await asyncio.sleep(0.001)
            fork = await lab.store.afork("branches", id="fork")
            release.set()
            await running
        assert [unhashed(step.path) for step in await fork.asteps()] == ["1@parallel.1"]
        assert await fork.aresult() == [1, 2]
        assert {step.result: step.shared for step in await fork.asteps() if step.kind == "step"} == {2: True, 1: False}

    asyncio.run(main())


# --- names


def test_the_same_fork_under_the_same_id_is_one_and_another_is_refused(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0, id="source")
    fork = lab.store.fork(run, at="2", id="fork", changes={"2": 5})
    assert lab.store.fork(run, at="2", id="fork", changes={"2": 5}).id == fork.id
    assert fork.result() == 7
    assert lab.store.fork(run, at="2", id="fork", changes={"2": 5}).result() == 7
    with pytest.raises(perdure.errors.RunMismatch, match="not this fork"):
        lab.store.fork(run, at="3", id="fork")
    with pytest.raises(perdure.errors.RunMismatch, match="not this fork"):
        lab.store.fork(run, at="3", id="source")


def test_bad_use_is_named(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0)
    with pytest.raises(perdure.NotFound, match="no run 'nobody'"):
        lab.store.fork("nobody")
    with pytest.raises(perdure.NotFound, match="no step '17'"):
        lab.store.fork(run, at="17")
    with pytest.raises(perdure.NotFound, match="no step number 17"):
        lab.store.fork(run, at=17)
    with pytest.raises(perdure.UsageError, match="a step is its path"):
        lab.store.fork(run, at=1.5)  # type: ignore[arg-type]
    with pytest.raises(perdure.UsageError, match="new"):
        lab.store.fork(run, keys="old")  # type: ignore[arg-type]


def test_a_tampered_origin_is_noticed(lab: Lab) -> None:
    agents = Agents(lab)
    run = lab.run(agents.counting, 0, id="source")
    fork = lab.store.fork(run, at="3")

    def program() -> Program[None]:
        yield Batch(
            Sql(
                """DELETE FROM journal WHERE seq = 2 AND tenant = (SELECT tenant FROM tenant WHERE name = :name)
                AND run = (SELECT min(run) FROM run WHERE id = 'source' AND tenant = journal.tenant)"""
            )(name=lab.store._context.tenant_name)
        )

    from perdure.storage.program import write

    drive(lab.store._context.driver, write(program))
    with pytest.raises(perdure.RunStuck, match="does not add up"):
        fork.result()


def test_a_run_that_began_anew_starts_children_of_its_own(lab: Lab) -> None:
    @lab.durable(name=f"kid-{id(lab)}")
    async def kid() -> int:
        lab.ran.append("kid")
        return len(lab.ran)

    @lab.durable(name=f"rounds-{id(lab)}")
    async def rounds(left: int, before: list[int]) -> list[int]:
        child = await lab(perdure.spawn(kid))
        found = [*before, await lab(child.result())]
        if left:
            perdure.continue_as_new(left - 1, found)
        return found

    assert lab.run(rounds, 2, []).result() == [1, 2, 3]
