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
def test_the_delay_doubles_up_to_its_maximum() -> None:
    rule = Retry(retries=9, backoff_s=1, backoff_max_s=10, jitter=False)
    assert [rule.delay_s(attempt, 0.5) for attempt in (1, 2, 3, 4, 5, 10**9)] == [1, 2, 4, 8, 10, 10]
    assert Retry(backoff_s=0).delay_s(10**9, 0.5) == 0


def test_jitter_waits_between_half_and_all_of_the_time() -> None:
    assert [Retry(backoff_s=4).delay_s(1, chance) for chance in (0, 0.5, 1)] == [2, 3, 4]
    assert Retry(backoff_s=4, jitter=False).delay_s(1, 0) == 4


def test_so_many_retries_follow_the_first_attempt() -> None:
    assert [Retry(retries=2).wants(ValueError(), attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not Retry().wants(ValueError(), 1)


def test_only_the_errors_that_were_named_are_retried() -> None:
    rule = Retry(retries=1, retry_on=(OSError, KeyError), give_up_on=(FileNotFoundError,))
    assert [rule.wants(error, 1) for error in (OSError(), KeyError(), FileNotFoundError(), ValueError())] == [
        True,
        True,
        False,
        False,
    ]
    busy = Retry(retries=1, retry_on=lambda error: "busy" in str(error), give_up_on=lambda error: "very" in str(error))
    assert [busy.wants(ValueError(text), 1) for text in ("busy", "very busy", "no")] == [True, False, False]


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
        ({"backoff_max_s": float("inf")}, "backoff_max_s=inf must be a number of seconds"),
        ({"backoff_max_s": "1"}, "backoff_max_s='1' must be a number of seconds"),
        ({"backoff_s": 120}, "backoff_s=120 is above backoff_max_s=60; raise backoff_max_s too"),
        (
            {"retry_on": (KeyboardInterrupt,)},
            "retry_on names <class 'KeyboardInterrupt'>, which is no kind of Exception",
        ),
        ({"retry_on": ("OSError",)}, "retry_on names 'OSError', which is no kind of Exception"),
        ({"retry_on": "OSError"}, "retry_on='OSError' must be exception classes or a function"),
        ({"give_up_on": None}, "give_up_on=None must be exception classes or a function"),
        ({"retry_on": nothing}, "is async; give a plain function"),
    ],
)
def test_values_that_cannot_be_right_are_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Retry(**options)
    assert message in str(caught.value)
