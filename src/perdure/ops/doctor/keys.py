"""The doctor's look at the keys of an encrypted store: whether they are here, are the right ones, and are kept safe."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import KeyMissing, PerdureError, Unavailable
from perdure.ops.doctor.findings import Finding, Patient, many, query
from perdure.storage.program import Flow, Sql, aside

if TYPE_CHECKING:
    from perdure.encryption.cache import KeyCache
    from perdure.encryption.keys import KeyProvider

_ROWS = Sql(
    """SELECT k.tenant, t.name, k.wrapped_by, k.wrapped FROM tenant_key k JOIN tenant t ON t.tenant = k.tenant
    ORDER BY t.name"""
)
_SHOWN_MAX = 5


def keys(patient: Patient) -> Flow[list[Finding]]:
    """What is wrong with the keys that the store was opened with; nothing, if all is well."""
    rows = yield from query(patient, _ROWS)
    cache = getattr(patient.ctx.driver, "keys", None)
    if cache is None:
        says = f"{many(len({row[0] for row in rows}), 'tenant')} encrypted, and the store was opened without keys"
        do = "name the key file in PERDURE_KEYS, or open(url, keys=…): without them nothing of it can be read"
        return [Finding("encryption", "problem", says, do)]
    found = _file(cache.provider)
    return found or (yield from aside(partial(_fitting, cache, patient.ctx.tenant_name, rows)))


def _file(provider: KeyProvider) -> list[Finding]:
    """A key file that others may read: it is not used before that is mended."""
    path = getattr(provider, "path", None)
    if path is None or os.name != "posix":
        return []
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        says = f"the store is encrypted, and there is no key file {path}"
        return [Finding("encryption", "problem", says, "restore the key file from its backup, or name the right one")]
    if not mode & 0o077:
        return []
    says = f"others may read the key file {path}: its keys are not used while they may"
    return [Finding("encryption", "warning", says, f"chmod 600 {path}; if somebody did read it, make new keys")]


def _fitting(cache: KeyCache, own: str, rows: list[Any]) -> list[Finding]:
    """Whether the provider has the key that each tenant's data key is wrapped with. May wait for the provider."""
    from perdure.encryption.cipher import unwrap_data_key
    from perdure.ops.keys import fresh_keys

    found: list[Finding] = []
    without: list[str] = []
    for tenant, name, key, wrapped in rows:
        try:
            keys = fresh_keys(cache, name)
        except KeyMissing:
            without.append(name)
            continue
        except Unavailable as error:  # the others would take as long
            found.append(Finding("encryption", "problem", str(error), "see to what gives the keys"))
            break
        except PerdureError as error:
            says = f"the keys of tenant {name!r} cannot be used: {error}"
            found.append(Finding("encryption", "problem", says, "see to what gives the keys: the file, or the service"))
            continue
        if bytes(key) not in keys.by_id:
            says = f"data of tenant {name!r} is encrypted with key {bytes(key).hex()}, which is not among its keys here"
            do = "name the right key file in PERDURE_KEYS, or restore it from its backup"
            found.append(Finding("encryption", "problem", says, do))
        elif unwrap_data_key(tenant, keys, bytes(key), bytes(wrapped)) is None:
            says = f"the stored data key of tenant {name!r} does not open with key {bytes(key).hex()}: it is damaged"
            found.append(Finding("encryption", "problem", says, "restore a backup"))
    return found + _without(own, without, {row[1] for row in rows})


def _without(own: str, without: list[str], tenants: set[str]) -> list[Finding]:
    """Tenants that have no key here at all. One that was forgotten stays so: no problem, if others can be read."""
    names = sorted(set(without))
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN_MAX]) + (", …" if len(names) > _SHOWN_MAX else "")
    if own in names or len(names) == len(tenants):
        do = "name the right key file in PERDURE_KEYS, or restore it from its backup"
        return [Finding("encryption", "problem", f"encrypted, and there is no key here for: {shown}", do)]
    return [Finding("encryption", "note", f"no key here for: {shown}; right, if they were forgotten", "")]
