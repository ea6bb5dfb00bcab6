"""Tags, lists and counts of runs: what is found is what a search through all runs would find."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any

import pytest
from lab import Lab

import perdure
from perdure import RunInfo, UsageError

STATUSES = ("done", "failed", "queued", "waiting")


def fill(lab: Lab, count: int = 40) -> list[RunInfo]:
    """Make runs of several functions, queues, statuses and tags."""

    @lab.durable(version="2")
    async def travel(number: int) -> int:
        await lab(perdure.tag(parity="even" if number % 2 == 0 else "odd"))
        if number % 5 == 0:
            raise ValueError("no seats")
        if number % 7 == 0:
            await lab(perdure.ask("which?"))
        return number

    @lab.durable
    async def report(number: int) -> int:
        return number

    for number in range(count):
        tags: dict[str, str | int] = {"customer": f"c-{number % 6}", "number": number}
        function = travel if number % 3 else report
        queue = "slow" if number % 4 == 0 else "default"
        if number % 11 == 0:
            lab.store.start(function, number, id=f"{'a' if number % 2 else 'b'}-{number}", queue=queue, tags=tags)
        else:
            lab.run(function, number, id=f"{'a' if number % 2 else 'b'}-{number}", queue=queue, tags=tags)
    return lab.store.runs(limit=None)


def selected(info: RunInfo, where: dict[str, Any]) -> bool:
    tests: dict[str, Any] = {
        "statuses": lambda value: info.status in value,
        "tags": lambda value: all(info.tags.get(key) == str(each) for key, each in value.items()),
        "since": lambda value: info.created_at >= value,
        "until": lambda value: info.created_at < value,
        "id_prefix": info.id.startswith,
    }
    return all(tests[name](value) if name in tests else getattr(info, name) == value for name, value in where.items())


def test_any_combination_of_conditions_finds_what_a_search_through_all_finds(lab: Lab) -> None:
    known = fill(lab)
    assert len(known) == 40
    assert [info.created_at for info in known] == sorted((info.created_at for info in known), reverse=True)
    middle = known[20].created_at
    choices: dict[str, list[Any]] = {
        "statuses": [("failed",), ("done", "waiting"), ("stuck",)],
        "function": [known[0].function, known[1].function],
        "version": ["2", ""],
        "queue": ["slow", "default"],
        "tags": [{"customer": "c-3"}, {"customer": "c-1", "parity": "odd"}, {"number": 7}, {"customer": "nobody"}],
        "since": [middle],
        "until": [middle],
        "id_prefix": ["a-", "b-1", "%"],
    }
    chance = random.Random(7)
    for _ in range(40):
        names = chance.sample(sorted(choices), chance.randint(1, 4))
        where = {name: chance.choice(choices[name]) for name in names}
        expected = [info for info in known if selected(info, where)]
        assert lab.store.runs(**where, limit=None) == expected, where
        assert lab.store.count_runs(**where) == Counter(info.status for info in expected), where
        assert lab.store.count_runs("queue", **where) == Counter(info.queue for info in expected), where
        pages: list[RunInfo] = []
        while page := lab.store.runs(**where, limit=3, before=pages[-1].cursor if pages else None):
            pages += page
        assert pages == expected, where


def test_pages_do_not_shift_while_runs_are_made_and_deleted(lab: Lab) -> None:
    @lab.durable
    async def one(number: int) -> int:
        return number

    for number in range(6):
        lab.run(one, number, id=f"old-{number}", tags={"kind": "old"})
    first = lab.store.runs(tags={"kind": "old"}, limit=2)
    lab.run(one, 7, id="new", tags={"kind": "old"})
    lab.store.delete_run(first[-1].id)
    second = lab.store.runs(tags={"kind": "old"}, limit=9, before=first[-1].cursor)
    assert [info.id for info in (*first, *second)] == [f"old-{number}" for number in reversed(range(6))]


def test_counts_follow_every_change_of_runs(lab: Lab) -> None:
    @lab.durable
    async def asks() -> str:
        return str(await lab(perdure.ask("go?")))

    def counted() -> dict[str, int]:
        return dict(lab.store.count_runs())

    run = lab.run(asks, id="one")
    lab.store.start(asks, id="two", delay_s=3600)
    assert counted() == {"waiting": 1, "queued": 1}
    run.pause()
    lab.store.get_run("two").cancel()
    assert counted() == {"paused": 1, "cancelled": 1}
    run.resume()
    lab.store.answer("one", "yes")
    assert run.result() == "yes"
    lab.store.delete_run("two")
    assert counted() == {"done": 1}
    assert dict(lab.store.count_runs("function")) == {lab.store.runs()[0].function: 1}


def test_tags_set_in_a_run_are_there_once_whatever_is_replayed(lab: Lab) -> None:
    @lab.durable
    async def tagging() -> str:
        await lab(perdure.tag(stage="asked", gone="soon"))
        answer = await lab(perdure.ask("go?"))
        await lab(perdure.tag(stage=answer, gone=None))
        return str(answer)

    run = lab.run(tagging, id="t", tags={"customer": "c-1"})
    assert run.refresh().tags == {"customer": "c-1", "stage": "asked", "gone": "soon"}
    fork = lab.store.fork("t", id="f")
    lab.store.answer("t", "booked")
    run.result()
    assert run.refresh().tags == {"customer": "c-1", "stage": "booked"}
    assert [info.id for info in lab.store.runs(tags={"stage": "asked"})] == ["f"]  # a fork begins with the tags
    assert lab.store.runs(tags={"gone": "soon", "stage": "booked"}) == []
    assert fork.refresh().tags["customer"] == "c-1"
    assert [step.kind for step in run.steps()] == ["tag", "ask", "tag"]


def test_children_get_their_options_and_are_found_by_their_parent(lab: Lab) -> None:
    @lab.durable
    async def child(number: int) -> int:
        return number

    @lab.durable
    async def parent() -> int:
        made = await lab(perdure.spawn(child, 1, tags={"of": "parent"}, priority=7, queue="slow", delay_s=0.01))
        return int(await lab(made.result()))

    assert lab.run(parent, id="p").result() == 1
    [info] = lab.store.runs(parent="p")
    assert (info.tags, info.priority, info.queue) == ({"of": "parent"}, 7, "slow")
    assert lab.store.runs(parent=info.id) == []


def test_a_snapshot_finds_the_tags_of_then(sync_lab: Lab) -> None:
    lab = sync_lab

    @lab.durable
    async def one() -> None:
        return None

    lab.run(one, id="then", tags={"kind": "x"})
    snapshot = lab.store.snapshot("tags")
    lab.run(one, id="later", tags={"kind": "x"})
    assert [info.id for info in snapshot.runs(tags={"kind": "x"})] == ["then"]
    assert [info.id for info in snapshot.runs(statuses="done")] == ["then"]


def test_wrong_conditions_are_refused(sync_lab: Lab) -> None:
    for where in (
        {"statuses": "asleep"},
        {"tags": {"a": 1.5}},
        {"tags": {"a=b": "c"}},
        {"tags": {"a": ""}},
        {"tags": {str(n): "x" for n in range(21)}},
        {"since": "yesterday"},
        {"before": "yesterday"},
        {"function": ""},
        {"statuses": 5},
        {"tags": {"a": 10**200}},
        {"tags": {"a": 10**5000}},
        {"tags": {"a": "\ud800"}},
        {"since": datetime.min},
        {"before": "0.-99999999999999999999"},
        {"before": "9" * 30 + ".5"},
        {"before": 1.5},
    ):
        with pytest.raises(UsageError):
            sync_lab.store.runs(**where)
    with pytest.raises(UsageError, match="functions= is no condition"):
        sync_lab.store.count_runs(functions="agent")  # type: ignore[call-arg]


def test_a_text_of_a_class_is_stored_by_its_characters(sync_lab: Lab) -> None:
    """`str()` of it calls a method of the class, which may return anything: for an Enum, the name of the member."""

    class Mood(str, Enum):  # noqa: UP042 - StrEnum returns the value
        GOOD = "good"

    class Hostile(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "\0" * 10_000

    @sync_lab.durable
    async def agent() -> None:
        pass

    for text in (Mood.GOOD, Hostile("good")):
        run = sync_lab.store.start(agent, id=text, tags={text: text})
        assert (run.id, run.refresh().tags) == ("good", {"good": "good"})
        assert [info.id for info in sync_lab.store.runs(tags={"good": "good"})] == ["good"]


@pytest.mark.parametrize("priority", [2**63, -(2**63), 1.5, "1"])
def test_a_priority_that_no_database_can_hold_is_refused(sync_lab: Lab, priority: Any) -> None:
    @sync_lab.durable
    async def agent() -> None:
        pass

    store: Any = sync_lab.store
    for call in (store.run, store.start, partial(store.schedule, "s", every="1h")):
        with pytest.raises(UsageError, match="priority="):
            call(agent, priority=priority)
    assert sync_lab.store.runs() == []


def test_times_are_those_of_creation(sync_lab: Lab) -> None:
    lab = sync_lab

    @lab.durable
    async def one() -> None:
        return None

    lab.run(one, id="now")
    now = datetime.now(UTC)
    assert lab.store.runs(since=now + timedelta(hours=1)) == lab.store.runs(until=now - timedelta(hours=1)) == []
    assert [info.id for info in lab.store.runs(since=now - timedelta(hours=1), until=now + timedelta(hours=1))] == [
        "now"
    ]
