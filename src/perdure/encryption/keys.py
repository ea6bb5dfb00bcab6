"""Key providers: a file, a mapping, or any object with `keys_for(tenant)`.

A tenant has one current key, and perhaps older ones that decrypt older data. A key is 32 random bytes; its id is a hash
of it, safe to show. No error, log or repr holds a key, and no frame that raises an error does: error reports show the
variables of frames.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson
from blake3 import blake3

from perdure.errors import KeyMissing, Unavailable, UsageError
from perdure.storage.files import replacing

KEY_BYTES = 32
ID_BYTES = 8
ENVIRONMENT = "PERDURE_KEYS"
_FORMAT = 1


def key_id(key: bytes) -> bytes:
    """Return the id of a key, which reveals nothing about the key."""
    return blake3(key, derive_key_context="perdure 2026 id of a key").digest(ID_BYTES)


class Keys:
    """A tenant's keys: the one in use, and older ones that its data may still be encrypted with."""

    __slots__ = ("by_id", "current")

    def __init__(self, current: bytes, older: Iterable[bytes] = ()) -> None:
        self.by_id: dict[bytes, bytes] = {}
        keys = [current, *older]
        if wrong := _wrong(keys):
            del keys, current, older
            raise UsageError(wrong)
        keys = [bytes(key) for key in keys]
        self.by_id = {key_id(key): key for key in keys}
        self.current = key_id(keys[0])

    def __repr__(self) -> str:
        return f"<Keys {', '.join(number.hex() for number in self.by_id)}>"

    def __eq__(self, other: object) -> bool:
        # Comparing ids instead of keys has the same result, and leaks nothing through its duration.
        return isinstance(other, Keys) and (self.current, [*self.by_id]) == (other.current, [*other.by_id])

    def __hash__(self) -> int:
        return hash(self.current)


@runtime_checkable
class KeyProvider(Protocol):
    """Returns the keys of tenants.

    It is asked at the first use of a tenant, when its keys have changed, and every `refresh_s` (an optional attribute;
    60 s) while the tenant is in use. It is called on any thread, perhaps on several at once, never inside a
    transaction. The operation waits for it, so it must have a timeout of its own.
    """

    def keys_for(self, tenant: str) -> Keys:
        """Return the keys of a tenant. Raises KeyMissing if it has none."""
        ...


def _wrong(keys: Iterable[object]) -> str:
    """Return the problem of these keys, or ""."""
    for key in keys:
        if not isinstance(key, bytes | bytearray) or len(key) != KEY_BYTES:
            actual = f"{len(key)} bytes" if isinstance(key, bytes | bytearray) else f"a {type(key).__name__}"
            return f"a key is {KEY_BYTES} random bytes (os.urandom({KEY_BYTES})), not {actual}"
    return ""


def no_key(tenant: str, where: str) -> KeyMissing:
    """Return the error for a tenant without a key."""
    return KeyMissing(
        f"there is no key for tenant {tenant!r} in {where}: make one with `perdure key new --tenant {tenant}`, "
        "or, if it was forgotten, its data can never be read again",
        tenant=tenant,
    )


class StaticKeys:
    """Keys that the program passes: one for all tenants, or a mapping from tenants to theirs.

    A list of keys may stand for a key: the first one is current, the others decrypt older data.
    """

    refresh_s = math.inf  # they never change

    def __init__(self, keys: bytes | Iterable[bytes] | Mapping[str, bytes | Iterable[bytes]]) -> None:
        self._by_tenant: dict[str, Keys] | None = None
        self._for_all: Keys | None = None
        try:
            if isinstance(keys, Mapping):
                self._by_tenant = {tenant: _keys(value) for tenant, value in keys.items()}
            else:
                self._for_all = _keys(keys)
        except UsageError as error:
            wrong = str(error)
        else:
            return
        del keys
        raise UsageError(wrong)

    def __repr__(self) -> str:
        return f"<StaticKeys {self._for_all or sorted(self._by_tenant or ())}>"

    def keys_for(self, tenant: str) -> Keys:
        """Return the tenant's keys. Raises KeyMissing."""
        keys = self._for_all or (self._by_tenant or {}).get(tenant)
        if keys is None:
            raise no_key(tenant, "the keys that were given")
        return keys


def _keys(value: bytes | Iterable[bytes]) -> Keys:
    if isinstance(value, bytes | bytearray):
        return Keys(bytes(value))
    keys = list(value)
    if not keys:
        raise UsageError("an empty list of keys: give at least the one in use")
    return Keys(keys[0], keys[1:])


class KeyFile:
    """Keys in a JSON file that only its owner may read; made and changed by `perdure keys`.

    The file is checked every `refresh_s`, and read if it has changed. So a running process uses new keys, and stops
    using forgotten ones.
    """

    def __init__(self, path: str | os.PathLike[str], *, refresh_s: float = 1.0) -> None:
        self.path = Path(path)
        self.refresh_s = refresh_s
        self._lock = Lock()
        self._state: tuple[int, ...] = ()
        self._tenants: dict[str, _Tenant] = {}

    def __repr__(self) -> str:
        return f"<KeyFile {self.path}>"

    def keys_for(self, tenant: str) -> Keys:
        """Return the tenant's keys. Raises KeyMissing."""
        keys = self._read_tenants().get(tenant)
        if keys is None:
            raise no_key(tenant, str(self.path))
        return keys.keys

    def tenants(self) -> dict[str, list[tuple[str, str]]]:
        """Return every tenant with the ids of its keys and when each was made, the current key first."""
        return {
            tenant: [(number.hex(), created) for number, created in zip(keys.by_id, times, strict=True)]
            for tenant, (keys, times) in self._read_tenants().items()
        }

    def new(self, tenant: str) -> str:
        """Make a new current key for a tenant, keep the older ones, and return its id. Makes the file if needed."""
        key = os.urandom(KEY_BYTES)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

        def add(tenants: _Entries) -> None:
            entry = {"key": base64.b64encode(key).decode(), "made": now}
            tenants[tenant] = [entry, *tenants.get(tenant, [])]

        self._change(add, make=True)
        return key_id(key).hex()

    def forget(self, tenant: str) -> list[str]:
        """Remove every key of a tenant and return their ids. Data encrypted with them can never be read again."""
        ids = [number.hex() for number in self.keys_for(tenant).by_id]
        self._change(lambda tenants: tenants.pop(tenant, None))
        return ids

    def remove(self, tenant: str, key: str) -> None:
        """Remove one older key of a tenant. Raises UsageError for the current key, KeyMissing for an unknown one."""
        keys = self.keys_for(tenant)
        if key not in [number.hex() for number in keys.by_id]:
            raise KeyMissing(f"tenant {tenant!r} has no key {key} in {self.path}", tenant=tenant, key=key)
        if key == keys.current.hex():
            raise UsageError(f"key {key} is in use: make a new one and rotate first, or forget the whole tenant")

        def drop(tenants: _Entries) -> None:
            tenants[tenant] = [
                entry for entry in tenants[tenant] if key_id(base64.b64decode(entry["key"])).hex() != key
            ]

        self._change(drop)

    def _read_tenants(self) -> dict[str, _Tenant]:
        with self._lock:
            try:
                stat = os.stat(self.path)
                state = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev, stat.st_mode)
                if os.name == "posix" and stat.st_mode & 0o077:
                    raise UsageError(
                        f"others may read {self.path}: chmod 600 {self.path}, and make new keys if they did"
                    )
                if state != self._state:
                    tenants, damaged = _read(self.path)
                    if damaged:
                        raise UsageError(f"{self.path} is not a key file of Perdure, or is damaged: {damaged}")
                    self._tenants, self._state = tenants, state
            except FileNotFoundError:
                raise KeyMissing(f"there is no key file {self.path}: make one with `perdure key new`") from None
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise Unavailable(
                    f"the key file {self.path} cannot be read: {why}. Nothing was read or written"
                ) from error
            return self._tenants

    def _change(self, change: Callable[[_Entries], Any], *, make: bool = False) -> None:
        """Write a changed file, or leave it as it is. One change at a time, because a lost key is lost data."""
        if not make or self.path.exists():
            self._read_tenants()  # it can be read, and is a key file
        path = Path(os.path.realpath(self.path))  # replacing a link would leave forgotten keys in the file
        fresh = path.with_name(path.name + ".new")
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UsageError(
                f"{fresh} is there: another process is changing the keys; if none is, remove it and try again"
            ) from None
        with replacing(path, fresh, os.fdopen(handle, "wb")) as file:
            tenants = (_entries(path) or {}) if path.exists() else {}
            change(tenants)
            file.write(orjson.dumps({"perdure_keys": _FORMAT, "tenants": tenants}, option=orjson.OPT_INDENT_2))


class _Tenant(NamedTuple):
    keys: Keys
    created: list[str]  # when each key was created


_Entries = dict[str, list[dict[str, str]]]


def _entries(path: Path) -> _Entries | None:
    """Return the entries of a key file by tenant; None if it is not a key file."""
    try:
        content = orjson.loads(path.read_bytes())
        tenants: _Entries = {tenant: entries for tenant, entries in content["tenants"].items() if entries}
        return tenants if content["perdure_keys"] == _FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError):  # the reason may quote what is in the file
        return None


def _read(path: Path) -> tuple[dict[str, _Tenant], str]:
    """Return the tenants of a key file and its damage, without raising: no frame that holds keys raises an error."""
    tenants: dict[str, _Tenant] = {}
    if (entries := _entries(path)) is None:
        return tenants, "it cannot be read"
    for tenant, some in entries.items():
        decoded = _decoded(some)
        if decoded is None:
            return tenants, f"the keys of tenant {tenant!r}"
        tenants[tenant] = decoded
    return tenants, ""


def _decoded(entries: list[dict[str, str]]) -> _Tenant | None:
    try:
        keys = _keys([base64.b64decode(entry["key"], validate=True) for entry in entries])
        return _Tenant(keys, [str(entry.get("made", "")) for entry in entries])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def provider_of(keys: object) -> KeyProvider:
    """Return the provider for `open(keys=…)`: a provider, a key, keys by tenant, or "env" for the file PERDURE_KEYS."""
    if keys == "env":
        path = os.environ.get(ENVIRONMENT)
        if not path:
            raise UsageError(f'keys="env": set {ENVIRONMENT} to the path of a key file')
        return KeyFile(path)
    if isinstance(keys, bytearray):
        keys = bytes(keys)
    if isinstance(keys, bytes | Mapping | list | tuple):
        return StaticKeys(keys)
    if isinstance(keys, KeyProvider):
        return keys
    raise UsageError(
        f'keys= takes a KeyFile, StaticKeys, {KEY_BYTES} bytes, "env", or an object with keys_for(tenant), '
        f"not a {type(keys).__name__}"
    )
