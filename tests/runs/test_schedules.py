"""Schedules: each instant starts one run, whatever happens to workers and clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from copy_kit import query
from schedule_kit import fire, job, let_pass, runs_of, work
from workshop import until

import perdure
from perdure.runs.schedules.timetable import Timetable, due
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.testing import Clock
from perdure.testing.processes import ForkServer

HOUR = 3600


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def us(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[misc, arg-type]


def said(instants: list[int]) -> list[str]:
    return [f"{datetime.fromtimestamp(at / 1e6, UTC):%m-%dT%H:%M}" for at in instants]


# --- instants


@pytest.mark.parametrize(
    ("cron", "zone", "first", "expected"),
    [
        # The missing hour: right after it. The doubled hour: once.
        ("30 1 * * *", "Europe/Lisbon", (2027, 3, 27), ["03-27T01:30", "03-28T01:00", "03-29T00:30"]),
        ("30 1 * * *", "Europe/Lisbon", (2026, 10, 24), ["10-24T00:30", "10-25T00:30", "10-26T01:30"]),
        ("30 2 * * *", "America/New_York", (2027, 3, 13), ["03-13T07:30", "03-14T07:00", "03-15T06:30"]),
        ("0 * * * *", "Europe/Lisbon", (2026, 10, 24, 23), ["10-24T23:00", "10-25T00:00", "10-25T01:00"]),
        ("0 7 * * MON-FRI", "UTC", (2026, 11, 20), ["11-20T07:00", "11-23T07:00", "11-24T07:00"]),
    ],
)
def test_local_times_and_daylight_saving(cron: str, zone: str, first: tuple[int, ...], expected: list[str]) -> None:
    table = Timetable(cron, None, zone)
    assert said(table.between(us(*first), us(2028, 1, 1), 3)) == expected
    walked = [us(*first) - 1]
    for _ in expected:
        walked.append(table.after(walked[-1]))
    assert said(walked[1:]) == expected


@pytest.mark.parametrize("table", [Timetable("*/5 * * * *", None), Timetable(None, 300_000_000)])
def test_what_is_caught_up(table: Timetable) -> None:
    first, now = us(2026, 1, 1), us(2026, 1, 1, 1, 2)  # 13 instants, the newest two minutes ago
    assert due(table, first, now, "none") == ([], 13, us(2026, 1, 1, 1), us(2026, 1, 1, 1, 5))
    assert due(table, first, now - 61_000_000, "none").instants == [us(2026, 1, 1, 1)]
    assert due(table, first, now, "last").instants == [us(2026, 1, 1, 1)]
    assert len(due(table, first, now, "all").instants) == 13
    years = due(table, us(2020, 1, 1), now, "all")
    assert (len(years.instants), years.instants[-1], years.next_at) == (100, us(2026, 1, 1, 1), us(2026, 1, 1, 1, 5))


# --- starting


def test_a_worker_starts_what_is_due_with_its_arguments(store: perdure.Store) -> None:
    made = store.schedule("tick", job, every="1s", args=("hello",))
    assert made == store.schedule("tick", job, every="1s", args=("hello",)) == store.get_schedule("tick")
    assert len(made.upcoming) == 5
    assert made.upcoming[1] - made.upcoming[0] == timedelta(seconds=1)
    let_pass(store, 2)
    work(store)
    [run] = store.runs()
    assert (run.status, store.get_run(run.id).result()) == ("done", "hello")
    after = store.get_schedule("tick")
    assert after.last_run == run.id
    assert run.id.startswith("tick@20")
    assert after.upcoming[0] > made.upcoming[0] - timedelta(seconds=2)


def test_a_busy_worker_still_starts_runs(store: perdure.Store) -> None:
    """A schedule is not missed because every place of the worker is taken."""

    @perdure.durable
    def long() -> str:
        let_pass(store, 1)
        until(lambda: len(store.runs()) == 2)
        return "done"

    store.schedule("tick", job, every="1s")
    store.start(long, id="long")
    perdure.Worker(store, [long, job], concurrency=1, poll_s=0.01).run(until_idle=True)
    assert store.get_run("long").result() == "done"


def test_each_instant_once_with_two_workers_that_are_killed(url: str, store: perdure.Store) -> None:
    for number in range(30):
        store.schedule(f"s{number}", job, every="1h", overlap="queue", catch_up="all")
    let_pass(store, 20 * HOUR)
    with ForkServer("schedule_kit:fire_forever") as one, ForkServer("schedule_kit:fire_forever") as other:
        for wanted in (50, 150, 300):
            children = [server.start(url) for server in (one, other)]
            until(lambda wanted=wanted: query(store, "SELECT count(*) FROM run")[0][0] >= wanted)  # type: ignore[misc]
            for child in children:
                child.kill()
    fire(store)
    found = Counter(info.id.partition("@")[0] for info in store.runs(limit=None))
    assert found == {f"s{number}": 20 for number in range(30)}
    work(store)
    assert Counter(info.status for info in store.runs(limit=None)) == {"done": 600}


def test_a_clock_that_is_set_back_repeats_nothing_and_loses_nothing(store: perdure.Store) -> None:
    store.schedule("hourly", job, every="1h", catch_up="all", overlap="queue")
    let_pass(store, 3 * HOUR)
    fire(store)
    before = runs_of(store, "hourly")
    let_pass(store, -30 * HOUR)  # the clock was wrong by more than a day
    assert store.get_schedule("hourly").upcoming[0] > datetime.now(UTC) + timedelta(hours=29)
    work(store)
    assert store.get_schedule("hourly").upcoming[0] <= datetime.now(UTC) + timedelta(hours=1)
    assert runs_of(store, "hourly") == before
    let_pass(store, HOUR)
    fire(store)
    assert len(runs_of(store, "hourly")) == len(before)  # that instant had its run: the id is taken


# --- overlap


def open_schedule(store: perdure.Store, overlap: Any) -> Any:
    @perdure.durable
    def waits() -> Any:
        return perdure.ask("?")

    store.schedule("tick", waits, every="1h", overlap=overlap, catch_up="last").trigger()
    work(store, waits)
    return waits


def statuses(store: perdure.Store) -> list[str]:
    return [info.status for info in reversed(store.runs(limit=None))]


def test_skip(store: perdure.Store) -> None:
    waits = open_schedule(store, "skip")
    let_pass(store, HOUR)
    work(store, waits)
    assert (statuses(store), store.get_schedule("tick").skipped) == (["waiting"], 1)
    with pytest.raises(perdure.Conflict, match="starts no run while 'tick@"):
        store.get_schedule("tick").trigger()
    store.answer(store.runs()[0].id, 1)
    work(store, waits)
    let_pass(store, HOUR)
    work(store, waits)
    assert statuses(store) == ["done", "waiting"]


def test_queue_runs_one_after_another(store: perdure.Store) -> None:
    waits = open_schedule(store, "queue")
    for _ in range(2):
        store.get_schedule("tick").trigger()
    work(store, waits)
    assert statuses(store) == ["waiting", "queued", "queued"]
    first, second, third = (info.id for info in reversed(store.runs()))
    store.answer(first, 1)
    work(store, waits)
    assert statuses(store) == ["done", "waiting", "queued"]
    store.get_run(second).cancel()
    work(store, waits)
    assert statuses(store) == ["done", "cancelled", "waiting"]
    store.answer(third, 1)
    work(store, waits)
    store.get_schedule("tick").trigger()
    work(store, waits)
    assert statuses(store) == ["done", "cancelled", "done", "waiting"]


def test_queued_runs_still_take_turns_after_a_pause_and_a_retry(store: perdure.Store) -> None:
    @perdure.step
    def check(answer: int) -> None:
        if answer == 0:
            raise ValueError(answer)

    @perdure.durable
    def asks() -> None:
        check(perdure.ask("?"))

    schedule = store.schedule("tick", asks, every="1h", overlap="queue")
    first, second, third = (schedule.trigger().id for _ in range(3))
    work(store, asks)
    held = store.get_run(second).refresh()
    assert (statuses(store), held.waiting_for and held.waiting_for.shown) == (
        ["waiting", "queued", "queued"],
        "the earlier runs of its schedule",
    )
    for action in ("pause", "resume"):
        assert store.bulk(action, function=held.function).changed == 3
    work(store, asks)
    assert statuses(store) == ["waiting", "queued", "queued"]
    store.answer(first, 0)
    work(store, asks)
    assert statuses(store) == ["failed", "waiting", "queued"]
    store.retry(first)
    store.get_run(third).pause()
    store.get_run(third).resume()
    work(store, asks)
    assert statuses(store) == ["queued", "waiting", "queued"]
    store.answer(second, 1)
    work(store, asks)
    assert statuses(store) == ["failed", "done", "waiting"]  # the first ran again, and failed again


def test_each_trigger_starts_a_run_even_if_no_time_passes(store: perdure.Store) -> None:
    schedule = store.schedule("tick", job, every="1h", overlap="queue")
    Clock(store)
    assert len({schedule.trigger().id for _ in range(3)}) == 3


def test_cancel(store: perdure.Store) -> None:
    waits = open_schedule(store, "cancel")
    let_pass(store, HOUR)
    work(store, waits)
    assert statuses(store) == ["cancelled", "waiting"]
    let_pass(store, HOUR)  # the clock was set back: the same instant again
    work(store, waits)
    assert statuses(store) == ["cancelled", "waiting"]
    store.get_schedule("tick").trigger()
    work(store, waits)
    assert statuses(store) == ["cancelled", "cancelled", "waiting"]


# --- control


def test_pause_resume_backfill_and_delete(store: perdure.Store) -> None:
    schedule = store.schedule("hourly", job, every="1h", catch_up="last")
    assert schedule.pause().upcoming == ()
    let_pass(store, 5 * HOUR)
    fire(store)
    assert store.runs() == []
    assert len(schedule.resume().upcoming) == 5
    fire(store)
    assert store.runs() == [], "what passed meanwhile is not caught up"
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    started = schedule.backfill(now - timedelta(hours=3), now)
    assert started == [f"hourly@{now - timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}" for hours in (3, 2, 1)]
    assert schedule.backfill(now - timedelta(hours=4), now) == [f"hourly@{now - timedelta(hours=4):%Y-%m-%dT%H:%M:%SZ}"]
    with pytest.raises(perdure.UsageError, match="have not come yet"):
        schedule.backfill(now, now + timedelta(days=1))
    with pytest.raises(perdure.UsageError, match="with a time zone"):
        schedule.backfill(datetime(2026, 1, 1), now)
    with pytest.raises(perdure.UsageError, match="is not before"):
        schedule.backfill(now, now - timedelta(days=1))
    schedule.delete()
    assert (store.schedules(), len(store.runs())) == ([], 4)
    with pytest.raises(perdure.NotFound, match="no schedule 'hourly'"):
        schedule.refresh()


def test_a_run_gets_the_deployed_version(store: perdure.Store) -> None:
    def version(name: str) -> Any:
        return perdure.durable(name="versioned", version=name)(lambda: name)

    store.schedule("v", version("1"), every="1h", catch_up="last")
    store.schedule("v", version("2"), every="1h", catch_up="last")  # as a new release does when it starts
    let_pass(store, HOUR)
    fire(store)
    store.ops.deploy("versioned", "3")
    store.get_run(store.runs()[0].id).cancel()
    store.get_schedule("v").trigger()
    assert [info.version for info in reversed(store.runs())] == ["2", "3"]


def test_tenants_have_their_own_schedules(store: perdure.Store) -> None:
    names = ("a", "b")
    for name in names:
        store.tenant(name).schedule("tick", job, every="1h", args=(name,), catch_up="last")
    let_pass(store, HOUR)
    fire(store.tenant("a"))
    assert [len(store.tenant(name).runs()) for name in names] == [1, 0]
    perdure.Worker(store, [job], all_tenants=True).run(until_idle=True)
    assert [store.tenant(name).get_run(store.tenant(name).runs()[0].id).result() for name in names] == ["a", "b"]


@pytest.mark.parametrize("damage", ["cron = 'nonsense'", "timezone = 'Mars/Base'"])
def test_a_damaged_schedule_is_paused_and_holds_up_no_other(
    store: perdure.Store, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store.schedule("bad", job, "0 * * * *", catch_up="last")
    store.schedule("good", job, every="1h", catch_up="last")
    spoil(store, damage)
    let_pass(store, HOUR)
    fire(store)
    assert [len(runs_of(store, name)) for name in ("bad", "good")] == [0, 1]
    assert "schedule bad cannot be read and is paused" in caplog.text


def test_a_damaged_schedule_can_be_listed_and_deleted_and_the_clock_may_be_set_back(
    store: perdure.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.schedule("bad", job, "0 * * * *")
    store.schedule("good", job, every="1h")
    spoil(store, "timezone = 'Mars/Base'")
    let_pass(store, -30 * HOUR)  # the clock was wrong by more than a day
    work(store)
    assert "schedule bad cannot be read and is paused" in caplog.text
    bad, good = store.schedules()
    assert (bad.paused, bad.upcoming) == (True, ())
    assert good.upcoming[0] <= datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(perdure.UsageError, match="Mars/Base"):
        bad.resume()
    bad.delete()


def spoil(store: perdure.Store, damage: str) -> None:
    def program() -> Program[None]:
        yield Batch(Sql(f"UPDATE schedule SET {damage} WHERE name = 'bad'")(), last=True)

    drive(store._context.driver, write(program))


async def test_async_twins(store: perdure.Store) -> None:
    made = await store.aschedule("tick", job, "0 7 * * *", timezone="Europe/Lisbon", jitter_s=30)
    assert made == await store.aget_schedule("tick") == await made.arefresh()
    assert await store.aschedules() == [made]
    assert (await (await made.apause()).aresume()).upcoming == made.upcoming
    run = await made.atrigger()
    work(store)
    assert await run.aresult(5) == "x"
    assert await made.abackfill(datetime.now(UTC) - timedelta(seconds=1), datetime.now(UTC)) == []
    await made.adelete()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cron": "0 0 7 * * *"}, "five fields"),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 7 * * *", "timezone": "Lisbon/Europe"}, "not a time zone"),
        ({"every": "0.5s"}, "at least"),
        ({"every": "15m", "cron": "0 7 * * *"}, "either"),
        ({"every": "15m", "timezone": "Europe/Lisbon"}, "no timezone"),
        ({"every": "15m", "overlap": "no"}, "one of skip, queue, cancel"),
        ({"every": "15m", "catch_up": "all"}, "overlap"),
        ({"every": "15m", "args": "known"}, "a list or tuple"),
        ({"every": "15m", "kwargs": ["known"]}, "a mapping"),
        ({"every": "15m", "kwargs": {"teem": "sales"}}, "could not call .*unexpected keyword argument 'teem'"),
        ({"every": "15m", "priority": 2**70}, "priority"),
        ({"every": "16m"}, "its every differ"),
        ({"every": "15m", "args": ("other",)}, "its args differ"),
    ],
)
def test_what_is_refused(store: perdure.Store, wrong: dict[str, Any], message: str) -> None:
    store.schedule("known", job, every="15m")
    with pytest.raises(perdure.UsageError, match=message):
        store.schedule("known", job, **wrong)
    assert store.schedule("known", job, every="20m", replace=True).every == timedelta(minutes=20)
