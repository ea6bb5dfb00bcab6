"""The key cache: the provider's answers and the ciphers made from them, tenant by tenant.

The provider is asked at the next use after `refresh_s`. If it has no key, the cipher and all readable data of the
tenant are dropped. If it fails, the last keys are used for up to twice `refresh_s`. No transaction waits for a
provider: a program that lacks keys raises `KeysWanted`, and the driver asks after the rollback.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from threading import Lock
from typing import NamedTuple, Protocol
from weakref import WeakSet

from perdure.encryption.cipher import Cipher, unwrap_data_key
from perdure.encryption.keys import KeyFile, KeyProvider, Keys, StaticKeys
from perdure.errors import Damaged, KeyMissing, PerdureError, Unavailable, UsageError
from perdure.storage.events import event

BARRED_S = 30.0  # how long a worker skips a tenant without a key
_PROBLEM_S = 1.0  # how long a provider that had no key is not asked again
_REFRESH_S = 60.0
_log = logging.getLogger("perdure")


class KeysWanted(Exception):
    """A program needs the keys of a tenant, or newer ones than those in the cache."""

    def __init__(self, name: str) -> None:
        super().__init__(f"keys of tenant {name!r}")
        self.name = name


class Forgets(Protocol):
    """A cache that keeps readable data of tenants in memory."""

    def forget_tenant(self, tenant: int) -> None:
        """Drop the data of a tenant whose key is gone, and keep none until `know_tenant`."""

    def know_tenant(self, tenant: int) -> None:
        """Keep data of a tenant again: its key is there."""


class _Answer(NamedTuple):
    """The provider's last answer: keys or an error, when it was asked, and when it last had keys."""

    keys: Keys | None
    error: PerdureError | None
    asked_at: float
    good_at: float


class KeyCache:
    """The key provider of a store, and the ciphers of the tenants in use. Any thread may use it."""

    def __init__(
        self,
        provider: KeyProvider,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.provider = provider
        self.refresh_s = _refresh_s(provider)
        self.clock_us = clock_us
        self._monotonic = monotonic
        self._is_local = isinstance(provider, KeyFile | StaticKeys)  # answers at once
        self._lock = Lock()
        self._answers: dict[str, _Answer] = {}
        self._ciphers: dict[int, tuple[Cipher, float]] = {}  # until when each may be used
        self._names: dict[int, str] = {}  # the tenants whose data may be readable in memory
        self._barred: dict[int, float] = {}
        self._listeners: WeakSet[Forgets] = WeakSet()

    # --- ciphers

    def cipher(self, tenant: int) -> Cipher | None:
        """Return the cipher of a tenant; None if it is unknown, or its keys must be asked for again."""
        cipher, until = self._ciphers.get(tenant, (None, 0.0))
        return cipher if self._monotonic() < until else None

    def keys(self, name: str, asked: Collection[str]) -> Keys:
        """Return the provider's last answer. Raises KeysWanted if it must be asked, or the provider's error.

        asked: the tenants for which the running operation has already asked.
        """
        answer = self._answers.get(name)
        if answer is None:
            raise KeysWanted(name)
        age_s = self._monotonic() - answer.asked_at
        if name not in asked and age_s >= (self.refresh_s if answer.error is None else _PROBLEM_S):
            raise KeysWanted(name)
        if answer.keys is None:
            assert answer.error is not None
            raise answer.error.with_traceback(None)
        return answer.keys

    def unwrapped(
        self, tenant: int, name: str, keys: Keys, key: bytes, wrapped: bytes, asked: Collection[str]
    ) -> Cipher:
        """Return the cipher of a tenant, made of its stored data key. Raises KeysWanted, KeyMissing, Damaged."""
        if key not in keys.by_id:
            if name not in asked:
                raise KeysWanted(name)  # another process may have changed the key since
            self._drop(name)
            raise KeyMissing(
                f"the data of tenant {name!r} is encrypted with key {key.hex()}, and the keys that were given are "
                f"others ({', '.join(one.hex() for one in keys.by_id)}): open the store with the right keys, or "
                "restore the key file from its backup",
                tenant=name,
                key=key.hex(),
            )
        cipher = _cipher_of(tenant, name, keys, key, wrapped)
        if cipher is None:
            raise Damaged(f"the stored data key of tenant {name!r} is damaged: restore the store from a backup")
        if tenant not in self._names:
            self._names[tenant] = name
            for listener in self._all_listeners():
                listener.know_tenant(tenant)
        return cipher

    def remember(self, tenant: int, cipher: Cipher) -> None:
        """Keep a cipher whose data key is committed."""
        answer = self._answers.get(cipher.name)
        if answer is None or answer.keys is None:
            return  # dropped meanwhile
        until = min(answer.asked_at + self.refresh_s, answer.good_at + 2 * self.refresh_s)
        self._ciphers[tenant] = (cipher, until)

    def forget(self) -> None:
        """Drop all ciphers and answers: the provider is asked and the store read again."""
        self._answers.clear()
        self._ciphers.clear()

    # --- asking

    async def aask(self, name: str) -> None:
        if self._is_local:
            self.ask(name)
            return
        from asyncio import to_thread

        await to_thread(self.ask, name)

    def ask(self, name: str) -> None:
        """Ask the provider for a tenant's keys, blocking, and keep the answer or the error."""
        at = self._monotonic()
        try:
            keys = _asked(self.provider, name)
        except PerdureError as error:
            self._failed(name, error, at)
        except Exception as error:  # its text may hold anything
            unavailable = Unavailable(
                f"the keys of tenant {name!r} could not be asked for ({type(error).__name__}) by "
                f"{type(self.provider).__name__}: nothing was read or written; try again"
            )
            unavailable.__cause__ = error
            self._failed(name, unavailable, at)
        else:
            before = self._answers.get(name)
            if before is not None and at < before.asked_at:
                return  # an older question that was answered late
            if before is not None and before.keys is not None and before.keys.by_id.keys() - keys.by_id.keys():
                self._drop(name)  # a key was removed: what it opened goes
            self._answers[name] = _Answer(keys, None, at, at)

    def _failed(self, name: str, error: PerdureError, at: float) -> None:
        before = self._answers.get(name)
        if before is not None and at < before.asked_at:
            return
        if isinstance(error, KeyMissing):
            self._drop(name)
        elif before is not None and before.keys is not None and at - before.good_at < 2 * self.refresh_s:
            _log.warning(
                "the keys of tenant %s could not be refreshed: %s. The last ones are used for %.4g s at most",
                name,
                type(error).__name__,
                2 * self.refresh_s,
                extra=event("keys.not_refreshed", tenant=name, error=type(error).__name__),
            )
            self._answers[name] = _Answer(before.keys, None, at, before.good_at)
            return
        self._answers[name] = _Answer(None, error, at, float("-inf"))

    def _drop(self, name: str) -> None:
        for tenant, known in list(self._names.items()):
            if known == name:
                self._names.pop(tenant, None)
                self._ciphers.pop(tenant, None)
                for listener in self._all_listeners():
                    listener.forget_tenant(tenant)

    # --- who else must know

    def listen(self, listener: Forgets) -> None:
        """Call a cache of readable data whenever a tenant's key is gone or back."""
        with self._lock:
            self._listeners.add(listener)

    def _all_listeners(self) -> list[Forgets]:
        with self._lock:
            return list(self._listeners)

    def bar(self, tenant: int) -> None:
        """Let workers skip a tenant without a key for a while."""
        self._barred[tenant] = self._monotonic() + BARRED_S

    def barred(self) -> tuple[int, ...]:
        """Return the tenants that workers skip, because they recently had no key."""
        now = self._monotonic()
        return tuple([tenant for tenant, until in tuple(self._barred.items()) if until > now])


def _refresh_s(provider: KeyProvider) -> float:
    value = getattr(provider, "refresh_s", _REFRESH_S)
    if not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{type(provider).__name__}.refresh_s must be a number of seconds above 0, not {value!r}")
    return float(value)


def _asked(provider: KeyProvider, name: str) -> Keys:
    answer: object = provider.keys_for(name)
    if not isinstance(answer, Keys):
        kind = type(answer).__name__
        del answer  # it may be a key
        raise UsageError(f"{type(provider).__name__}.keys_for must give perdure.encryption.Keys, not a {kind}")
    return answer


def _cipher_of(tenant: int, name: str, keys: Keys, key: bytes, wrapped: bytes) -> Cipher | None:
    # A separate function, because error reports show the variables of frames: no frame that raises may hold a key.
    data_key = unwrap_data_key(tenant, keys, key, wrapped)
    return None if data_key is None else Cipher(tenant, name, data_key)
