"""`thread.save()` in a durable function: the checkpoint and the journal entry are one commit, so it is saved once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, hooked

import perdure
from perdure.runs.execution.hooks import Point


class Stop(BaseException):
    """Ends the process's part where a test wants it."""


def save(lab: Lab, thread: perdure.Thread, state: Any, **options: Any) -> Any:
    return thread.asave(state, **options) if lab.is_async else thread.save(state, **options)


def update(lab: Lab, thread: perdure.Thread, patch: Any, **options: Any) -> Any:
    return thread.aupdate(patch, **options) if lab.is_async else thread.update(patch, **options)


def states(lab: Lab, name: str = "notes") -> list[Any]:
    return [checkpoint.state for checkpoint in lab.store.thread(name).history()]


def agent_of(lab: Lab, once: Once | None = None) -> Any:
    @lab.durable(name=f"saving-{id(lab)}")
    async def agent() -> list[Any]:
        thread = lab.store.thread("notes", metadata={"of": "agent"})
        found = []
        for number in range(3):
            checkpoint = await lab(save(lab, thread, {"number": number}, note=f"note {number}"))
            found.append((checkpoint.id, checkpoint.step, checkpoint.parent, checkpoint.is_head, checkpoint.note))
        if once is not None:
            once.interrupt()
        last = await lab(save(lab, thread, {"number": "last"}, metadata={"a": 1}))
        return [*found, (last.id, last.step, last.parent, last.metadata, last.kind, last.at)]

    return agent


def test_a_save_in_the_function_is_a_step_and_is_made_once(lab: Lab) -> None:
    once = Once()
    agent = agent_of(lab, once)
    with pytest.raises(Interrupt):
        lab.run(agent, id="saves")
    before = list(lab.store.thread("notes").history())
    run = lab.run(agent, id="saves")
    result = run.result()
    history = list(lab.store.thread("notes").history())
    assert states(lab) == [{"number": "last"}, {"number": 2}, {"number": 1}, {"number": 0}]
    assert history[1:] == before
    assert [one[0] for one in result] == [checkpoint.id for checkpoint in reversed(history)]
    assert [one[1] for one in result] == [0, 1, 2, 3]
    assert [one[2] for one in result[1:]] == [one[0] for one in result[:-1]]
    assert all(one[3] for one in result[:3])
    assert result[3][3:] == ({"a": 1}, "state", history[0].at)
    assert [(step.path, step.kind, step.result) for step in run.steps()] == [
        (str(number), "save", one[0]) for number, one in enumerate(result, 1)
    ]
    assert lab.store.thread("notes").info().metadata == {"of": "agent"}
    replayed = lab.store.replay(run)
    assert replayed.result == result
    assert len(states(lab)) == 4
    assert lab.store.ops.verify().ok


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_the_commit_loses_neither_or_both(lab: Lab, when: str) -> None:
    def stop(point: Point) -> None:
        if (point.kind, point.path, point.when) == ("done", "2", when):
            raise Stop

    agent = agent_of(lab)
    with hooked(stop), pytest.raises(Stop):
        lab.run(agent, id="saves")
    assert len(states(lab)) == (1 if when == "before" else 2)
    lab.run(agent, id="saves").result()
    assert states(lab) == [{"number": "last"}, {"number": 2}, {"number": 1}, {"number": 0}]
    assert len(lab.store.thread("notes").branches()) == 1


def test_a_save_is_one_commit(lab: Lab) -> None:
    commits: list[str] = []

    def note(point: Point) -> None:
        if point.when == "after":
            commits.append(f"{point.kind} {point.path}".strip())

    with hooked(note):
        lab.run(agent_of(lab))
    assert commits == ["claim", "done 1", "done 2", "done 3", "done 4", "finish"]


def test_whether_it_became_a_branch_is_the_same_on_replay(lab: Lab) -> None:
    once = Once()

    @lab.durable(name=f"branching-{id(lab)}")
    async def agent() -> list[bool]:
        thread = lab.store.thread("shared")
        first = await lab(save(lab, thread, 1))
        if once.reached == 0:
            somebody = threading.Thread(target=lambda: lab.store.thread("shared").save("somebody else"))
            somebody.start()
            somebody.join()
        second = await lab(save(lab, thread, 2))
        once.interrupt()
        third = await lab(save(lab, thread, 3))
        return [first.is_head, second.is_head, third.is_head, third.parent == second.id]

    with pytest.raises(Interrupt):
        lab.run(agent, id="branching")
    run = lab.run(agent, id="branching")
    assert run.result() == [True, False, False, True]
    assert lab.store.replay(run).result == run.result()
    assert len(lab.store.thread("shared").branches()) == 2


def test_a_conflict_is_raised_and_nothing_is_written(lab: Lab) -> None:
    @lab.durable(name=f"expecting-{id(lab)}")
    async def agent() -> Any:
        thread = lab.store.thread("expected")
        first = await lab(save(lab, thread, 1))
        await lab(save(lab, thread, 2))
        try:
            await lab(save(lab, thread, 3, expect=first))
        except perdure.Conflict:
            return "conflict"

    run = lab.run(agent)
    assert run.result() == "conflict"
    assert states(lab, "expected") == [2, 1]


def test_an_update_merges_into_what_is_there_once(lab: Lab) -> None:
    once = Once()
    lab.store.thread("merged").save({"count": 0, "by": {}, "old": 1})

    @lab.durable(name=f"updating-{id(lab)}")
    async def agent() -> str:
        thread = lab.store.thread("merged")
        await lab(update(lab, thread, {"by": {"agent": 1}}, remove=["old"]))
        once.interrupt()
        return (await lab(update(lab, thread, {"count": 2}))).kind  # type: ignore[no-any-return]

    with pytest.raises(Interrupt):
        lab.run(agent, id="updating")
    assert lab.run(agent, id="updating").result() == "update"
    assert states(lab, "merged")[0] == {"count": 2, "by": {"agent": 1}}
    assert len(states(lab, "merged")) == 3


def test_another_state_on_replay_is_an_error(lab: Lab) -> None:
    once = Once()

    @lab.durable(name=f"impure-{id(lab)}")
    async def agent() -> None:
        await lab(save(lab, lab.store.thread("impure"), {"reached": once.reached}))
        once.interrupt()

    with pytest.raises(Interrupt):
        lab.run(agent, id="impure")
    with pytest.raises(perdure.RunStuck, match=r"thread\.save"):
        lab.run(agent, id="impure").result()
    assert len(states(lab, "impure")) == 1


def test_a_save_inside_a_body_is_a_plain_one(lab: Lab) -> None:
    @lab.step(name="notes")
    def notes() -> str:
        return lab.store.thread("plain").save("from a body").id

    @lab.durable(name=f"plain-{id(lab)}")
    async def agent() -> Any:
        return await lab(notes())

    run = lab.run(agent)
    assert [checkpoint.id for checkpoint in lab.store.thread("plain").history()] == [run.result()]
    assert [step.kind for step in run.steps()] == ["step"]


def test_a_thread_of_another_tenant_is_saved_once_and_one_of_another_database_is_refused(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = lab.store.tenant(f"other-{id(lab)}")

    @lab.durable(name=f"tenants-{id(lab)}")
    async def agent() -> None:
        await lab(save(lab, other.thread("t"), 1))
        await lab(save(lab, elsewhere.thread("t"), 1))

    with perdure.open(str(tmp_path_factory.mktemp("elsewhere") / "e.db")) as elsewhere:
        run = lab.run(agent)
        assert run.refresh().status == "stuck"
        assert "another database" in str(run.refresh().waiting_for)
        assert [step.kind for step in run.steps()] == ["save"]
        assert [one.state for one in other.thread("t").history()] == [1]
        assert elsewhere.threads() == []


def test_with_state_both_go_in_one_commit(lab: Lab) -> None:
    once = Once()

    @lab.durable(name=f"both-{id(lab)}")
    async def agent() -> Any:
        state = perdure.state({"saved": 0})
        thread = lab.store.thread("both")
        for _ in range(2):
            state["saved"] += 1
            await lab(save(lab, thread, dict(state)))
        once.interrupt()
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(agent, id="both")
    run = lab.run(agent, id="both")
    assert run.result() == {"saved": 2}
    assert states(lab, "both") == [{"saved": 2}, {"saved": 1}]
    assert run.state_at("1") == {"saved": 1}


def test_a_moved_run_begins_a_thread_that_is_not_there(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    @lab.durable(name=f"moved-{id(lab)}")
    async def agent() -> Any:
        thread = lab.store.thread("left") if not moved else target.thread("left")
        await lab(save(lab, thread, 1))
        answer = await lab(perdure.receive())
        await lab(save(lab, thread, answer))

    folder = tmp_path_factory.mktemp("moved")
    moved: list[bool] = []
    with perdure.open(str(folder / "target.db")) as other:
        target = other.tenant(lab.store._context.tenant_name)
        lab.run(agent, id="moved")
        lab.store.ops.transfer(folder / "target.db", runs=["moved"], move=True)
        moved.append(True)
        target.send("moved", 2)
        assert target.run(agent, id="moved").result() is None
        assert [one.state for one in target.thread("left").history()] == [2]
