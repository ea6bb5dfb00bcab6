"""Chains of errors, groups of errors and private slots are the same when an error is raised again: never shortened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import Interrupt, Once

import perdure

Reads = dict[str, Callable[[Any], Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    """An error is the same data on both databases: one is enough."""
    with perdure.open(str(tmp_path_factory.mktemp("errors") / "errors.db"), durability="normal") as opened:
        yield opened


def in_a_group() -> None:
    nested: Exception = ValueError(-1)
    for number in range(1500):  # deeper than Python's stack
        nested = ExceptionGroup(f"level {number}", [nested])
    raise ExceptionGroup("batch", [nested, *map(ValueError, range(150))])


def depth_of_group(error: Any) -> int:
    depth = 0
    while isinstance(error, ExceptionGroup):
        error, depth = error.exceptions[0], depth + 1
    return depth


def with_causes() -> None:
    error: Exception = ConnectionError("root")
    for number in range(1500):
        outer = RuntimeError(number)
        outer.__cause__ = error
        error = outer
    raise error


def root_of(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return repr(error)


def from_none() -> None:
    try:
        raise KeyError("token expired")
    except KeyError:
        raise ValueError("refused") from None


def from_its_context() -> None:
    """Each cause is the context too: recorded apart from each other there would be 2 ** 40 of them."""
    error: Exception = ValueError("root")
    for number in range(40):
        try:
            try:
                raise error
            except Exception as caught:
                raise RuntimeError(number) from caught
        except RuntimeError as outer:
            error = outer
    raise error


def from_another() -> None:
    try:
        raise KeyError("context")
    except KeyError:
        raise ValueError("refused") from asyncio.CancelledError("cause")


class Declined(Exception):
    __slots__ = ("__code",)

    def __init__(self, code: int) -> None:
        super().__init__("declined")
        self.__code = code

    @property
    def code(self) -> int:
        return self.__code


def with_a_private_slot() -> None:
    raise Declined(7)


class Broken(Exception):
    def __init__(self, **given: Any) -> None:
        super().__init__("broken")
        vars(self).update(given)


def with_itself() -> None:
    error = Broken(code=7)
    vars(error)["itself"] = vars(error)["__special__"] = error
    error.add_note("x" * 20_000)
    raise error


CHAIN: Reads = {
    "cause": lambda e: repr(e.__cause__),
    "context": lambda e: repr(e.__context__),
    "suppressed": lambda e: e.__suppress_context__,
    "same": lambda e: e.__cause__ is e.__context__,
    "root": root_of,
}
ERRORS: dict[Callable[[], None], tuple[type[Exception], Reads]] = {
    in_a_group: (
        ExceptionGroup,
        {"members": lambda e: [repr(member) for member in e.exceptions[1:]], "depth": depth_of_group},
    ),
    with_causes: (RuntimeError, CHAIN),
    from_none: (ValueError, CHAIN),
    from_its_context: (RuntimeError, CHAIN),
    from_another: (ValueError, CHAIN),
    with_a_private_slot: (Declined, {"code": lambda e: e.code}),
    with_itself: (
        Broken,
        {"itself": lambda e: (e.itself is e, e.__special__ is e, e.code), "notes": lambda e: e.__notes__},
    ),
}


@pytest.mark.parametrize("raises", ERRORS, ids=lambda fn: fn.__name__)
def test_no_part_of_an_error_is_missing_after_a_restart(store: perdure.Store, raises: Callable[[], None]) -> None:
    cls, reads = ERRORS[raises]
    once, seen = Once(), list[dict[str, Any]]()

    @perdure.step(name="ask")
    def ask() -> None:
        raises()

    @perdure.durable(name="agent")
    def agent() -> str:
        try:
            ask()
        except cls as error:
            seen.append({"str": str(error), **{name: read(error) for name, read in reads.items()}})
            once.interrupt()
        return "continued"

    with pytest.raises(Interrupt):
        store.run(agent, id=raises.__name__)
    assert store.run(agent, id=raises.__name__).result() == "continued"
    assert seen[1] == seen[0]


def test_an_error_with_too_many_others_leaves_the_run_stuck_and_is_not_shortened(
    store: perdure.Store, caplog: pytest.LogCaptureFixture
) -> None:
    once, did = Once(), list[str]()

    @perdure.effect(name="pay", undo=lambda: did.append("refunded"))
    def pay() -> None:
        did.append("paid")

    @perdure.step(name="ask")
    def ask() -> None:
        raise ExceptionGroup("batch", [ValueError(number) for number in range(10_000)])

    @perdure.durable(name="agent", undo_on=(Exception,))
    def agent() -> None:
        pay()
        try:
            ask()
        except Exception:
            once.interrupt()

    with pytest.raises(Interrupt):
        store.run(agent, id="many")
    assert "ExceptionGroup (it has more than 10,000 causes, contexts and members)" in caplog.text
    run = store.run(agent, id="many")
    assert (run.refresh().status, did) == ("stuck", ["paid"])
    with pytest.raises(perdure.RunStuck, match=r"more than 10,000 causes(.|\n)*perdure run resume"):
        run.result()
