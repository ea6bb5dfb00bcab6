"""The keys that a process has, tenant by tenant: since when, until when, and what the store knows of them.

A key is used only while its provider stands by it. It is asked again every `refresh_s` for the tenants that are in use,
beside the work; if it says that there is no key, the key and all that is in memory because of it are dropped at once.
If it does not answer, what is known is used for twice `refresh_s`, and no longer. The keys of a tenant that nobody uses
are dropped without a question.

Nothing here asks: a program that needs keys which are not here is stopped (`KeysWanted`), and the driver asks when its
transaction has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import NamedTuple, Protocol
from weakref import WeakSet

from perdure.errors import Damaged, KeyMissing, NotEncrypted, PerdureError
from perdure.storage.events import event, said
from perdure.storage.key_asking import ASKERS_MAX, Asker
from perdure.storage.keyring import KeyFile, KeyProvider, Keys
from perdure.storage.locks import Locks, locks_of
from perdure.storage.program import Rows

BARRED_S = 30.0  # for so long a worker passes over a tenant that it has no key for
FRESH_S = 1.0  # for so long what the store knows of a tenant's keys is relied on
_PROBLEM_S = 1.0  # for so long a provider that gave no key is not asked again
_log = logging.getLogger("perdure")


class KeysWanted(Exception):
    """A program needs keys that are not here, or newer ones: for what the store says that it is encrypted with."""

    def __init__(self, tenant: int, name: str, needed: frozenset[bytes], at: float) -> None:
        super().__init__(f"keys of tenant {name!r}")
        self.tenant, self.name, self.needed, self.at = tenant, name, needed, at
        self.others: tuple[KeysWanted, ...] = ()  # of other tenants, which the same batch needs

    @property
    def each(self) -> tuple[KeysWanted, ...]:
        return self, *self.others


class Forgets(Protocol):
    """What keeps something readable of a tenant in memory."""

    def forget_tenant(self, tenant: int) -> None:
        """Its keys are gone: drop what is there, and keep nothing of it until `know_tenant`."""

    def know_tenant(self, tenant: int) -> None:
        """Its keys are there (again)."""


class _Held(NamedTuple):
    """What the provider gave for a tenant, when, and which keys it was asked about: of those, it has no others."""

    name: str
    keys: Keys
    at: float
    asked_about: frozenset[bytes]


class Vault:
    """The keys of a store: where they come from, and what is known of each tenant's."""

    def __init__(
        self,
        provider: KeyProvider,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.provider = provider
        self.clock_us = clock_us
        self._monotonic = monotonic
        self.asker = Asker(provider, lambda: self._monotonic())
        self._held: dict[int, _Held] = {}
        self._locks: dict[int, Locks] = {}
        self._problems: dict[int, tuple[PerdureError, float]] = {}
        self._barred: dict[int, float] = {}
        self._listeners: WeakSet[Forgets] = WeakSet()
        self._listening = Lock()
        self._tend_at = 0.0
        self._confirmed_at = float("-inf")  # of a key file: it was as it had been read …
        self._stamp: object = None
        self._stamped_at = float("-inf")  # … since this time; what was read before may be older

    # --- what is in use

    def known(self, tenant: int) -> Locks | None:
        """A tenant's keys, if the store was looked at a moment ago."""
        locks = self._locks.get(tenant)
        if locks is None or self._monotonic() - locks.checked_at >= FRESH_S:
            return None
        locks.used = True
        return locks

    def settled(self, tenant: int, name: str, rows: Rows, used: bool, *, again: bool = False) -> Locks:
        """A tenant's keys, from what the store knows of them. Raises KeysWanted, KeyMissing, NotEncrypted."""
        since = {bytes(key): int(at) for key, _, at in rows}
        held, now = self._held.get(tenant), self._monotonic()
        if held is None or self._is_over(held, now):
            raise self.wanted(tenant, name, since)
        before = self._locks.get(tenant)
        if before is not None and before.rows == since and before.keys is held.keys and not again:
            before.checked_at, before.used = now, True
            return before
        keys = held.keys
        if not since:
            if used:
                raise NotEncrypted(
                    f"tenant {name!r} holds data that is not encrypted, and the store was opened with keys: "
                    "encrypt it with `perdure keys encrypt` (or store.ops.encrypt()), or open it without keys"
                )
            first = locks_of(tenant, name, keys, keys.current, None, {}, now)
            assert first is not None
            return first
        newest = next(reversed(since))
        if newest not in keys.by_id and newest not in held.asked_about:
            raise self.wanted(tenant, name, since)
        proofs = [(bytes(key), bytes(proof)) for key, proof, _ in reversed(rows) if bytes(key) in keys.by_id]
        if not proofs:
            raise KeyMissing(
                f"the data of tenant {name!r} is encrypted with key {newest.hex()}, and the keys that were given are "
                f"others ({', '.join(key.hex() for key in keys.by_id)}): open the store with the right key file",
                tenant=name,
                key=newest.hex(),
            )
        # A key that the store has not seen is new. Of those it has seen, only the newest may be written with: whoever
        # still has an older one as its current has not heard of the rotation.
        current = keys.current if keys.current not in since else newest
        locks = locks_of(tenant, name, keys, current, proofs[0], since, now)
        if locks is None:
            raise Damaged(f"what the store keeps about key {proofs[0][0].hex()} of tenant {name!r} is damaged")
        if current not in keys.by_id:
            raise locks.unknown(current)
        return locks

    def remember(self, tenant: int, locks: Locks) -> None:
        """Only what is committed: what a transaction has just added may be rolled back."""
        held = self._held.get(tenant)
        if held is not None and held.keys is locks.keys:  # else they were dropped, or changed, meanwhile
            self._locks[tenant] = locks

    def wanted(self, tenant: int, name: str, needed: dict[bytes, int]) -> Exception:
        """What stops a program that needs a key which is not here. Soon after an ask that failed: its error."""
        problem, now = self._problems.get(tenant), self._monotonic()
        if problem is not None and now - problem[1] < _PROBLEM_S:
            return problem[0].with_traceback(None)
        return KeysWanted(tenant, name, frozenset(needed), now)

    def was_asked_about(self, tenant: int, key: bytes) -> bool:
        """Whether the provider was asked since the store first named this key: then it does not have it."""
        held = self._held.get(tenant)
        return held is not None and key in held.asked_about

    # --- asking

    def answer(self, wanted: KeysWanted) -> None:
        """Ask for what a program wants. A failure is told to the program, when it is run again."""
        if wanted.others and not self.asker.is_at_hand:
            self._answer_all(wanted)
            return
        for one in wanted.each:
            try:
                self.took(one, *self.asker.ask(one.name))
            except PerdureError as error:
                self._failed(one.tenant, error)

    def _answer_all(self, wanted: KeysWanted) -> None:
        until = time.monotonic() + self._patience_s(wanted)
        begun = [self.asker.begin(one.name, at_once=self.asker.is_asker) for one in wanted.each]
        for one, each in zip(wanted.each, begun, strict=True):
            try:
                self.took(one, *self.asker.wait_for(one.name, each, max(0.0, until - time.monotonic())))
            except PerdureError as error:
                self._failed(one.tenant, error)

    async def aanswer(self, wanted: KeysWanted) -> None:
        """`answer`, without blocking the event loop."""
        from asyncio import gather

        patience_s = self._patience_s(wanted)
        await gather(*[self._aanswer(one, patience_s) for one in wanted.each])

    async def _aanswer(self, wanted: KeysWanted, timeout_s: float) -> None:
        try:
            self.took(wanted, *(await self.asker.aask(wanted.name, timeout_s)))
        except PerdureError as error:
            self._failed(wanted.tenant, error)

    def _patience_s(self, wanted: KeysWanted) -> float:
        """How long to wait for all of them: each may take its time, so many at once."""
        return self.asker.timeout_s * -(-len(wanted.each) // ASKERS_MAX)

    def keep_problems(self, tenants: Iterable[int]) -> None:
        """An operation that has asked for these in vain is run again: it must not ask once more for each of them."""
        now = self._monotonic()
        for tenant in tenants:
            if (problem := self._problems.get(tenant)) is not None:
                self._problems[tenant] = problem[0], now

    def took(self, wanted: KeysWanted, keys: Keys, at: float) -> None:
        """What the provider gave, which was asked at this time: perhaps by somebody else, before it was wanted."""
        tenant, before = wanted.tenant, self._held.get(wanted.tenant)
        about = wanted.needed if at >= wanted.at else frozenset()
        if before is not None:
            if at < before.at:
                return  # somebody has asked since
            about |= before.asked_about
            if before.keys == keys:
                keys = before.keys  # what was made of them stays in use
            elif before.keys.by_id.keys() - keys.by_id.keys():
                self._drop(tenant)  # one of them was forgotten
        self._held[tenant] = _Held(wanted.name, keys, at, about)
        self._problems.pop(tenant, None)
        for listener in self._all_listeners():
            listener.know_tenant(tenant)

    def _failed(self, tenant: int, error: PerdureError) -> None:
        self._problems[tenant] = error, self._monotonic()
        if isinstance(error, KeyMissing):
            self._drop(tenant)

    def _drop(self, tenant: int) -> None:
        """A tenant's keys, and what is in memory because of them."""
        self._held.pop(tenant, None)
        self._locks.pop(tenant, None)
        for listener in self._all_listeners():
            listener.forget_tenant(tenant)

    def _all_listeners(self) -> list[Forgets]:
        with self._listening:
            return list(self._listeners)

    # --- asking again

    def is_due(self) -> bool:
        """Whether it is time to look after the keys (`tend`). Whoever is told so must: nobody else is for a while."""
        now = self._monotonic()
        if now < self._tend_at:
            return False
        self._tend_at = now + self.asker.refresh_s
        return True

    def tend(self) -> None:
        """See whether the provider still stands by the keys that are here. Asks only a file on this thread."""
        now = self._monotonic()
        for tenant, problem in list(self._problems.items()):  # others add to it meanwhile
            if now - problem[1] >= _PROBLEM_S:
                self._problems.pop(tenant, None)
        if isinstance(self.provider, KeyFile) and self.asker.is_at_hand:
            stamp = self.provider._stamp()
            if stamp is not None and stamp == self._stamp:
                self._confirmed_at = now
                return
            self._stamp, self._stamped_at = stamp, now
        for tenant, held in list(self._held.items()):
            if self.asker.is_at_hand or self._is_used(tenant, held, now):
                self._ask_again(tenant, held)
            else:
                self._drop(tenant)

    def _is_used(self, tenant: int, held: _Held, now: float) -> bool:
        locks = self._locks.get(tenant)
        if locks is not None and locks.used:
            locks.used = False
            return True
        return now - held.at < self.asker.refresh_s / 2

    def _ask_again(self, tenant: int, held: _Held) -> None:
        wanted = KeysWanted(tenant, held.name, frozenset(), self._monotonic())
        if self.asker.is_at_hand:
            answer: Future[Keys] = Future()
            try:
                answer.set_result(self.asker.ask(held.name)[0])
            except PerdureError as error:
                self._stamp = None  # so that it is read again, changed or not
                answer.set_exception(error)
            self._heard(wanted, wanted.at, answer)
            return
        answer, at = self.asker.begin(held.name)
        answer.add_done_callback(partial(self._heard, wanted, at))

    def _heard(self, wanted: KeysWanted, at: float, answer: Future[Keys]) -> None:
        error, held = answer.exception(), self._held.get(wanted.tenant)
        if error is None:
            self.took(wanted, answer.result(), at)
        elif held is not None and at < held.at:
            return  # somebody has asked since
        elif isinstance(error, KeyMissing):
            self._failed(wanted.tenant, error)
        else:
            _log.warning(
                "the keys of tenant %s could not be asked for again: %s. Those at hand are used for %.4g s at most",
                wanted.name,
                said(error),
                2 * self.asker.refresh_s,
                extra=event("keys.not_refreshed", tenant=wanted.name, error=type(error).__name__),
            )

    def _is_over(self, held: _Held, now: float) -> bool:
        since = max(held.at, self._confirmed_at) if held.at >= self._stamped_at else held.at
        return now - since >= 2 * self.asker.refresh_s

    # --- who else must know

    def listen(self, listener: Forgets) -> None:
        """Something that keeps readable data in memory: told when a tenant's keys are dropped."""
        with self._listening:
            self._listeners.add(listener)

    def bar(self, tenant: int) -> None:
        """A tenant has no key here: nothing of it need be tried for a while."""
        self._barred[tenant] = self._monotonic() + BARRED_S

    def barred(self) -> tuple[int, ...]:
        """Tenants that had no key a moment ago."""
        now = self._monotonic()
        return tuple([tenant for tenant, until in tuple(self._barred.items()) if until > now])

    def forget(self) -> None:
        """Ask the provider and the store again."""
        self._locks.clear()
        self._held.clear()
        self._problems.clear()
