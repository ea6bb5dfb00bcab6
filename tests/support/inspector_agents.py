"""Agents whose runs the tests of the inspector look at: each waits for a person, or has failed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

import perdure


class Plan(msgspec.Struct):
    """What a customer gets."""

    plan: Literal["team", "company"]
    seats: Annotated[int, msgspec.Meta(ge=1, le=500)]
    sso: bool
    note: str | None = None


lost: list[Exception] = []  # what happens to the next booking


@perdure.effect(timeout_s=0.01)
def book_hotel(hotel: str, api_token: str, key: perdure.IdempotencyKey) -> dict[str, Any]:
    if lost:
        raise lost.pop()
    return {"booking": f"H-{hotel}"}


@perdure.effect(approve="Pay back {cents} cents?")
def refund(cents: int) -> str:
    return f"paid {cents}"


@perdure.durable
def flight(city: str) -> str:
    return str(perdure.ask(f"Which flight to {city}?", options=[f"{city}-1", f"{city}-2"]))


@perdure.durable
def onboard(customer: str) -> Any:
    return perdure.ask(f"What does {customer} get?", schema=Plan)


@perdure.durable
def hotel(name: str) -> dict[str, Any]:
    return dict(book_hotel(name, "tok-7421"))


@perdure.durable
def pay_back(cents: int) -> str:
    return refund(cents)


@perdure.durable
def publish(title: str) -> bool:
    return bool(perdure.ask(f"Publish {title}?", schema=bool, approvers=["ann", "bo", "chen"], quorum=2))


@perdure.durable
def fail(why: str) -> None:
    raise ValueError(why)


def in_doubt(store: perdure.Store, id: str) -> perdure.Run:
    """A run whose booking may have happened."""
    lost.append(TimeoutError("POST /bookings: no answer"))
    return store.run(hotel, "Oslo", id=id)


def fill(store: perdure.Store) -> None:
    """One run of each kind."""
    in_doubt(store, "trip-oslo")
    store.run(flight, "Lisbon", id="trip-lisbon")
    store.run(onboard, "acme", id="onboard-acme")
    store.run(pay_back, 124_000, id="refund-8841")
    store.run(publish, "news", id="news-1")
    store.run(fail, "the index is gone", id="index-40")


@perdure.step
def read_page(number: int) -> dict[str, Any]:
    return {"url": f"https://papers.example/{number}", "api_key": "k-1"}


@perdure.step
def summarise(number: int) -> str:
    if number == 4_321:
        raise ValueError("page 4321 is empty")
    return f"Page {number}"


@perdure.durable
def research(pages: int) -> int:
    """A run of two steps for each page."""
    failures = 0
    for number in range(pages):
        read_page(number)
        try:
            summarise(number)
        except ValueError:
            failures += 1
    return failures


@perdure.step
def choose(city: str) -> str:
    perdure.state()["stage"] = "chosen"
    return f"{city}-1"


@perdure.durable
def prepare(part: str) -> str:
    return part


@perdure.durable
def travel(city: str, passenger: dict[str, Any]) -> list[Any]:
    """A run with state, children, an effect, and a message that it waits for."""
    state = perdure.state({"city": city, "password": "p-0"})
    flight = choose(city)
    state["password"] = "p-1"
    part = perdure.spawn(prepare, "seat", id=f"{city}-seat").result()
    booked = book_hotel(city, "tok-7421")
    return [flight, part, booked, perdure.receive("gate"), state["city"]]


@perdure.durable
def waits(number: int) -> Any:
    return perdure.ask(f"Go on with {number}?")
