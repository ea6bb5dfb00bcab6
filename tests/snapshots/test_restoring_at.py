"""`store.restore(at=…, runs="rewind")` does what the restore of a snapshot of that instant does, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count as numbers
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from snapshot_kit import moment_between
from soak import SOAK

import perdure
from perdure.errors import HistoryGone, UsageError
from perdure.snapshots import restore
from perdure.storage.program import Flow, aside
from perdure.testing import Clock
from perdure.testing.processes import ForkServer

STEP = timedelta(seconds=1)
NEXT = numbers()
LINE_IDS = [f"1f0{number:05}-0000-6000-8000-000000000000" for number in range(2)]  # as LangGraph makes them
paid: list[str] = []
fails: list[bool] = []


@perdure.step(name="at.note")
def note(text: str) -> str:
    state = perdure.state()
    state["notes"] = [*state.get("notes", []), text]
    return text


@perdure.effect(name="at.pay", undo=lambda what: None)
def pay(what: str, key: perdure.IdempotencyKey) -> str:
    paid.append(str(key))
    return what


@perdure.durable(name="at.child")
def child(pays: bool = False) -> Any:
    seat = perdure.ask("Which seat?")
    return pay(seat) if pays else seat


@perdure.durable(name="at.trip")
def trip(pays: bool = False) -> Any:
    perdure.state({"notes": []})
    for question in ("Where?", "When?"):
        note(perdure.ask(question))
        if pays:
            pay(question)
    word = perdure.receive("word")
    note(word)
    return perdure.spawn(child, pays).result()


@perdure.durable(name="at.two")
def two() -> Any:
    return perdure.map(child, [False, False])


@perdure.durable(name="at.parent")
def parent() -> Any:
    perdure.ask("Start?")
    return perdure.spawn(child, True, id="child").result()


@perdure.durable(name="at.later")
def later_payer() -> Any:
    perdure.ask("One?")
    perdure.ask("Two?")
    return pay("rent")


@perdure.durable(name="at.broken")
def broken() -> str:
    if fails:
        raise ValueError("not today")
    return "fine"


@perdure.durable(name="at.rounds")
def rounds(turn: int = 0) -> Any:
    perdure.ask("Go?")
    return "end" if turn else perdure.continue_as_new(1)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def store(place: str) -> Iterator[perdure.Store]:
    paid.clear()
    fails.clear()
    with perdure.open(place) as opened:
        yield opened


def clock_of(store: perdure.Store) -> Clock:
    """An hour ago: what is removed is removed after it."""
    return Clock(store, datetime.now(UTC) - timedelta(hours=1))


def act(store: perdure.Store, what: int) -> None:
    """Do one thing to a store. What it is follows from the number and from what is there."""
    asked = sorted(store.questions(), key=lambda one: (one.run, one.path))
    runs = sorted(info.id for info in store.runs() if not info.is_child)
    if what % 7 in (0, 6):
        store.run(trip, what % 7 == 6, id=f"trip-{len(runs)}") if what % 14 < 7 else store.run(
            two, id=f"two-{len(runs)}"
        )
    elif what % 7 in (1, 2, 3) and asked:
        one = asked[what % len(asked)]
        store.answer(one.run, f"seat {what}", step=one.path)
    elif what % 7 == 4 and runs:
        store.send(runs[what % len(runs)], f"w{what}", topic="word")
    elif what % 7 == 5 and runs:
        store.get_run(runs[what % len(runs)]).cancel()
    store.thread("t").save({"n": what})
    store.memory("m").put(f"k{what % 3}", {"n": what})


def seen(store: Any) -> dict[str, Any]:
    """What the reads of a store answer, without the ids that are random."""
    runs = {info.id: store.get_run(info.id) for info in store.runs(limit=None)}
    threads = sorted(info.name for info in store.threads(limit=None))
    return {
        "runs": {id: (run.refresh().status, run.refresh().request) for id, run in runs.items()},
        "steps": {id: [(one.name, one.status, one.result) for one in run.steps()] for id, run in runs.items()},
        "states": {id: run.state_at(None) for id, run in runs.items()},
        "asks": sorted((ask.run, ask.text) for ask in store.questions()),
        "threads": {name: store.thread(name).load().state for name in threads},
        "items": {item.key: item.value for item in store.memory("m").list()},
    }


def restored(store: perdure.Store, *args: Any, **options: Any) -> Any:
    """What a store holds after a restore, or that it was refused."""
    before = seen(store)
    try:
        store.restore(*args, runs="rewind", **options)
    except UsageError as error:
        assert seen(store) == before
        return "undone" if "were undone" in str(error) else "effects"
    return seen(store)


def test_it_is_the_restore_of_a_snapshot_of_that_instant(store: perdure.Store) -> None:
    """Two tenants have the same history. One goes back to the snapshot, the other one without it."""
    clock = clock_of(store)
    clock.advance(STEP)

    @settings(max_examples=60 if SOAK else 8, phases=(Phase.generate,), deadline=None)
    @given(
        st.lists(st.integers(0, 41), min_size=4, max_size=10),
        st.integers(0, 9),
        st.integers(1, 3),
        st.sampled_from([None, "same", "new"]),
    )
    def example(actions: list[int], cut: int, later: int, keys: Any) -> None:
        for snapshot in store.snapshots():
            snapshot.release()
        number = next(NEXT)
        both = [store.tenant(f"{name}-{number}") for name in "ab"]
        at, names = clock.now, {cut % len(actions): "then", (cut + later) % len(actions): "later"}
        for place, what in enumerate(actions):
            if place in names:
                store.snapshot(names[place])
                at = clock.now if names[place] == "then" else at
                clock.advance(STEP)
            for each in both:
                act(each, what)
            clock.advance(STEP)
        result = restored(both[0], "then", keys=keys)
        for snapshot in store.snapshots():
            if snapshot.name != "later" or (cut + later) % len(actions) < cut % len(actions):
                snapshot.release()
        assert restored(both[1], at=at, keys=keys) == result

    example()


def test_killed_anywhere_the_same_call_finishes_it(store: perdure.Store, place: str) -> None:
    for name in ("a", "b"):
        store.run(trip, True, id=name)
        store.thread(name).save({"n": 1})
    store.run(child, id="c")
    line = store.thread("line").line("")
    line.save({"n": 1}, id=LINE_IDS[0])
    store.memory("m").put("k", {"n": 1})
    then, at = told(store), moment_between(store)
    for question in ("Where?", "When?"):
        store.answer("a", question)
        store.run(trip, True, id="a")
    store.send("a", "go", topic="word")
    store.run(trip, True, id="a")  # it has a child now
    store.answer("b", "Rome")
    store.answer("c", "aisle")
    assert store.run(child, id="c").result() == "aisle"
    store.thread("a").save({"n": 2})
    store.thread("new").save({})
    line.save({"n": 2}, id=LINE_IDS[1], parent=LINE_IDS[0])
    store.memory("m").delete("k")
    now = told(store)
    killed, step = 0, 3
    with ForkServer("restore_kit:restore_and_die") as nursery:
        while list(nursery.start(place, step, at.isoformat()).lines()) != ["done"]:
            killed += 1
            step += 4 + step // 2
    assert killed > 4
    assert told(store) == then | {"runs": dict.fromkeys("abc", ("queued", None))}
    assert store.restore(at=at, runs="rewind", keys="same").changes == ()
    [undo] = store.snapshots()
    assert (undo.name, undo.note) == ("undo-1", f"before {at:%Y-%m-%d %H:%M:%S.%f%z} was restored")
    store.restore(undo, runs="rewind", keys="same")
    assert told(store) == now | {"runs": dict.fromkeys(now["runs"], ("queued", None)) | {"c": ("done", None)}}
    assert store.ops.verify().ok


def told(store: perdure.Store) -> dict[str, Any]:
    return seen(store) | {"line": [point.state for point in store.thread("line").line("").history()]}


def test_an_effect_since_is_refused_without_keys(store: perdure.Store) -> None:
    clock = clock_of(store)
    store.run(trip, True, id="r")
    clock.advance(STEP)
    at = clock.now
    clock.advance(STEP)
    store.answer("r", "Rome")
    clock.advance(STEP)
    assert len(paid) == 1
    before = seen(store)
    with pytest.raises(UsageError, match=r'runs had effects since 20.*\(r\).*Nothing was restored; keys="same"'):
        store.restore(at=at, runs="rewind")
    assert (seen(store), store.snapshots()) == (before, [])
    store.restore(at=at, runs="rewind", keys="same")
    clock.advance(STEP)
    store.answer("r", "Rome")
    clock.advance(STEP)
    assert len(paid) == 2
    assert len(set(paid)) == 1, "the receiver can tell that it is the same"
    store.get_run("r").undo()
    clock.advance(STEP)
    with pytest.raises(UsageError, match=r"effects were undone since 20.* \(r\)"):
        store.restore(at=at, runs="rewind", keys="same")
    store.get_snapshot("undo-1").release()
    with pytest.raises(HistoryGone, match="retried, undone or rewound since"):
        store.restore(at=at, runs="rewind", keys="new")


def swept(store: perdure.Store, clock: Clock) -> None:
    store.ops.retention(runs="0s")
    store.answer("waits", 1)
    clock.advance(STEP)
    store.ops.sweep_runs()


def retried(store: perdure.Store, clock: Clock) -> None:
    """Its own code failed: no call is reopened, and the journal has no trace of it."""
    fails.clear()
    store.get_run("broken").retry()
    clock.advance(STEP)
    assert store.get_run("broken").result() == "fine"


def moved(store: perdure.Store, clock: Clock) -> None:
    with TemporaryDirectory() as folder:
        store.ops.transfer(Path(folder) / "other.db", runs=["r"], move=True)


def renewed(store: perdure.Store, clock: Clock) -> None:
    store.answer("r", 1)


def undone(store: perdure.Store, clock: Clock) -> None:
    """It had no effects, so that its journal has no trace of it."""
    store.get_run("done").undo()


UNKNOWN: dict[str, tuple[Callable[[perdure.Store, Clock], Any], str]] = {
    "swept": (swept, "run 'waits' was .* retention has removed its journal"),
    "a new round": (renewed, "a new round since"),
    "retried": (retried, "run 'broken' was .* retried, undone or rewound since"),
    "undone": (undone, "run 'done' was .* retried, undone or rewound since"),
    "deleted": (lambda store, clock: store.delete_run("done"), "runs were removed since"),
    "moved": (moved, "run 'r' was .* moved to another store since"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_on_record_is_refused(store: perdure.Store, what: str) -> None:
    change, reason = UNKNOWN[what]
    clock = clock_of(store)
    fails.append(True)
    store.run(rounds, id="r")
    store.start(broken, id="broken")
    for name in ("waits", "done"):
        store.run(child, False, id=name)
    store.answer("done", 1)
    clock.advance(STEP)
    assert store.get_run("broken").refresh().status == "failed"
    at = clock.now
    clock.advance(STEP)
    store.thread("t").save({})
    change(store, clock)
    clock.advance(STEP)
    before = seen(store)
    with pytest.raises(HistoryGone, match=reason):
        store.restore(at=at, runs="rewind", keys="new")
    assert (seen(store), store.snapshots()) == (before, [])
    assert [str(one) for one in store.restore(at=at).changes] == ["delete thread t"], "without runs it is"


@pytest.mark.parametrize("later", [None, "before", "after"])
@pytest.mark.parametrize("forked", ["r", "child"])
def test_what_a_fork_shares_stays(store: perdure.Store, forked: str, later: str | None) -> None:
    """Also what a fork shares of a child that was started since. Threads that would go back too stay as they are."""
    clock = clock_of(store)
    store.run(parent, id="r")
    at = clock.now
    clock.advance(STEP)
    if later == "before":
        store.snapshot("s")
    store.answer("r", True)
    clock.advance(STEP)
    store.fork(forked, id="fork")
    store.thread("t").save({"n": 1})
    if later == "after":
        store.snapshot("s")
    before = seen(store)
    with pytest.raises(UsageError, match=f"'{forked}' was not rewound: its fork 'fork' shares what came later"):
        store.restore(at=at, runs="rewind")
    assert seen(store) == before
    assert len(store.snapshots()) == (later is not None), "nothing was begun"
    assert store.ops.verify().ok


def test_a_rewound_run_continues_from_the_state_that_it_had(store: perdure.Store) -> None:
    clock = clock_of(store)
    store.run(trip, id="r")
    store.answer("r", "Rome")
    clock.advance(STEP)
    at = clock.now
    clock.advance(STEP)
    store.answer("r", "May")
    clock.advance(STEP)
    for _ in range(2):  # the second time from the undo of the first one
        store.restore(at=at, runs="rewind")
        assert store.get_run("r").state_at() == store.thread("run:r").load().state == {"notes": ["Rome"]}
        clock.advance(STEP)
        store.answer("r", "June")
        clock.advance(STEP)
        assert store.thread("run:r").load().state == {"notes": ["Rome", "June"]}
        assert [point.state["notes"] for point in store.thread("run:r").history()][:2] == [["Rome", "June"], ["Rome"]]
    store.thread("run:r").prune(keep=1)
    store.restore(at=at, runs="rewind")
    clock.advance(STEP)
    store.answer("r", "July")
    clock.advance(STEP)
    assert store.thread("run:r").load().state == {"notes": ["Rome", "July"]}
    assert store.ops.verify().ok


def test_messages_wait_again_and_closed_questions_stay_closed(store: perdure.Store) -> None:
    clock = clock_of(store)
    for name in ("r", "cancelled"):
        store.run(trip, id=name)
    store.answer("r", "Rome")
    store.send("r", "early", topic="word")
    store.get_run("cancelled").cancel()
    clock.advance(STEP)
    at = clock.now
    clock.advance(STEP)
    for name in ("r", "cancelled"):
        store.send(name, "late", topic="word")
    for _ in range(2):
        store.answer("r", "May")
        clock.advance(STEP)
        assert store.get_run("r").state_at() == {"notes": ["Rome", "May", "early"]}
        store.restore(at=at, runs="rewind")
        assert [(one.run, one.text) for one in store.questions()] == [("r", "When?")]
        clock.advance(STEP)


def test_an_effect_that_was_undone_since_is_not_run_again_under_its_key(store: perdure.Store) -> None:
    clock = clock_of(store)
    store.run(trip, True, id="r")
    store.answer("r", "Rome")
    clock.advance(STEP)
    at = clock.now
    clock.advance(STEP)
    store.get_run("r").cancel()
    clock.advance(STEP)
    assert store.get_run("r").refresh().status == "cancelled"
    with pytest.raises(UsageError, match=r"effects were undone since 20.* \(r\).*keys=\"new\""):
        store.restore(at=at, runs="rewind", keys="same")
    store.restore(at=at, runs="rewind", keys="new")
    assert [(one.run, one.text) for one in store.questions()] == [("r", "When?")]


def test_an_effect_of_a_child_that_is_gone_counts(store: perdure.Store) -> None:
    clock = clock_of(store)
    store.run(parent, id="r")
    at = clock.now
    clock.advance(STEP)
    store.answer("r", True)
    clock.advance(STEP)
    store.answer("child", "aisle")
    clock.advance(STEP)
    store.snapshot("later")
    store.delete_run("child")
    with pytest.raises(UsageError, match=r"runs had effects since 20.* \(r\)"):
        store.restore(at=at, runs="rewind")
    store.restore(at=at, runs="rewind", keys="new")
    assert [(one.run, one.text) for one in store.questions()] == [("r", "Start?")]


def test_an_effect_that_comes_after_the_plan_is_refused(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(store)
    store.run(later_payer, id="r")
    at = clock.now
    clock.advance(STEP)
    store.answer("r", 1)
    clock.advance(STEP)
    begin = restore.begin_undo

    def answer() -> None:
        store.answer("r", 2)
        clock.advance(STEP)

    def slowly(*args: Any) -> Flow[Any]:
        undo = yield from begin(*args)
        yield from aside(answer)
        return undo

    monkeypatch.setattr(restore, "begin_undo", slowly)
    with pytest.raises(UsageError, match="run 'r' had effects while it was to be rewound: it was left as it is"):
        store.restore(at=at, runs="rewind")
    assert (store.get_run("r").result(), len(paid)) == ("rent", 1)
