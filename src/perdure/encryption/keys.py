"""Where keys come from: a file, a mapping, or whatever gives `keys_for(tenant)`.

A tenant has one key that is in use and perhaps older ones, with which its data was encrypted before. A key is 32 random
bytes; its id is a hash of it, safe to show. Must never happen here: a key in an error, a log or a repr, nor in a frame
that an error is raised from: what reports errors shows the variables of frames.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import orjson
from blake3 import blake3

from perdure.errors import KeyMissing, Unavailable, UsageError
from perdure.storage.files import sync_file, sync_folder

KEY_BYTES = 32
ID_BYTES = 8
ENVIRONMENT = "PERDURE_KEYS"
_FORMAT = 1


def key_id(key: bytes) -> bytes:
    """What a key is called: says nothing about the key."""
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
        # Ids, not keys: they say the same, and comparing them tells nobody anything.
        return isinstance(other, Keys) and (self.current, [*self.by_id]) == (other.current, [*other.by_id])

    def __hash__(self) -> int:
        return hash(self.current)


@runtime_checkable
class KeyProvider(Protocol):
    """What gives a store its keys. It is asked when a tenant is first met, when its keys have changed, and again every
    `refresh_s` (an attribute it may have; 60 s) while the tenant is in use: never while a transaction is open, and on a
    thread of its own, so that it may take its time (`timeout_s`, another one; 30 s)."""

    def keys_for(self, tenant: str) -> Keys | Awaitable[Keys]:
        """The keys of a tenant. Raises KeyMissing if it has none. May be `async`: it gets an event loop of its own."""
        ...


def _wrong(keys: Iterable[object]) -> str:
    """What is wrong with keys, if anything is."""
    for key in keys:
        if not isinstance(key, bytes | bytearray) or len(key) != KEY_BYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes | bytearray) else f"a {type(key).__name__}"
            return f"a key is {KEY_BYTES} random bytes (os.urandom({KEY_BYTES})), not {what}"
    return ""


def no_key(tenant: str, where: str) -> KeyMissing:
    """The error for a tenant without a key."""
    return KeyMissing(
        f"there is no key for tenant {tenant!r} in {where}: make one with `perdure keys new {tenant}`, or, if it was "
        "forgotten, its data can never be read again",
        tenant=tenant,
    )


class StaticKeys:
    """Keys that the program has itself: one for all tenants, or a mapping from tenants to theirs.

    Instead of a key there may be a list of keys, the one in use first: the others still open what is older.
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
        """The tenant's keys. Raises KeyMissing."""
        found = self._for_all or (self._by_tenant or {}).get(tenant)
        if found is None:
            raise no_key(tenant, "the keys that were given")
        return found


def _keys(value: bytes | Iterable[bytes]) -> Keys:
    if isinstance(value, bytes | bytearray):
        return Keys(bytes(value))
    given = list(value)
    if not given:
        raise UsageError("an empty list of keys: give at least the one in use")
    return Keys(given[0], given[1:])


class KeyFile:
    """Keys in a JSON file that only its owner may read; made and changed by `perdure keys`.

    The file is looked at again every `refresh_s`, and read if it has changed, so that a running process learns of a new
    key, and stops using one that was forgotten.
    """

    def __init__(self, path: str | os.PathLike[str], *, refresh_s: float = 1.0) -> None:
        self.path = Path(path)
        self.refresh_s = refresh_s
        self._lock = Lock()
        self._state: tuple[int, ...] = ()
        self._tenants: dict[str, Keys | None] = {}
        self._made: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"<KeyFile {self.path}>"

    def keys_for(self, tenant: str) -> Keys:
        """The tenant's keys. Raises KeyMissing."""
        if tenant not in (found := self._found()):
            raise no_key(tenant, str(self.path))
        keys = found[tenant]
        if keys is None:
            raise UsageError(f"{self.path}: the keys of tenant {tenant!r} are damaged")
        return keys

    def tenants(self) -> dict[str, list[tuple[str, str]]]:
        """Every tenant, with the ids of its keys and when each was made; the one in use first."""
        found: dict[str, list[tuple[str, str]]] = {}
        for tenant, keys in self._found().items():
            ids = list((keys or self.keys_for(tenant)).by_id)
            found[tenant] = [(number.hex(), made) for number, made in zip(ids, self._made[tenant], strict=True)]
        return found

    def new(self, tenant: str) -> str:
        """Make a key that is the tenant's from now on, and keep the older ones. Its id. Makes the file."""
        key = os.urandom(KEY_BYTES)
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

        def add(tenants: dict[str, list[dict[str, str]]]) -> None:
            entry = {"key": base64.b64encode(key).decode(), "made": made}
            tenants[tenant] = [entry, *tenants.get(tenant, [])]

        self._change(add, make=True)
        return key_id(key).hex()

    def forget(self, tenant: str) -> list[str]:
        """Remove every key of a tenant: what is encrypted with them can never be read again. Their ids."""
        ids = [number.hex() for number in self.keys_for(tenant).by_id]
        self._change(lambda tenants: tenants.pop(tenant, None))
        return ids

    def remove(self, tenant: str, key: str) -> None:
        """Remove one older key of a tenant. Raises UsageError for the one in use, KeyMissing for one it has not."""
        keys = self.keys_for(tenant)
        wanted = [number for number in keys.by_id if number.hex() == key]
        if not wanted:
            raise KeyMissing(f"tenant {tenant!r} has no key {key} in {self.path}", tenant=tenant, key=key)
        if wanted[0] == keys.current:
            raise UsageError(f"key {key} is in use: make a new one and rotate first, or forget the whole tenant")

        def drop(tenants: dict[str, list[dict[str, str]]]) -> None:
            tenants[tenant] = [
                entry for entry in tenants[tenant] if key_id(base64.b64decode(entry["key"])).hex() != key
            ]

        self._change(drop)

    def _found(self) -> dict[str, Keys | None]:
        """The keys by tenant; None for those that are damaged."""
        with self._lock:
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                raise KeyMissing(f"there is no key file {self.path}: make one with `perdure keys new`") from None
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if os.name == "posix" and found.st_mode & 0o077:
                raise UsageError(f"others may read {self.path}: chmod 600 {self.path}, and make new keys if they did")
            state = _state_of(found)
            if state != self._state:
                self._tenants, self._made = _keys_in(self.path)
                self._state = state
            return self._tenants

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes when the file does; None if it cannot be seen."""
        try:
            return _state_of(os.stat(self.path))
        except OSError:
            return None

    def _change(self, change: Any, *, make: bool = False) -> None:
        """Write the file anew, or leave it as it is. One at a time: a lost key is lost data."""
        path = Path(os.path.realpath(self.path))  # not a link to it: what was forgotten would stay in the file
        fresh = path.with_name(path.name + ".new")
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UsageError(
                f"{fresh} is there: another process is changing the keys; if none is, remove it and try again"
            ) from None
        try:
            with os.fdopen(handle, "wb") as file:
                tenants = dict(_parse(path)) if path.exists() or not make else {}
                change(tenants)
                file.write(orjson.dumps({"perdure_keys": _FORMAT, "tenants": tenants}, option=orjson.OPT_INDENT_2))
                sync_file(file)
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        sync_folder(path)


def _state_of(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev, found.st_mode


def _unreadable(path: Path, error: OSError) -> Unavailable:
    why = error.strerror or type(error).__name__
    return Unavailable(f"the key file {path} cannot be read: {why}. Nothing was read or written")


Entries = dict[str, list[dict[str, str]]]


def _parse(path: Path) -> Entries:
    """What is in a key file, tenant by tenant. Raises KeyMissing, Unavailable, UsageError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise KeyMissing(f"there is no key file {path}: make one with `perdure keys new`") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    tenants = _entries(data)
    if tenants is None:
        del data
        raise UsageError(f"{path} is not a key file of Perdure, or it is damaged")
    return tenants


def _entries(data: bytes) -> Entries | None:
    try:
        found = orjson.loads(data)
        tenants = found["tenants"] if found["perdure_keys"] == _FORMAT else None
    except (ValueError, KeyError, TypeError):  # the reason may quote what is in the file
        return None
    if not isinstance(tenants, dict) or not all(isinstance(entries, list) for entries in tenants.values()):
        return None
    return tenants


def _keys_in(path: Path) -> tuple[dict[str, Keys | None], dict[str, list[str]]]:
    """The keys of a file by tenant, None for those that are damaged, and when each was made."""
    tenants = {tenant: entries for tenant, entries in _parse(path).items() if entries}
    made = {
        tenant: [str(entry.get("made", "")) if isinstance(entry, dict) else "" for entry in entries]
        for tenant, entries in tenants.items()
    }
    return {tenant: _decoded(entries) for tenant, entries in tenants.items()}, made


def _decoded(entries: list[dict[str, str]]) -> Keys | None:
    try:
        return _keys([base64.b64decode(entry["key"], validate=True) for entry in entries])
    except (KeyError, TypeError, ValueError):
        return None


def provider_of(keys: object) -> KeyProvider:
    """What `open(keys=…)` may be: a provider, a key, keys by tenant, or "env" for the file that PERDURE_KEYS names."""
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
