"""The doctor's look at the keys of an encrypted store: whether they are here, are the right ones, and are kept safe."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import KeyMissing, PerdureError, Unavailable
from perdure.ops.doctor.findings import CheckContext, Finding, many, query
from perdure.storage.program import Flow, Sql, aside

if TYPE_CHECKING:
    from perdure.encryption.cache import KeyCache
    from perdure.encryption.keys import KeyProvider

_ROWS = Sql(
    """SELECT k.tenant, t.name, k.wrapped_by, k.wrapped FROM tenant_key k JOIN tenant t ON t.tenant = k.tenant
    ORDER BY t.name"""
)
_SHOWN_MAX = 5


def keys(context: CheckContext) -> Flow[list[Finding]]:
    """What is wrong with the keys that the store was opened with; nothing, if all is well."""
    rows = yield from query(context, _ROWS)
    cache = context.ctx.driver.capabilities.keys
    if cache is None:
        message = f"{many(len({row[0] for row in rows}), 'tenant')} encrypted, and the store was opened without keys"
        hint = "name the key file in PERDURE_KEYS, or open(url, keys=…): without them nothing of it can be read"
        return [Finding("encryption", "problem", message, hint)]
    found = _file(cache.provider)
    return found or (yield from aside(partial(_fitting, cache, context.ctx.tenant_name, rows)))


def _file(provider: KeyProvider) -> list[Finding]:
    """A key file that others may read: it is not used before that is mended."""
    path = getattr(provider, "path", None)
    if path is None or os.name != "posix":
        return []
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        message = f"the store is encrypted, and there is no key file {path}"
        return [
            Finding("encryption", "problem", message, "restore the key file from its backup, or name the right one")
        ]
    if not mode & 0o077:
        return []
    message = f"others may read the key file {path}: its keys are not used while they may"
    return [Finding("encryption", "warning", message, f"chmod 600 {path}; if somebody did read it, make new keys")]


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
            message = f"the keys of tenant {name!r} cannot be used: {error}"
            found.append(
                Finding("encryption", "problem", message, "see to what gives the keys: the file, or the service")
            )
            continue
        if bytes(key) not in keys.by_id:
            message = (
                f"data of tenant {name!r} is encrypted with key {bytes(key).hex()}, which is not among its keys here"
            )
            hint = "name the right key file in PERDURE_KEYS, or restore it from its backup"
            found.append(Finding("encryption", "problem", message, hint))
        elif unwrap_data_key(tenant, keys, bytes(key), bytes(wrapped)) is None:
            message = f"the stored data key of tenant {name!r} does not open with key {bytes(key).hex()}: it is damaged"
            found.append(Finding("encryption", "problem", message, "restore a backup"))
    return found + _without(own, without, {row[1] for row in rows})


def _without(own: str, without: list[str], tenants: set[str]) -> list[Finding]:
    """Tenants that have no key here at all. One that was forgotten stays so: no problem, if others can be read."""
    names = sorted(set(without))
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN_MAX]) + (", …" if len(names) > _SHOWN_MAX else "")
    if own in names or len(names) == len(tenants):
        hint = "name the right key file in PERDURE_KEYS, or restore it from its backup"
        return [Finding("encryption", "problem", f"encrypted, and there is no key here for: {shown}", hint)]
    return [Finding("encryption", "note", f"no key here for: {shown}; right, if they were forgotten", "")]
