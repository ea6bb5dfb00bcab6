"""Generators as bodies; and when a failed body is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from perdure.errors import UsageError
from perdure.runs.calls.bodies import acollected, collected
from perdure.runs.functions.retry import Retry


# Generators
async def nothing() -> None: ...


def count(until: int, result: Any = None) -> Generator[int, None, Any]:
    yield from range(until)
    return result


def test_what_a_generator_gives_is_its_result_or_its_chunks() -> None:
    assert collected(count)(3) == [0, 1, 2]
    assert collected(count)(0) == []
    assert collected(count)(3, "sum") == "sum"
    assert collected(count)(3, 0) == 0


async def test_the_chunks_of_an_async_generator_are_its_result() -> None:
    async def body() -> AsyncGenerator[int, None]:
        for number in range(3):
            yield number

    assert await acollected(body)() == [0, 1, 2]


# Trying again
def test_the_delay_doubles_up_to_a_minute() -> None:
    rule = Retry(retries=9, backoff_s=10)
    assert [rule.delay_s(attempt, 1) for attempt in (1, 2, 3, 4, 10**9)] == [10, 20, 40, 60, 60]
    assert Retry(backoff_s=0).delay_s(10**9, 0.5) == 0
    assert Retry(backoff_s=3600).delay_s(2, 1) == 3600


def test_chance_makes_it_wait_between_half_and_all_of_the_time() -> None:
    assert [Retry(backoff_s=4).delay_s(1, chance) for chance in (0, 0.5, 1)] == [2, 3, 4]


def test_so_many_retries_follow_the_first_attempt() -> None:
    assert [Retry(retries=2).wants(ValueError(), attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not Retry().wants(ValueError(), 1)


def test_only_the_errors_that_were_named_are_retried() -> None:
    rule = Retry(retries=1, retry_on=(OSError, KeyError))
    assert [rule.wants(error, 1) for error in (OSError(), KeyError(), ValueError())] == [True, True, False]
    busy = Retry(retries=1, retry_on=lambda error: "busy" in str(error))
    assert [busy.wants(ValueError(text), 1) for text in ("busy", "no")] == [True, False]


def test_a_class_alone_is_meant_as_a_class() -> None:
    rule = Retry(retries=1, retry_on=KeyError)  # type: ignore[arg-type]
    assert rule == Retry(retries=1, retry_on=(KeyError,))
    assert not rule.wants(ValueError(), 1)


def test_interrupts_and_cancellations_are_never_retried() -> None:
    rule = Retry(retries=1, retry_on=lambda error: True)
    assert not any(rule.wants(error, 1) for error in (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, "retries=-1 must be a whole number"),
        ({"retries": True}, "retries=True must be a whole number"),
        ({"retries": 1.5}, "retries=1.5 must be a whole number"),
        ({"backoff_s": -1}, "backoff_s=-1 must be a number of seconds"),
        ({"backoff_s": float("nan")}, "backoff_s=nan must be a number of seconds"),
        ({"backoff_s": "1"}, "backoff_s='1' must be a number of seconds"),
        (
            {"retry_on": (KeyboardInterrupt,)},
            "retry_on names <class 'KeyboardInterrupt'>, which is no kind of Exception",
        ),
        ({"retry_on": ("OSError",)}, "retry_on names 'OSError', which is no kind of Exception"),
        ({"retry_on": "OSError"}, "retry_on='OSError' must be exception classes or a function"),
        ({"retry_on": None}, "retry_on=None must be exception classes or a function"),
        ({"retry_on": nothing}, "is async; give a plain function"),
    ],
)
def test_values_that_cannot_be_right_are_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Retry(**options)
    assert message in str(caught.value)
