"""Chains of errors, groups of errors and private slots are the same when an error is raised again: never shortened."""

from __future__ import annotations

import asyncio
import decimal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx
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


def with_notes() -> None:
    try:
        raise KeyError("inner")
    except KeyError:
        error = ValueError("outer", 7)
        error.add_note("while counting")
        raise error  # noqa: B904  # its context is what is looked at


def with_itself() -> None:
    error = Broken(code=7)
    vars(error)["itself"] = vars(error)["__special__"] = error
    error.add_note("x" * 20_000)
    raise error


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def that_accepts_no_attributes() -> None:
    raise Frozen(7) from KeyError("cause")


def with_members_that_were_set() -> None:
    error = SyntaxError("bad")
    error.filename, error.lineno = "app.py", 3
    raise error


def with_a_class() -> None:
    raise TypeError("wanted", int, [Declined])


class Reason(Enum):
    DECLINED = "card_declined"
    EXPIRED = "card_expired"


class PaymentFailed(Exception):
    def __init__(self, reason: Reason, tried: list[Reason]) -> None:
        super().__init__(reason, tried)
        self.reason = reason


def with_members_of_an_enum() -> None:
    raise PaymentFailed(Reason.DECLINED, [Reason.EXPIRED])


def of_decimals() -> None:
    decimal.Decimal("x")


def of_a_full_pipe() -> None:
    raise BlockingIOError(11, "would block", 5)


def of_a_name_to_import() -> None:
    from json import nowhere  # type: ignore[attr-defined]  # noqa: F401


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
    with_notes: (
        ValueError,
        {"notes": lambda e: e.__notes__, "context": lambda e: repr(e.__context__), "args": lambda e: e.args},
    ),
    with_members_of_an_enum: (
        PaymentFailed,
        {"args": lambda e: e.args, "is": lambda e: e.reason is Reason.DECLINED, "text": str},
    ),
    with_causes: (RuntimeError, CHAIN),
    from_none: (ValueError, CHAIN),
    from_its_context: (RuntimeError, CHAIN),
    from_another: (ValueError, CHAIN),
    that_accepts_no_attributes: (Frozen, {"code": lambda e: e.code, "cause": lambda e: repr(e.__cause__)}),
    with_members_that_were_set: (SyntaxError, {"place": lambda e: (e.filename, e.lineno, e.msg)}),
    with_a_class: (TypeError, {"args": lambda e: e.args, "repr": repr}),
    of_decimals: (decimal.InvalidOperation, {"repr": repr}),
    of_a_full_pipe: (BlockingIOError, {"written": lambda e: e.characters_written}),
    of_a_name_to_import: (ImportError, {"name": lambda e: e.name_from if sys.version_info >= (3, 12) else e.name}),
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


def test_an_error_that_was_not_kept_whole_may_be_the_context_of_another(store: perdure.Store) -> None:
    """To record the second one, the body of the first one's request is not read: it was not recorded."""
    once = Once()

    @perdure.step(name="charge")
    def charge() -> None:
        request = httpx.Request("POST", "http://shop/", headers={"authorization": "secret"}, json={"cents": 100})
        httpx.Response(503, request=request, content=b"x" * 70_000).raise_for_status()

    @perdure.step(name="charge_again")
    def charge_again() -> None:
        raise ConnectionError("no route")

    @perdure.durable(name="agent")
    def agent() -> Any:
        try:
            charge()
        except httpx.HTTPStatusError:
            once.interrupt()
            try:
                charge_again()
            except ConnectionError as error:
                return type(error.__context__).__name__
        return None

    with pytest.raises(Interrupt):
        store.run(agent, id="context")
    run = store.run(agent, id="context")
    assert run.result() == "HTTPStatusError"
    described: Any = run.steps()[1]
    assert "no route" in str(described.error)
