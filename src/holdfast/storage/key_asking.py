"""Asking a provider for keys: on a thread of its own, once for all who wait for the same tenant, and not for ever.

A provider may be a key service behind a network. So it is never asked while a transaction is open, it never holds up an
event loop, and whoever waits for it gets an error after a while. Keys that are at hand (`StaticKeys`, `KeyFile`) are
asked for on the caller's thread.

Must never happen here: a key, or the text of a provider's own error, in an error of ours.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from inspect import isawaitable
from typing import Any

from holdfast.errors import HoldfastError, Unavailable, UsageError
from holdfast.storage.keyring import KeyFile, KeyProvider, Keys, StaticKeys

REFRESH_S = 60.0  # unless the provider says so: after so long it is asked again
TIMEOUT_S = 30.0  # so long it may take


class Asker:
    """A provider, and who is being asked for just now."""

    def __init__(self, provider: KeyProvider, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.provider = provider
        self.refresh_s = _seconds(provider, "refresh_s", REFRESH_S)
        self.timeout_s = _seconds(provider, "timeout_s", TIMEOUT_S)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asking: dict[str, tuple[Future[Keys], float]] = {}
        # Not those that are made of them: they may do anything.
        self._at_hand = type(provider) in (StaticKeys, KeyFile)

    @property
    def is_at_hand(self) -> bool:
        """The keys are in memory, or in a file."""
        return self._at_hand

    def ask(self, tenant: str) -> tuple[Keys, float]:
        """A tenant's keys, and when they were asked for at the earliest. Raises KeyMissing, Unavailable, UsageError."""
        if self._at_hand:
            at = self._monotonic()
            keys = self.provider.keys_for(tenant)
            assert isinstance(keys, Keys)
            return keys, at
        answer, at = self.begin(tenant)
        try:
            return answer.result(self.timeout_s), at
        except FutureTimeout:
            if answer.done():  # it came at the last moment, or is an error of the provider's own
                return answer.result(), at
            raise self._late(tenant) from None

    async def aask(self, tenant: str) -> tuple[Keys, float]:
        """`ask`, without blocking the event loop."""
        if isinstance(self.provider, StaticKeys) and self._at_hand:
            return self.ask(tenant)
        if self._at_hand:
            return await asyncio.to_thread(self.ask, tenant)
        answer, at = self.begin(tenant)
        waiting = asyncio.wrap_future(answer)
        try:
            done, _ = await asyncio.wait([waiting], timeout=self.timeout_s)
            if not done:
                raise self._late(tenant)
            return waiting.result(), at
        finally:
            waiting.cancel()  # only the waiting

    def begin(self, tenant: str) -> tuple[Future[Keys], float]:
        """Ask, if nobody is asking. The answer that will come, and when it was asked for."""
        with self._lock:
            found = self._asking.get(tenant)
            if found is not None:
                return found
            answer: Future[Keys] = Future()
            answer.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it
            found = self._asking[tenant] = answer, self._monotonic()
        try:
            threading.Thread(target=self._ask, args=(tenant, answer), name="holdfast-keys", daemon=True).start()
        except RuntimeError:  # the interpreter is ending: no thread can be started any more
            self._ask(tenant, answer)
        return found

    def wait(self) -> None:
        """Until nobody is being asked for."""
        with self._lock:
            asking = [answer for answer, _ in self._asking.values()]
        wait(asking)

    def _ask(self, tenant: str, answer: Future[Keys]) -> None:
        keys: Keys | None = None
        problem: BaseException | None = None
        try:
            given: Any = self.provider.keys_for(tenant)
            if isawaitable(given):
                given = asyncio.run(_awaited(given))
            if isinstance(given, Keys):
                keys = given
            else:  # not raised here: what was given may be a key
                problem = self._wrong(type(given).__name__)
        except HoldfastError as error:
            problem = error
        except BaseException as error:
            problem = Unavailable(
                f"the keys of tenant {tenant!r} could not be got: {self._name} raised {type(error).__name__}. Nothing "
                "was read or written; try again"
            )
            problem.__cause__ = error
        with self._lock:  # before it is told: who asks from now on gets a new answer
            del self._asking[tenant]
        if keys is not None:
            answer.set_result(keys)
        else:
            assert problem is not None
            answer.set_exception(problem)

    def _wrong(self, kind: str) -> UsageError:
        return UsageError(f"{self._name} gave a {kind}: give hf.Keys(key), hf.Keys(key, older)")

    @property
    def _name(self) -> str:
        return f"{type(self.provider).__name__}.keys_for"

    def _late(self, tenant: str) -> Unavailable:
        return Unavailable(
            f"the keys of tenant {tenant!r} could not be got: {self._name} has not answered within its timeout_s, "
            f"{self.timeout_s:g} s. Nothing was read or written; try again"
        )


async def _awaited(given: Any) -> Any:
    return await given


def _seconds(provider: object, name: str, default: float) -> float:
    value = getattr(provider, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise UsageError(f"{type(provider).__name__}.{name} is a number of seconds above 0, not {value!r}")
    return float(value)
