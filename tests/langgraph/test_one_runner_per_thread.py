"""A thread whose nodes call effects is run by one process at a time: a second one never repeats an effect.

While a task with effects is open in one process, another gets `LeaseLost`: for its own effects, and for a checkpoint.
Between two tasks the first that stores the next checkpoint continues, and the other gets `Conflict`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from graph_kit import at
from langgraph.graph import START, StateGraph
from two_runners import CONFIG, Trip, bookings
from workshop import until

import perdure
from perdure.langgraph import PerdureSaver
from perdure.testing.processes import ChildProcess, ForkServer


@pytest.fixture(scope="module")
def nurseries() -> Iterator[tuple[ForkServer, ForkServer]]:
    with ForkServer("two_runners:child") as one, ForkServer("two_runners:child") as two:
        yield one, two


class Runner:
    """A process that runs the graph, stopped at its gates."""

    def __init__(self, fork_server: ForkServer, url: str, folder: Path, role: str, gates: str, *rounds: str) -> None:
        self._folder, self._role = folder, role
        for gate in gates.split(","):
            os.mkfifo(folder / f"{role} {gate}") if gate else None
        durability = "async" if role.endswith("async") else "sync"
        self.child: ChildProcess = fork_server.start(url, str(folder), role, durability, *rounds)
        self._lines = self.child.lines()

    def says(self) -> Any:
        return next(self._lines)

    def reaches(self, gate: str) -> None:
        assert self.says() == gate

    def passes(self, gate: str) -> None:
        with open(self._folder / f"{self._role} {gate}", "w"):
            pass

    def ends(self) -> None:
        assert list(self._lines) == []


class Two:
    """The first runner, at the gate of node `flight`, and the second, which found the thread there and stopped too."""

    def __init__(self, nurseries: tuple[ForkServer, ForkServer], url: str, folder: Path, inner: str = "") -> None:
        self.first = Runner(nurseries[0], url, folder, f"{inner}first", "flight,think,Grand", "begin")
        self.first.reaches("flight")
        self.second = Runner(nurseries[1], url, folder, f"{inner}second", "flight", "resume")
        self.second.reaches("flight")

    def first_is_booking_the_hotel(self) -> None:
        for passed, reached in (("flight", "think"), ("think", "Grand")):
            self.first.passes(passed)
            self.first.reaches(reached)


@pytest.mark.parametrize("inner", ["", "inner "])
def test_a_process_that_resumes_a_running_thread_does_not_book_again(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer], inner: str
) -> None:
    """Also in a subgraph, which is the same thread."""
    two = Two(nurseries, saver_url, tmp_path, inner)
    two.first_is_booking_the_hotel()
    two.second.passes("flight")
    assert two.second.says()["error"] == "LeaseLost"
    two.second.ends()
    two.first.passes("Grand")
    assert two.first.says() == {"booked": ["LH400", "Grand"]}
    two.first.ends()
    assert bookings(tmp_path) == ["LH400", "Grand"]


def test_a_process_that_was_overtaken_does_not_book_again(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer]
) -> None:
    """It holds a checkpoint that the first has long gone on from."""
    two = Two(nurseries, saver_url, tmp_path)
    two.first_is_booking_the_hotel()
    two.first.passes("Grand")
    assert two.first.says() == {"booked": ["LH400", "Grand"]}
    two.second.passes("flight")
    assert two.second.says()["error"] == "Conflict"
    two.second.ends()
    two.first.ends()
    assert bookings(tmp_path) == ["LH400", "Grand"]


@pytest.mark.parametrize("role", ["first", "first async"])
def test_between_two_effects_the_process_that_stores_first_continues(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer], role: str
) -> None:
    """The first is in a node without effects, and the second overtakes it. It is told at once, not after a wait."""
    first = Runner(nurseries[0], saver_url, tmp_path, role, "think", "begin")
    first.reaches("think")
    with PerdureSaver(saver_url) as saver:  # an async runner stores the checkpoint before `think` while it runs
        until(lambda: (stored := saver.get_tuple(CONFIG)) is not None and stored.metadata["step"] == 2)
    second = Runner(nurseries[1], saver_url, tmp_path, "second", "", "resume")
    assert second.says() == {"booked": ["LH400", "Grand"]}
    second.ends()
    first.passes("think")
    assert first.says()["error"] == "Conflict"
    first.ends()
    assert bookings(tmp_path) == ["LH400", "Grand"]


def test_a_new_input_waits_for_the_end_of_the_effect_that_is_under_way(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer]
) -> None:
    first = Runner(nurseries[0], saver_url, tmp_path, "first", "Grand", "begin")
    first.reaches("Grand")
    second = Runner(nurseries[1], saver_url, tmp_path, "second", "round 1", "begin", "begin")
    assert second.says()["error"] == "LeaseLost"
    second.reaches("round 1")
    first.passes("Grand")
    assert first.says() == {"booked": ["LH400", "Grand"]}
    second.passes("round 1")
    assert second.says() == {"booked": ["LH400", "Grand"] * 2}
    first.ends()
    second.ends()
    assert bookings(tmp_path) == ["LH400", "Grand"] * 2


def test_two_living_processes_take_turns(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer]
) -> None:
    """None waits for a lease of the other: it ends with the task."""
    first = Runner(nurseries[0], saver_url, tmp_path, "first", "round 1", "begin", "begin")
    assert first.says() == {"booked": ["LH400", "Grand"]}
    first.reaches("round 1")
    second = Runner(nurseries[1], saver_url, tmp_path, "second", "round 1", "begin", "begin")
    assert len(second.says()["booked"]) == 4
    second.reaches("round 1")
    first.passes("round 1")
    assert len(first.says()["booked"]) == 6
    second.passes("round 1")
    assert len(second.says()["booked"]) == 8
    first.ends()
    second.ends()


def test_after_a_kill_the_next_process_resumes_at_once(
    saver_url: str, tmp_path: Path, nurseries: tuple[ForkServer, ForkServer]
) -> None:
    """Killed between two effects, with the thread its own: no lease is waited for."""
    first = Runner(nurseries[0], saver_url, tmp_path, "first", "hotel", "begin")
    first.reaches("hotel")
    first.child.kill()
    second = Runner(nurseries[1], saver_url, tmp_path, "second", "", "resume")
    assert second.says() == {"booked": ["LH400", "Grand"]}
    second.ends()
    assert bookings(tmp_path) == ["LH400", "Grand"]


# --- in one process


class Booking:
    """A graph of a node that books twice, in a subgraph if asked; each booking calls `during`."""

    def __init__(self, saver: PerdureSaver, *, inner: bool = False) -> None:
        self.keys: list[str] = []
        self.during: Callable[[str], None] = lambda item: None

        @perdure.effect(name="book", timeout_s=60)
        def book(item: str, key: perdure.IdempotencyKey) -> str:
            self.keys.append(str(key))
            self.during(item)
            return item

        builder = StateGraph(Trip)
        builder.add_node("trip", lambda state: {"booked": [book("a"), book("b")]})
        builder.add_edge(START, "trip")
        if inner:
            outer = StateGraph(Trip)
            outer.add_node("inner", builder.compile())
            outer.add_edge(START, "inner")
            builder = outer
        self.graph = builder.compile(checkpointer=saver)

    def held(self, item: str) -> tuple[threading.Event, threading.Event]:
        """Hold a booking: set when it is reached, and what lets it go on."""
        reached, go_on = threading.Event(), threading.Event()

        def during(found: str) -> None:
            if found == item:
                reached.set()
                assert go_on.wait(30)

        self.during = during
        return reached, go_on


def test_a_new_input_in_the_same_process_is_refused_while_an_effect_is_under_way(saver: PerdureSaver) -> None:
    booking = Booking(saver)
    reached, go_on = booking.held("a")
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(booking.graph.invoke({}, at("t"))))
    first.start()
    assert reached.wait(30)
    with pytest.raises(perdure.errors.LeaseLost, match="is being run by another"):
        booking.graph.invoke({}, at("t"))
    go_on.set()
    first.join(30)
    assert results == [{"booked": ["a", "b"]}]
    assert booking.graph.invoke({}, at("t"))["booked"] == ["a", "b"] * 2


@pytest.mark.parametrize("inner", [False, True])
def test_going_back_to_a_checkpoint_is_no_second_runner(saver: PerdureSaver, inner: bool) -> None:
    """What the old checkpoint's tasks did stands; what comes after it is new."""
    booking = Booking(saver, inner=inner)
    booking.graph.invoke({}, at("t"))
    booking.graph.invoke({}, at("t"))
    before = [state.config for state in booking.graph.get_state_history(at("t")) if state.next and state.values]
    for config in before:
        assert booking.graph.invoke(None, config)["booked"][-2:] == ["a", "b"]
    assert booking.graph.invoke({}, at("t"))["booked"][-2:] == ["a", "b"]
    assert saver.store.ops.verify().ok


def test_a_process_whose_lease_is_over_cannot_book_on(tmp_path: Path) -> None:
    """It hung for so long that another one has the thread: its next effect is refused before it is called."""
    path = str(tmp_path / "a.db")
    with PerdureSaver(path) as late, PerdureSaver(path) as next_:
        booking = Booking(late)
        reached, go_on = booking.held("a")
        errors: list[Exception] = []

        def run() -> None:
            try:
                booking.graph.invoke({}, at("t"))
            except perdure.PerdureError as error:
                errors.append(error)

        first = threading.Thread(target=run)
        first.start()
        assert reached.wait(30)
        with pytest.raises(perdure.errors.LeaseLost):
            Booking(next_).graph.invoke({}, at("t"))
        clock = next_.store._context.clock_us
        next_.store._context.clock_us = lambda: clock() + 200_000_000
        assert Booking(next_).graph.invoke({}, at("t"))["booked"] == ["a", "b"]
        go_on.set()
        first.join(30)
        assert [type(error).__name__ for error in errors] == ["LeaseLost"]
        assert len(booking.keys) == 1
