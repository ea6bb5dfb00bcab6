"""Taking back: effects are undone newest first, each as an effect of its own, when a run fails or is rolled back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import MODES, PLACES, Interrupt, Lab, Once, hooked, open_place

import holdfast as hf
from holdfast.runs.session.points import Point


@pytest.fixture(scope="module", params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hf.Store]:
    yield from open_place(request, tmp_path_factory)


@pytest.fixture(params=MODES)
def lab(request: pytest.FixtureRequest, store: hf.Store) -> Lab:
    return Lab(store, request.param)


class Trip:
    """Effects of a lab with their undos; `did` is what was done, in order."""

    def __init__(self, lab: Lab, **undo_options: Any) -> None:
        self.did: list[str] = []
        did = self.did

        def cancel(what: str) -> None:
            did.append(f"-{what}")

        def book(what: str) -> str:
            did.append(f"+{what}")
            return f"booking of {what}"

        undo: Any = lab.body(cancel)
        if undo_options:
            undo = hf.effect(name="cancel", **undo_options)(undo)
        self.cancel: Any = undo
        self.book: Any = lab.effect(name="book", undo=undo)(book)


def strike_at(at: str, name: str) -> Callable[[Point], None]:
    def strike(point: Point) -> None:
        if f"{point.when} {point.kind}" == at and point.name == name:
            raise Interrupt

    return strike


# --- when and in which order


def test_a_run_that_fails_undoes_what_it_did_newest_first(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.effect()
    def mail(text: str) -> None:
        trip.did.append(text)

    @lab.effect(undo=lambda what: trip.did.append(f"-{what}"), name="sold_out")
    def sold_out(what: str) -> None:
        raise ValueError(f"no {what} left")

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(mail("a mail"))  # nothing takes it back
        await lab(trip.book("car"))
        await lab(sold_out("hotel"))  # it did not happen: nothing to undo

    run = lab.run(agent, id="r")
    assert run.status == "failed"
    assert trip.did == ["+flight", "a mail", "+car", "-car", "-flight"]
    with pytest.raises(hf.RunFailed, match="no hotel left"):
        run.result()
    undone = [(step.path, step.name, step.status) for step in run.steps() if step.kind == "undo"]
    assert undone == [("undo:3", "undo book", "done"), ("undo:1", "undo book", "done")]
    lab.run(agent, id="r")
    assert len(trip.did) == 5


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


def test_rollback_cannot_be_caught_away(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        for _ in range(3):
            try:
                hf.rollback("changed my mind")
            except BaseException as error:  # agent loops catch everything
                trip.did.append(type(error).__name__)
            try:
                await lab(trip.book("hotel"))
            except BaseException as error:
                trip.did.append(type(error).__name__)
        return "done, I think"

    run = lab.run(agent, id="r")
    assert run.status == "rolled_back"
    assert trip.did == ["+flight", *["RollBack"] * 6, "-flight"]
    with pytest.raises(hf.RolledBack, match="changed my mind"):
        run.result()


def test_branches_are_undone_in_reverse_order_of_their_completion(store: hf.Store) -> None:
    lab = Lab(store, "async")
    did: list[str] = []
    second_is_booked = asyncio.Event()

    async def cancel(what: str) -> None:
        did.append(f"-{what}")

    @hf.effect(undo=cancel)
    async def book(what: str) -> None:
        if what == "first":
            await second_is_booked.wait()
        did.append(f"+{what}")

    @hf.step
    async def tells() -> None:
        second_is_booked.set()

    async def second() -> None:
        await book("second")
        await tells()

    @hf.durable
    async def agent() -> None:
        await asyncio.gather(book("first"), second())
        raise ValueError("all for nothing")

    assert lab.run(agent, id="r").status == "failed"
    assert did == ["+second", "+first", "-first", "-second"]


# --- what an undo is called with


def test_an_undo_gets_what_its_parameters_name(lab: Lab) -> None:
    got: list[Any] = []
    keys: list[str] = []

    def by_name(flight: str, result: str, effect_key: str, key: hf.Key) -> None:
        got.append([flight, result, effect_key == keys[0], key not in keys, key.startswith("hf_")])

    def by_rest(hotel: str, reservation: str) -> None:
        got.append([hotel, reservation])

    def by_result(booking: str) -> None:
        got.append(booking)

    def with_default(flight: str, reason: str = "rolled back") -> None:
        got.append([flight, reason])

    @lab.effect(name="one", undo=lab.body(by_name))
    def one(flight: str, seats: int, key: hf.Key) -> str:
        keys.append(key)
        return f"{flight} for {seats}"

    @lab.effect(name="two", undo=lab.body(by_rest))
    def two(hotel: str, guests: int = 2) -> str:
        return f"R-{guests}"

    @lab.effect(name="three", undo=lab.body(by_result))
    def three() -> str:
        return "B-7"

    @lab.effect(name="four", undo=lab.body(with_default))
    def four(flight: str) -> None:
        pass

    @lab.durable
    async def agent() -> None:
        await lab(one("LH400", seats=2))
        await lab(two("Grand", 3))
        await lab(three())
        await lab(four("UA88"))
        hf.rollback()

    assert lab.run(agent, id="r").status == "rolled_back"
    assert got == [["UA88", "rolled back"], "B-7", ["Grand", "R-3"], ["LH400", "LH400 for 2", True, True, True]]


def test_an_undo_that_needs_an_object_is_refused_when_it_is_given() -> None:
    """A rollback, perhaps in another process, has no `self` to call it on."""
    with pytest.raises(hf.UsageError, match="self"):

        class Airline:
            def cancel(self, flight: str) -> None: ...

            @hf.effect(undo=cancel)
            def book(self, flight: str) -> None: ...


def test_an_undo_whose_parameters_are_not_known_leaves_the_run_stuck(lab: Lab) -> None:
    def cancel(what: str, how: str, why: str) -> None:
        lab.ran.append((what, how, why))

    @lab.effect(undo=lab.body(cancel))
    def book(what: str) -> None:
        pass

    @lab.durable
    async def agent() -> None:
        await lab(book("flight"))
        hf.rollback()

    run = lab.run(agent, id="r")
    assert run.status == "stuck"
    with pytest.raises(hf.RunStuck, match="why"):
        run.result()
    assert lab.ran == []


def test_an_undo_may_be_of_another_flavour_than_the_run_where_that_is_possible(store: hf.Store) -> None:
    did: list[str] = []

    def cancel(what: str) -> None:
        did.append(f"-{what}")

    async def acancel(what: str) -> None:
        did.append(f"-{what}")

    @hf.effect(undo=cancel)
    async def abook(what: str) -> None:
        did.append(what)

    @hf.durable
    async def aagent() -> None:
        await abook("a")
        hf.rollback()

    lab = Lab(store, "async")
    assert lab.run(aagent, id="r").status == "rolled_back"
    assert did == ["a", "-a"]

    @hf.effect(undo=acancel)
    def book(what: str) -> None:
        did.append(what)

    @hf.durable
    def agent() -> None:
        book("b")
        hf.rollback()

    run = lab.run(agent, id="s")
    assert run.status == "stuck"
    with pytest.raises(hf.RunStuck, match="async"):
        run.result()


# --- doubts and failures on the way


def test_what_is_in_doubt_is_settled_before_anything_is_undone(store: hf.Store) -> None:
    lab, did = Lab(store, "async"), list[str]()

    async def cancel(what: str) -> None:
        did.append(f"-{what}")

    @hf.effect(undo=cancel)
    async def book(what: str) -> None:
        did.append(f"+{what}")
        if what == "hotel":
            await asyncio.sleep(60)

    @hf.durable
    async def agent() -> None:
        await book("flight")
        try:
            await asyncio.wait_for(book("hotel"), 0.02)  # broken off: nobody knows
        except TimeoutError:
            raise ValueError("give up") from None

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert did == ["+flight", "+hotel"]  # nothing is undone yet
    [ask] = lab.store.asks("r")
    assert ask.kind == "doubt"
    assert ask.step is not None
    run.resolve(ask.step, done=None)
    with pytest.raises(hf.RunFailed, match="give up"):
        run.result()
    assert did == ["+flight", "+hotel", "-hotel", "-flight"]


@pytest.mark.parametrize("verdict", ["done", "not done"])
def test_an_undo_in_doubt_asks_and_is_not_repeated(lab: Lab, verdict: str) -> None:
    trip = Trip(lab, timeout_s=0.05)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(trip.book("hotel"))
        hf.rollback("enough")

    at = "before done" if verdict == "done" else "before body"
    with hooked(strike_at(at, "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    [ask] = lab.store.asks("r")
    assert (ask.kind, ask.step) == ("doubt", "undo:2")
    if verdict == "done":
        run.resolve("undo:2", done=None)
    else:
        run.resolve("undo:2", not_done=True)
    with pytest.raises(hf.RolledBack, match="enough"):
        run.result()
    assert trip.did == ["+flight", "+hotel", "-hotel", "-flight"]


def test_an_undo_with_reconcile_settles_itself(lab: Lab) -> None:
    found: list[Any] = []
    trip: Trip

    def find(key: str, what: str) -> hf.Done | hf.NotDone:
        found.append(what)
        return hf.Done(None) if f"-{what}" in trip.did else hf.NotDone()

    trip = Trip(lab, reconcile=find, timeout_s=0.05)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(trip.book("hotel"))
        raise ValueError("no")

    with hooked(strike_at("before done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.status == "failed"
    assert trip.did == ["+flight", "+hotel", "-hotel", "-flight"]
    assert found == ["hotel"]


def test_an_undo_that_fails_leaves_the_run_stuck_and_it_goes_on_when_mended(lab: Lab) -> None:
    did: list[str] = []
    broken = {"hotel": True}

    def cancel(what: str) -> None:
        did.append(f"try -{what}")
        if broken.get(what):
            raise ValueError("the hotel does not answer the phone")
        did.append(f"-{what}")

    undo = hf.effect(name="cancel_or_not", retries=1, backoff_s=0)(lab.body(cancel))

    @lab.effect(undo=undo)
    def book(what: str) -> None:
        did.append(f"+{what}")

    @lab.durable
    async def agent() -> None:
        for what in ("flight", "hotel", "car"):
            await lab(book(what))
        raise KeyError("reason")

    run = lab.run(agent, id="r")
    assert run.status == "stuck"
    with pytest.raises(hf.RunStuck, match=r"holdfast resume r|run the same line again") as caught:
        run.result()
    assert "does not answer the phone" in str(caught.value)
    assert did == ["+flight", "+hotel", "+car", "try -car", "-car", "try -hotel", "try -hotel"]
    assert lab.run(agent, id="r").status == "stuck"  # the same line tries again
    broken.clear()
    assert run.resume() == "queued"
    with pytest.raises(hf.RunFailed, match="reason"):
        run.result()
    assert did[-4:] == ["try -hotel", "-hotel", "try -flight", "-flight"]
    assert did.count("-car") == 1


def test_a_plain_undo_is_tried_again_by_itself(lab: Lab) -> None:
    did: list[str] = []

    def cancel(what: str) -> None:
        did.append(f"-{what}")
        if len(did) == 2:
            raise ValueError("busy")

    @lab.effect(undo=lab.body(cancel))
    def book(what: str) -> None:
        did.append(f"+{what}")

    @lab.durable
    async def agent() -> None:
        await lab(book("flight"))
        hf.rollback()

    assert lab.run(agent, id="r").status == "rolled_back"
    assert did == ["+flight", "-flight", "-flight"]


def test_an_effect_whose_result_cannot_be_stored_was_done_and_is_undone(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.effect(undo=trip.cancel)
    def odd(what: str) -> Any:
        trip.did.append(f"+{what}")
        return threading.Lock()

    @lab.durable
    async def agent() -> None:
        try:
            await lab(odd("ship"))
        except hf.Unstorable:
            hf.rollback("an odd ship")

    assert lab.run(agent, id="r").status == "rolled_back"
    assert trip.did == ["+ship", "-ship"]


# --- children


def test_a_child_is_undone_as_one_unit(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> str:
        await lab(trip.book("museum"))
        await lab(trip.book("opera"))
        return "evening"

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        child = await lab(hf.spawn(child_agent, id="c"))
        assert await lab(child.result()) == "evening"
        await lab(trip.book("taxi"))
        raise ValueError("no")

    run = lab.run(agent, id="r")
    with pytest.raises(hf.RunFailed):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+museum", "+opera", "+taxi", "-taxi", "-opera", "-museum", "-flight"]
    child = lab.store.get_run("c")
    assert child.status == "rolled_back"
    with pytest.raises(hf.RolledBack):
        child.result()


def test_a_child_counts_from_when_it_ended(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))

    @lab.durable
    async def agent() -> None:
        child = await lab(hf.spawn(child_agent, id="c"))
        await lab(trip.book("flight"))
        await lab(child.result())
        raise ValueError("no")

    run = lab.run(agent, id="r")
    with pytest.raises(hf.RunFailed):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+opera", "-opera", "-flight"]


def test_a_child_that_waits_is_rolled_back_with_its_parent(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))
        await lab(hf.ask("Dress code?"))

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        child = await lab(hf.spawn(child_agent, id="c"))
        await lab(child.result())

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert lab.store.get_run("c").status == "waiting"
    assert run.rollback() == "queued"
    with pytest.raises(hf.RolledBack):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+opera", "-opera", "-flight"]
    assert lab.store.get_run("c").status == "rolled_back"
    assert lab.store.asks() == []


def test_the_failure_of_a_child_reaches_its_parent_who_may_go_on(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))
        raise ValueError("the tenor is ill")

    @lab.durable
    async def agent() -> str:
        child = await lab(hf.spawn(child_agent))
        try:
            await lab(child.result())
        except hf.RunFailed as error:
            return f"{type(error.__cause__).__name__}: {error.__cause__}"
        return ""

    run = lab.run(agent, id="r")
    assert run.result(timeout_s=20) == "ValueError: the tenor is ill"
    assert trip.did == ["+opera", "-opera"]


# --- by an operator


def test_an_operator_rolls_back_a_run_that_waits(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(hf.ask("Go on?"))

    run = lab.run(agent, id="r")
    assert run.rollback() == "queued"
    assert lab.run(agent, id="r").status == "rolled_back"
    assert trip.did == ["+flight", "-flight"]
    assert lab.store.asks() == []
    assert run.rollback() == "rolled_back"


def test_an_operator_rolls_back_a_run_that_is_done(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        return "gone"

    run = lab.run(agent, id="r")
    assert run.result() == "gone"
    assert run.rollback() == "queued"
    with pytest.raises(hf.RolledBack):
        run.result()
    assert trip.did == ["+flight", "-flight"]


def test_an_operator_rolls_back_a_run_that_is_running(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.step()
    def meanwhile() -> None:
        assert lab.store.get_run("r").rollback() == "running"  # its owner is told

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        await lab(meanwhile())
        await lab(trip.book("hotel"))
        return "gone"

    run = lab.run(agent, id="r")
    assert run.status == "rolled_back"
    assert trip.did == ["+flight", "-flight"]


@pytest.mark.parametrize("at", ["before finish", "before park"])
def test_a_rollback_at_the_last_moment_is_not_lost(lab: Lab, at: str) -> None:
    trip, once = Trip(lab), Once()

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        if at == "before park":
            await lab(hf.ask("Go on?"))
        return "gone"

    def strike(point: Point) -> None:
        if f"{point.when} {point.kind}" == at and not once.reached:
            once.reached = 1
            # From another thread: an operator is not on this run's event loop.
            asked = threading.Thread(target=lambda: lab.store.get_run("r").rollback())
            asked.start()
            asked.join(20)

    with hooked(strike):
        run = lab.run(agent, id="r")
    assert run.status == "rolled_back"
    assert trip.did == ["+flight", "-flight"]


def test_a_rollback_of_an_operator_may_meet_a_doubt(lab: Lab) -> None:
    trip = Trip(lab, timeout_s=0.05)

    @lab.step()
    def meanwhile() -> None:
        lab.store.get_run("r").rollback()

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(meanwhile())

    with hooked(strike_at("before done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    run.resolve("undo:1", done=None)
    with pytest.raises(hf.RolledBack):
        run.result()
    assert trip.did == ["+flight", "-flight"]


def test_a_rollback_that_was_interrupted_goes_on(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> None:
        for what in ("a", "b", "c"):
            await lab(trip.book(what))
        raise ValueError("reason")

    with hooked(strike_at("after done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert trip.did == ["+a", "+b", "+c", "-c"]
    run = lab.run(agent, id="r")
    assert run.status == "failed"
    assert trip.did == ["+a", "+b", "+c", "-c", "-b", "-a"]
    with pytest.raises(hf.RunFailed, match="reason"):
        run.result()
