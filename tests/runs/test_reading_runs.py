"""Reads of a run for people: pages of steps are slices of all steps, whatever the journal looks like."""

from __future__ import annotations

import pytest
from lab import Lab

import perdure
from perdure import NotFound, Step, UsageError
from perdure.runs.engine.reading import Outline


def pages(run: perdure.Run, size: int) -> list[Step]:
    found: list[Step] = []
    while page := run.steps(after=found[-1] if found else None, limit=size):
        assert run.steps(after=found[-1].cursor if found else None, limit=size) == page
        found += page
    return found


def plain(steps: list[Step]) -> list[tuple[object, ...]]:
    return [(s.number, s.path, s.kind, s.status, s.attempts, s.result, s.error, s.arguments, s.seq) for s in steps]


def check_outline(run: perdure.Run, before: Outline | None = None) -> Outline:
    """Every step is in the outline as it is in the list, and pages continue after its cursor."""
    outline, every = run.outline(before), run.steps()
    assert len(outline) == len(every)
    assert outline.kinds == [step.kind for step in every]
    assert outline.statuses == [step.status for step in every]
    assert outline.started_at == [step.started_at.timestamp() for step in every]
    assert outline.ended_at == [step.ended_at and step.ended_at.timestamp() for step in every]
    assert [outline.cursor(number) for number in range(len(every) + 1)] == [None, *(step.cursor for step in every)]
    for number in range(len(every)):
        assert plain(run.steps(after=outline.cursor(number), limit=2)) == plain(every[number : number + 2])
    with pytest.raises(NotFound):
        outline.cursor(len(every) + 1)
    return outline


def test_pages_are_slices_of_all_steps(lab: Lab) -> None:
    tried: list[int] = []

    @lab.step(retries=3, backoff_s=0)
    def flaky(number: int) -> int:
        tried.append(number)
        if len(tried) % 3 == 1:
            raise ValueError("again")
        return number

    @lab.effect()
    def book(number: int) -> int:
        perdure.emit(f"booking {number}")
        return number

    @lab.durable
    async def branch(number: int) -> int:
        await lab(book(number))
        return int(await lab(flaky(number)))

    @lab.durable
    async def agent() -> str:
        for number in range(4):
            await lab(flaky(number))
            await lab(book(number))
            perdure.now()
        await lab(perdure.map(book, [10, 11, 12]))
        await lab((await lab(perdure.spawn(branch, 5))).result())
        answer = await lab(perdure.ask("go?"))
        await lab(book(20))
        return str(answer)

    run = lab.run(agent, id="paged")
    assert run.status == "waiting"
    outline = None
    for _ in range(2):  # once while it waits, once when it is done
        every = run.steps()
        for size in (1, 2, 3, 7, 100):
            assert plain(pages(run, size)) == plain(every)
        outline = check_outline(run, outline)
        if run.status == "waiting":
            lab.store.answer(run, "yes")
            run.result()
    assert [step.result for step in run.steps(values=False)] == [None] * len(every)
    [first] = run.find_step("book")[:1]
    assert run.step(first).arguments == {"number": 0}
    assert run.step(first.path).result == run.step(first.number).result == 0
    assert [child.parent for child in run.children()] == ["paged"]
    fork = lab.store.fork(run, id="forked")
    assert plain(pages(fork, 3)) == plain(fork.steps())
    check_outline(fork, outline)
    assert fork.refresh().origin == "paged"
    assert [one.id for one in run.forks()] == ["forked"]
    assert fork.forks() == []
    with pytest.raises(NotFound):
        run.step("99")
    with pytest.raises(UsageError):
        run.steps(after="here")


def test_what_can_be_undone_is_known_without_running_code(lab: Lab) -> None:
    @lab.effect()
    def post() -> None:
        """Has no undo."""

    @lab.effect(undo=lambda result: None)
    def book() -> int:
        return 1

    @lab.durable
    async def agent(books: bool) -> None:
        await lab(book() if books else post())

    lasting, booked = lab.run(agent, False, id="lasting"), lab.run(agent, True, id="booked")
    assert (lasting.can_undo(), booked.can_undo()) == (False, True)
    booked.undo()
    with pytest.raises(perdure.RunUndone):
        booked.result()
    assert not booked.can_undo()


def test_arguments_outcome_and_messages_without_waiting_or_code(lab: Lab) -> None:
    @lab.durable
    async def agent(city: str, days: int = 3) -> str:
        await lab(perdure.receive("news"))
        raise ValueError(f"no flight to {city}")

    run = lab.run(agent, "Oslo", days=2, id="r")
    assert run.arguments() == run.arguments(raw=True) == {"city": "Oslo", "days": 2}
    assert run.outcome() is None
    lab.store.send(run, {"gate": 1}, topic="news")
    lab.store.send(run, "unread", topic="other", key="k")
    lab.run(agent, "Oslo", days=2, id="r")
    ended = run.outcome()
    assert ended is not None
    assert (ended.status, ended.error) == ("failed", "ValueError: no flight to Oslo")
    assert "raise ValueError" in str(ended.traceback)
    assert [(m.topic, m.value, m.is_received) for m in run.messages()] == [
        ("news", {"gate": 1}, True),
        ("other", "unread", False),
    ]
