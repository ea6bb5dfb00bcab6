"""Taking back: effects are undone newest first, each as an effect of its own, when a run fails or is undone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lab import Lab
from sagas_kit import Trip

import perdure
from perdure.errors import RunError

# --- when and in which order


def test_a_run_that_fails_with_a_declared_error_undoes_what_it_did_newest_first(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.effect()
    def mail(text: str) -> None:
        trip.did.append(text)

    @lab.effect(undo=lambda what: trip.did.append(f"-{what}"), name="sold_out", definite=ValueError)
    def sold_out(what: str) -> None:
        raise ValueError(f"no {what} left")

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(mail("a mail"))  # nothing takes it back
        await lab(trip.book("car"))
        await lab(sold_out("hotel"))  # it did not happen: nothing to undo

    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    assert trip.did == ["+flight", "a mail", "+car", "-car", "-flight"]
    with pytest.raises(perdure.RunFailed, match="no hotel left"):
        run.result()
    undone = [(step.path, step.name, step.status) for step in run.steps() if step.kind == "undo"]
    assert undone == [("undo:3", "undo book", "done"), ("undo:1", "undo book", "done")]
    lab.run(agent, id="r")
    assert len(trip.did) == 5


@pytest.mark.parametrize(
    ("how", "begins"),
    [
        ("undo", "run 'r' was undone"),
        ("undo_on", "run 'r' failed: ValueError: off"),
        ("cancel", "run 'r' was cancelled, and what has an undo was undone"),
        ("cancel at once", "run 'r' was cancelled"),
    ],
)
def test_the_end_of_an_undone_run_names_the_effects_that_have_no_undo(lab: Lab, how: str, begins: str) -> None:
    trip = Trip(lab)

    @lab.effect(definite=KeyError)
    def mail(to: int) -> None:
        if to < 0:
            raise KeyError(to)

    @lab.effect()
    def call() -> None:
        pass

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        if how != "cancel at once":
            await lab(trip.book("flight"))
        for to in range(6):
            await lab(mail(to))
        with pytest.raises(KeyError):
            await lab(mail(-1))
        await lab(call())
        if how == "undo_on":
            raise ValueError("off")
        await lab(perdure.ask("?"))

    run = lab.run(agent, id="r")
    if how != "undo_on":
        run.undo() if how == "undo" else run.cancel()
    first = 1 if how == "cancel at once" else 2
    steps = ", ".join(map(str, range(first, first + 4)))
    lasting = f"7 effects have no undo and stand: mail (steps {steps} and 2 more), call (step {first + 7})"
    with pytest.raises(RunError) as caught:
        run.result(timeout_s=20)
    assert str(caught.value) == f"{begins}; {lasting}"


def test_an_error_that_the_agent_handles_undoes_nothing(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.step()
    def breaks() -> None:
        raise ValueError("no")

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        try:
            await lab(breaks())
        except ValueError:
            return "went on"
        return ""

    assert lab.run(agent, id="r").result() == "went on"
    assert trip.did == ["+flight"]


def test_undo_cannot_be_caught_away(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        for _ in range(3):
            try:
                perdure.undo("changed my mind")
            except BaseException as error:  # agent loops catch everything
                trip.did.append(type(error).__name__)
            try:
                await lab(trip.book("hotel"))
            except BaseException as error:
                trip.did.append(type(error).__name__)
        return "done, I think"

    run = lab.run(agent, id="r")
    assert run.refresh().status == "undone"
    assert trip.did == ["+flight", *["Undo"] * 6, "-flight"]
    with pytest.raises(perdure.RunUndone, match="changed my mind"):
        run.result()


def test_branches_are_undone_in_reverse_order_of_their_completion(store: perdure.Store) -> None:
    lab = Lab(store, "async")
    did: list[str] = []
    second_is_booked = asyncio.Event()

    async def cancel(what: str) -> None:
        did.append(f"-{what}")

    @perdure.effect(undo=cancel)
    async def book(what: str) -> None:
        if what == "first":
            await second_is_booked.wait()
        did.append(f"+{what}")

    @perdure.step
    async def tells() -> None:
        second_is_booked.set()

    async def second() -> None:
        await book("second")
        await tells()

    @perdure.durable(undo_on=ValueError)
    async def agent() -> None:
        await asyncio.gather(book("first"), second())
        raise ValueError("all for nothing")

    assert lab.run(agent, id="r").status == "failed"
    assert did == ["+second", "+first", "-first", "-second"]


# --- what an undo is called with


def test_an_undo_gets_what_its_parameters_name(lab: Lab) -> None:
    got: list[Any] = []
    keys: list[str] = []

    def by_name(flight: str, result: str, effect_key: str, key: perdure.IdempotencyKey) -> None:
        got.append([flight, result, effect_key == keys[0], key not in keys, key.startswith("pd_")])

    def by_default(hotel: str, guests: int, result: str) -> None:
        got.append([hotel, guests, result])

    def by_rest(**rest: str) -> None:
        got.append(rest)

    def with_default(flight: str, reason: str = "rolled back") -> None:
        got.append([flight, reason])

    @lab.effect(name="one", undo=lab.body(by_name))
    def one(flight: str, seats: int, key: perdure.IdempotencyKey) -> str:
        keys.append(key)
        return f"{flight} for {seats}"

    @lab.effect(name="two", undo=lab.body(by_default))
    def two(hotel: str, guests: int = 2) -> str:
        return f"R-{guests}"

    @lab.effect(name="three", undo=lab.body(by_rest))
    def three(what: str, **more: str) -> str:
        return "B-7"

    @lab.effect(name="four", undo=lab.body(with_default))
    def four(flight: str) -> None:
        pass

    @lab.durable
    async def agent() -> None:
        await lab(one("LH400", seats=2))
        await lab(two("Grand"))
        await lab(three("car", colour="red"))
        await lab(four("UA88"))
        perdure.undo()

    assert lab.run(agent, id="r").status == "undone"
    assert got == [
        ["UA88", "rolled back"],
        {"what": "car", "colour": "red"},
        ["Grand", 2, "R-2"],
        ["LH400", "LH400 for 2", True, True, True],
    ]


def test_an_undo_that_needs_an_object_is_refused_when_it_is_given() -> None:
    """An undo, perhaps in another process, has no `self` to call it on."""
    with pytest.raises(perdure.UsageError, match="self"):

        class Airline:
            def cancel(self, flight: str) -> None: ...

            @perdure.effect(undo=cancel)
            def book(self, flight: str) -> None: ...


def test_an_undo_may_be_of_another_flavour_than_the_run_where_that_is_possible(store: perdure.Store) -> None:
    did: list[str] = []

    def cancel(what: str) -> None:
        did.append(f"-{what}")

    async def acancel(what: str) -> None:
        did.append(f"-{what}")

    @perdure.effect(undo=cancel)
    async def abook(what: str) -> None:
        did.append(what)

    @perdure.durable
    async def aagent() -> None:
        await abook("a")
        perdure.undo()

    lab = Lab(store, "async")
    assert lab.run(aagent, id="r").status == "undone"
    assert did == ["a", "-a"]

    @perdure.effect(undo=acancel)
    def book(what: str) -> None:
        did.append(what)

    @perdure.durable
    def agent() -> None:
        book("b")
        perdure.undo()

    run = lab.run(agent, id="s")
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match="async"):
        run.result()


# --- children


def test_a_child_is_undone_as_one_unit(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> str:
        await lab(trip.book("museum"))
        await lab(trip.book("opera"))
        return "evening"

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        await lab(trip.book("flight"))
        child = await lab(perdure.spawn(child_agent, id="c"))
        assert await lab(child.result()) == "evening"
        await lab(trip.book("taxi"))
        raise ValueError("no")

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.RunFailed):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+museum", "+opera", "+taxi", "-taxi", "-opera", "-museum", "-flight"]
    child = lab.store.get_run("c")
    assert child.refresh().status == "undone"
    with pytest.raises(perdure.RunUndone):
        child.result()


def test_a_child_counts_from_when_it_ended(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        child = await lab(perdure.spawn(child_agent, id="c"))
        await lab(trip.book("flight"))
        await lab(child.result())
        raise ValueError("no")

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.RunFailed):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+opera", "-opera", "-flight"]


def test_a_child_that_waits_is_undone_with_its_parent(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))
        await lab(perdure.ask("Dress code?"))

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        child = await lab(perdure.spawn(child_agent, id="c"))
        await lab(child.result())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert lab.store.get_run("c").status == "waiting"
    assert run.undo() == "queued"
    with pytest.raises(perdure.RunUndone):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+opera", "-opera", "-flight"]
    assert lab.store.get_run("c").status == "undone"
    assert lab.store.questions() == []


def test_the_failure_of_a_child_reaches_its_parent_who_may_go_on(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent", undo_on=ValueError)
    async def child_agent() -> None:
        await lab(trip.book("opera"))
        raise ValueError("the tenor is ill")

    @lab.durable
    async def agent() -> str:
        child = await lab(perdure.spawn(child_agent))
        try:
            await lab(child.result())
        except perdure.RunFailed as error:
            return f"{type(error.__cause__).__name__}: {error.__cause__}"
        return ""

    run = lab.run(agent, id="r")
    assert run.result(timeout_s=20) == "ValueError: the tenor is ill"
    assert trip.did == ["+opera", "-opera"]
