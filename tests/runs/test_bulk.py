"""Many runs at once: each is changed as one alone would be, and one that cannot be changed stops no other."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from lab import Lab

import perdure
from perdure import UsageError


def test_failed_runs_are_retried_with_new_code_and_their_effects_stand(lab: Lab) -> None:
    booked: list[int] = []
    broken = True

    @lab.effect()
    def book(number: int) -> int:
        booked.append(number)
        return number

    @lab.step()
    def pay(number: int) -> int:
        if broken:
            raise ValueError("no bank")
        return number

    @lab.durable
    async def travel(number: int) -> int:
        await lab(book(number))
        return int(await lab(pay(number)))

    for number in range(4):
        lab.run(travel, number, id=f"t-{number}", tags={"customer": f"c-{number % 2}"})
    assert lab.store.count_runs() == {"failed": 4}
    broken = False
    result = lab.store.retry(tags={"customer": "c-1"})
    assert (result.statuses, result.refused) == ({"queued": 2}, {})
    assert lab.store.retry("t-0", "t-1", "nothing").refused.keys() == {"t-1", "nothing"}
    for number in (0, 1, 3):
        assert lab.run(travel, number, id=f"t-{number}").result() == number
    assert booked == [0, 1, 2, 3]
    assert lab.store.count_runs() == {"done": 3, "failed": 1}


def test_cancelling_many_ends_families_and_names_what_stays(lab: Lab) -> None:
    @lab.durable
    async def asks(number: int) -> str:
        return str(await lab(perdure.ask("go?")))

    @lab.durable
    async def parent() -> str:
        return str(await lab((await lab(perdure.spawn(asks, 1))).result()))

    for number in range(5):
        lab.run(asks, number, id=f"a-{number}")
    lab.run(parent, id="family")
    lab.store.answer("a-0", "yes")
    lab.run(asks, 0, id="a-0").result()
    seen: list[tuple[int, int]] = []
    result = lab.store.bulk("cancel", id_prefix="a-", progress=lambda done, total: seen.append((done, total)))
    assert (result.statuses, result.refused, seen) == ({"cancelled": 4}, {}, [(4, 4)])
    result = lab.store.bulk("cancel", "family", "a-0")
    assert result.statuses == {"cancelled": 1}
    assert result.refused == {"a-0": "it is done: there is nothing to cancel"}
    assert lab.store.count_runs() == {"cancelled": 6, "done": 1}
    assert lab.store.questions() == []


def test_pause_resume_and_undo_of_many(lab: Lab) -> None:
    undone: list[int] = []

    @lab.effect(undo=lambda number: undone.append(number))
    def book(number: int) -> int:
        return number

    @lab.durable
    async def travel(number: int) -> int:
        await lab(book(number))
        if number:
            await lab(perdure.ask("go?"))
        return number

    for number in range(3):
        lab.run(travel, number, id=f"t-{number}")
    assert lab.store.bulk("pause", id_prefix="t-").statuses == {"paused": 2}
    assert lab.store.bulk("resume", id_prefix="t-").statuses == {"queued": 2}
    assert lab.store.bulk("undo", "t-0", "t-1").statuses == {"queued": 2}
    for number in (0, 1):
        with pytest.raises(perdure.RunUndone):
            lab.run(travel, number, id=f"t-{number}").result()
    assert sorted(undone) == [0, 1]


def test_a_bulk_without_a_condition_is_refused(sync_lab: Lab) -> None:
    with pytest.raises(UsageError, match="name the runs"):
        sync_lab.store.bulk("cancel")
    with pytest.raises(UsageError, match="one of the two"):
        sync_lab.store.bulk("cancel", "x", function="f")
    with pytest.raises(UsageError, match="one of cancel"):
        sync_lab.store.bulk(["cancel"], "x")  # type: ignore[arg-type]


def test_a_condition_that_is_misspelt_or_missing_selects_nothing(sync_lab: Lab) -> None:
    """Or it would select every run: a typing mistake, or a variable that is None, would cancel them all."""

    @sync_lab.durable
    async def one() -> None:
        pass

    run = sync_lab.store.start(one, id="r")
    names = ("function", "tags", "id_prefix", "statuses", "since", "parent")
    for where in ({"functions": "one"}, {"tags": {}}, {"id_prefix": ""}, *({name: None} for name in names)):
        for change in (partial(sync_lab.store.bulk, "cancel"), sync_lab.store.retry):
            with pytest.raises(UsageError, match=r"is no condition|name the runs"):
                change(**where)  # type: ignore[arg-type]
    assert run.refresh().status == "queued"


def test_writers_go_between_the_chunks(sync_lab: Lab) -> None:
    lab = sync_lab

    @lab.durable
    async def one(number: int) -> int:
        return number

    for number in range(600):
        lab.store.start(one, number, id=f"q-{number}", delay_s=3600)
    waits: list[float] = []
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            lab.store.thread("beside").save({"at": began})
            waits.append(time.perf_counter() - began)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert lab.store.bulk("cancel", id_prefix="q-").statuses == {"cancelled": 600}
    finally:
        ended.set()
        writer.join()
    assert max(waits) < 1.0
