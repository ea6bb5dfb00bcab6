"""Asking a provider for keys: on a thread of its own, once for all who wait for the same tenant, and not for ever.

A provider may be a key service behind a network. So it is never asked while a transaction is open, it never holds up an
event loop, and whoever waits for it gets an error after a while. An ask that has not been answered by then counts for
nothing any more: the next one begins anew. Keys that are at hand (`StaticKeys`, `KeyFile`) are asked for on the
caller's thread.

Must never happen here: a key, or the text of a provider's own error, in an error of ours.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from inspect import isawaitable
from typing import Any

from perdure.errors import PerdureError, Unavailable, UsageError
from perdure.storage.keyring import KeyFile, KeyProvider, Keys, StaticKeys

REFRESH_S = 60.0  # unless the provider says so: after so long it is asked again
TIMEOUT_S = 30.0  # so long it may take
ASKERS_MAX = 16  # so many tenants are asked for at once; the others wait
_HUNG_MAX = 64  # askers in all, with those that wait for an answer which is overdue


class _Ask:
    """A tenant that is asked for: since when, and since when the provider has been at it."""

    __slots__ = ("answer", "at", "begun_at", "tenant")

    def __init__(self, tenant: str, at: float) -> None:
        self.tenant, self.at = tenant, at
        self.begun_at: float | None = None
        self.answer: Future[Keys] = Future()
        self.answer.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it


class Asker:
    """A provider, and who is being asked for just now."""

    def __init__(self, provider: KeyProvider, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.provider = provider
        self.refresh_s = _seconds(provider, "refresh_s", REFRESH_S)
        self.timeout_s = _seconds(provider, "timeout_s", TIMEOUT_S)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asking: dict[str, _Ask] = {}
        self._queue: deque[_Ask] = deque()
        self._askers: dict[object, float] = {}  # since when each has been at what it asks
        self._here = threading.local()  # whether this thread is one of them
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
        return self.wait_for(tenant, self.begin(tenant, at_once=self.is_asker))

    def wait_for(
        self, tenant: str, begun: tuple[Future[Keys], float], timeout_s: float | None = None
    ) -> tuple[Keys, float]:
        """What an ask gives that has begun. Raises what `ask` does."""
        answer, at = begun
        try:
            return answer.result(self.timeout_s if timeout_s is None else timeout_s), at
        except FutureTimeout:
            if answer.done():  # it came at the last moment, or is an error of the provider's own
                return answer.result(), at
            raise self._late(tenant) from None

    async def aask(self, tenant: str, timeout_s: float | None = None) -> tuple[Keys, float]:
        """`ask`, without blocking the event loop."""
        if isinstance(self.provider, StaticKeys) and self._at_hand:
            return self.ask(tenant)
        if self._at_hand:
            return await asyncio.to_thread(self.ask, tenant)
        answer, at = self.begin(tenant, at_once=self.is_asker)
        waiting = asyncio.wrap_future(answer)
        try:
            done, _ = await asyncio.wait([waiting], timeout=self.timeout_s if timeout_s is None else timeout_s)
            if not done:
                raise self._late(tenant)
            return waiting.result(), at
        finally:
            waiting.cancel()  # only the waiting

    def begin(self, tenant: str, *, at_once: bool = False) -> tuple[Future[Keys], float]:
        """Ask, if nobody is asking, or has been for too long. The answer that will come, and when it was asked for.
        `at_once`: however many others are being asked for."""
        me = object()
        with self._lock:
            now = self._monotonic()
            found = self._asking.get(tenant)
            if found is None or (found.begun_at is not None and now - found.begun_at >= self.timeout_s):
                found = self._asking[tenant] = _Ask(tenant, now)
                self._queue.append(found)
            if at_once and found in self._queue:
                self._queue.remove(found)
                first: _Ask | None = self._taken(me, found, now)
            else:
                first = self._next(me, now)
        if first is not None:
            try:
                threading.Thread(target=self._work, args=(me, first), name="perdure-keys", daemon=True).start()
            except RuntimeError as error:
                if sys.is_finalizing() or "shutdown" in str(error):  # no thread can be started any more
                    self._work(me, first)
                else:
                    self._fail(me, first, error)
        return found.answer, found.at

    def wait(self) -> None:
        """Until nobody is being asked for."""
        with self._lock:
            asking = [ask.answer for ask in self._asking.values()]
        wait(asking)

    # --- askers: threads that end when nobody is left to be asked for

    @property
    def is_asker(self) -> bool:
        """This thread asks: the provider needs keys itself, of a store that it gives keys for. Those must not wait."""
        return bool(getattr(self._here, "is_asker", False))

    def _next(self, me: object, now: float) -> _Ask | None:
        """With the lock: what an asker is to ask next. None: nothing, or there are enough others."""
        self._askers.pop(me, None)
        if not self._queue or len(self._askers) >= _HUNG_MAX:
            return None
        if sum(now - since < self.timeout_s for since in self._askers.values()) >= ASKERS_MAX:
            return None
        return self._taken(me, self._queue.popleft(), now)

    def _taken(self, me: object, ask: _Ask, now: float) -> _Ask:
        self._askers[me] = ask.begun_at = now
        return ask

    def _work(self, me: object, first: _Ask) -> None:
        before, self._here.is_asker = self.is_asker, True
        ask: _Ask | None = first
        while ask is not None:
            self._ask(ask)
            with self._lock:
                ask = self._next(me, self._monotonic())
        self._here.is_asker = before

    def _ask(self, ask: _Ask) -> None:
        tenant = ask.tenant
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
        except PerdureError as error:
            problem = error
        except BaseException as error:
            problem = Unavailable(
                f"the keys of tenant {tenant!r} could not be got: {self._name} raised {type(error).__name__}. Nothing "
                "was read or written; try again"
            )
            problem.__cause__ = error
        if not self._ends(ask):  # else a newer ask may have been answered already
            keys, problem = None, self._late(tenant)
        if keys is not None:
            ask.answer.set_result(keys)
        else:
            assert problem is not None
            ask.answer.set_exception(problem)

    def _ends(self, ask: _Ask) -> bool:
        """Before an answer is told: who asks from now on gets a new one. False: another ask has replaced this one."""
        with self._lock:
            if self._asking.get(ask.tenant) is not ask:
                return False
            del self._asking[ask.tenant]
            return True

    def _fail(self, me: object, first: _Ask, error: RuntimeError) -> None:
        """There is no thread to ask on. Those that others will get to can wait."""
        failed = [first]
        with self._lock:
            self._askers.pop(me, None)
            if not self._askers:
                failed += self._queue
                self._queue.clear()
        for ask in failed:
            self._ends(ask)
            problem = Unavailable(
                f"the keys of tenant {ask.tenant!r} could not be asked for: no thread could be started for it. Nothing "
                "was read or written; try again"
            )
            problem.__cause__ = error
            ask.answer.set_exception(problem)

    def _wrong(self, kind: str) -> UsageError:
        return UsageError(f"{self._name} gave a {kind}: give perdure.Keys(key), perdure.Keys(key, older)")

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
