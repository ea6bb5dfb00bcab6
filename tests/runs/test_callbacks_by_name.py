"""`reconcile` and `undo` are called by the names that they ask for; what cannot be is refused at the decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lab import Lab

import perdure


def takes_a_typo(key: str, flihgt: str) -> perdure.outcome.NotDone:
    return perdure.outcome.NotDone()


def takes_all(*args: Any) -> perdure.outcome.NotDone:
    return perdure.outcome.NotDone()


def takes_what_is_not_recorded(client: object) -> None: ...


def takes_a_key_without_its_type(key: str) -> None: ...


def takes_another_name(booking: str) -> None: ...


def takes_by_position(flight: str = "", result: str = "", /) -> None: ...


class Canceller:
    def __call__(self, flight: str) -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reconcile": takes_a_typo}, "asks for 'flihgt', .* any of client, flight, key$"),
        ({"reconcile": takes_all}, r"asks for '\*args'"),
        (
            {"undo": takes_what_is_not_recorded},
            "asks for 'client', .* any of flight, result, effect_key, or `key: perdure.IdempotencyKey`",
        ),
        ({"undo": takes_a_key_without_its_type}, "asks for 'key'"),
        ({"undo": takes_another_name}, "asks for 'booking'"),
        ({"undo": perdure.effect(name="names.cancel")(takes_another_name)}, "asks for 'booking'"),
        ({"reconcile": takes_by_position}, "takes 'flight' by position only"),
        ({"undo": takes_by_position}, "takes 'flight' by position only"),
        ({"undo": functools.partial(takes_another_name, booking="7")}, "has no name .* wrap it in a function"),
        ({"undo": Canceller()}, "has no name .* wrap it in a function"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_what_cannot_be_called_by_name_is_refused_where_the_effect_is_decorated(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(perdure.UsageError, match=words):

        @perdure.effect(ignore=("client",), name="names.book", **options)
        def book(client: object, flight: str, key: perdure.IdempotencyKey) -> None: ...


def names(key: perdure.IdempotencyKey) -> Any:
    return [key]


def arguments(flight: str, seats: int, key: str) -> Any:
    return [flight, seats, key]


def the_keys_own_name(token: str) -> Any:
    return [token]


def an_ignored_client(client: Any, flight: str) -> Any:
    return [client, flight]


def the_rest(key: str, **rest: Any) -> Any:
    return [key, rest]


def by_keyword(flight: str, key: str, *, seats: int, tries: int = 3) -> Any:
    return [flight, key, seats, tries]


@pytest.mark.parametrize(
    ("look", "gets"),
    [
        (names, ["KEY"]),
        (arguments, ["LH400", 2, "KEY"]),
        (the_keys_own_name, ["KEY"]),
        (an_ignored_client, ["a client", "LH400"]),
        (the_rest, ["KEY", {"client": "a client", "flight": "LH400", "seats": 2}]),
        (by_keyword, ["LH400", "KEY", 2, 3]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reconcile_gets_what_it_asks_for(sync_lab: Lab, look: Callable[..., Any], gets: list[Any]) -> None:
    @functools.wraps(look)
    def reconcile(*args: Any, **kwargs: Any) -> perdure.outcome.Done:
        return perdure.outcome.Done(look(*args, **kwargs))

    @perdure.effect(reconcile=reconcile, ignore=("client",), name="names.reconciled")
    def book(client: str, flight: str, token: perdure.IdempotencyKey, seats: int = 2) -> Any:
        raise TimeoutError

    @perdure.durable(name="names.agent")
    def agent() -> Any:
        return book("a client", flight="LH400")

    run = sync_lab.run(agent, id="r")
    key = run.steps()[0].key
    assert run.result() == [key if part == "KEY" else part for part in gets]


def test_an_effect_with_a_parameter_named_key_keeps_it(sync_lab: Lab) -> None:
    """The idempotency key then comes to a parameter of its type."""

    def look(key: str, mine: perdure.IdempotencyKey) -> perdure.outcome.Done:
        return perdure.outcome.Done([key, mine.startswith("pd_")])

    @perdure.effect(reconcile=look, name="names.put")
    def put(key: str, value: int) -> Any:
        raise TimeoutError

    @perdure.durable(name="names.puts")
    def agent() -> Any:
        return put("colour", 7)

    assert sync_lab.run(agent, id="r").result() == ["colour", True]


def test_a_method_gives_its_object_to_its_reconcile(sync_lab: Lab) -> None:
    class Desk:
        name = "desk"

        def look(self, key: str, room: str) -> perdure.outcome.Done:
            return perdure.outcome.Done(f"{self.name} has {room}")

        @perdure.effect(reconcile=look, name="names.desk")
        def book(self, room: str, key: perdure.IdempotencyKey) -> str:
            raise TimeoutError

    @perdure.durable(name="names.at_the_desk")
    def agent() -> Any:
        return Desk().book("7")

    assert sync_lab.run(agent, id="r").result() == "desk has 7"


@pytest.mark.parametrize("broken", ["raises", "returns nonsense"])
def test_the_same_line_asks_a_reconcile_again_that_was_fixed(lab: Lab, broken: str) -> None:
    is_fixed: list[bool] = []

    def look(key: str) -> Any:
        if is_fixed:
            return perdure.outcome.Done("found")
        if broken == "raises":
            raise KeyError("booking")
        return None

    @lab.effect(reconcile=look, name="names.fixed")
    def book() -> str:
        raise TimeoutError

    @lab.durable(name="names.fixed_agent")
    async def agent() -> Any:
        return await lab(book())

    assert lab.run(agent, id="r").status == ("waiting" if broken == "raises" else "stuck")
    is_fixed.append(True)
    assert lab.run(agent, id="r").result() == "found"
    assert lab.store.questions() == []


def test_what_failed_with_in_doubt_is_not_in_doubt(sync_lab: Lab) -> None:
    """on_doubt="fail" gave the question to the code: no message sends a person to `resolve`, which would refuse."""

    @perdure.effect(on_doubt="fail", name="names.fails")
    def pay() -> None:
        raise TimeoutError("no answer")

    @perdure.durable(name="names.fails_agent")
    def agent() -> None:
        pay()

    run = sync_lab.run(agent, id="r")
    with pytest.raises(perdure.RunFailed) as caught:
        run.result()
    assert "resolve" not in str(caught.value)
    [step] = run.steps()
    assert step.status == "failed"
    with pytest.raises(perdure.NotFound, match="not in doubt"):
        run.resolve("1", done=None)
