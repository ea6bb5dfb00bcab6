"""The doctor's look at the keys of an encrypted store: whether they are here, are the right ones, and are kept safe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from perdure.errors import KeyMissing, PerdureError, Unavailable
from perdure.ops.doctor.findings import DAY_S, Finding, Patient, many, query
from perdure.storage.program import Flow, Sql

if TYPE_CHECKING:
    from perdure.storage.keyring import KeyProvider, Keys

_ROWS = Sql(
    """SELECT seal.tenant, tenant.name, seal.key, seal.proof, seal.since, seal.retired_at IS NOT NULL
    FROM seal JOIN tenant ON tenant.tenant = seal.tenant ORDER BY tenant.name, seal.since, seal.key"""
)
_SHOWN_MAX = 5
_OLD_S = 400 * DAY_S  # a key is good for 2**32 cells of a kind, which nobody counts; rotated each year, it is enough


def keys(patient: Patient) -> Flow[list[Finding]]:
    """What is wrong with the keys that the store was opened with; nothing, if all is well."""
    rows = yield from query(patient, _ROWS)
    vault = _vault(patient)
    if vault is None:
        says = f"{many(len({row[0] for row in rows}), 'tenant')} encrypted, and the store was opened without keys"
        do = "name the key file in PERDURE_KEYS, or open(url, keys=…): without them nothing of it can be read"
        return [Finding("encryption", "problem", says, do)]
    found = _file(vault.provider)
    return found or (yield from _fitting(patient.ctx.tenant_name, rows)) + _old(rows, patient.machine.clock_us())


def _old(rows: list[Any], now_us: int) -> list[Finding]:
    """Tenants whose newest key has been in use for long."""
    newest = {str(name): int(since) for _, name, _, _, since, retired in rows if not retired}
    names = sorted(name for name, since in newest.items() if now_us - since > _OLD_S * 1_000_000)
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN_MAX]) + (", …" if len(names) > _SHOWN_MAX else "")
    says = f"the key in use is more than {_OLD_S // DAY_S} days old, of: {shown}"
    return [Finding("encryption", "note", says, "`perdure keys rotate --new`, each year")]


def _vault(patient: Patient) -> Any:
    driver: Any = patient.ctx.driver
    while driver is not None and getattr(driver, "vault", None) is None:
        driver = getattr(driver, "inner", None)
    return None if driver is None else driver.vault


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


def _fitting(own: str, rows: list[Any]) -> Flow[list[Finding]]:
    from perdure.ops.keys import ask_keys
    from perdure.storage.locks import open_proof

    found: list[Finding] = []
    without: list[str] = []
    known: dict[str, Keys | None] = {}
    idle: list[str] = []
    for tenant, name, key, proof, _, retired in rows:
        key_id = bytes(key)
        try:
            if name not in known:
                known[name] = None
                known[name] = yield from ask_keys(name)
        except KeyMissing:
            without.append(name)
        except Unavailable as error:  # the others would take as long
            found.append(Finding("encryption", "problem", str(error), "see to what gives the keys"))
            break
        except PerdureError as error:
            says = f"the keys of tenant {name!r} cannot be used: {error}"
            found.append(Finding("encryption", "problem", says, "see to what gives the keys: the file, or the service"))
        given = known[name]
        if given is None:
            continue
        if retired:
            idle += [key_id.hex()] if key_id in given.by_id else []
        elif key_id not in given.by_id:
            says = f"data of tenant {name!r} is encrypted with key {key_id.hex()}, which is not among its keys here"
            do = "name the right key file in PERDURE_KEYS, or restore it from its backup"
            found.append(Finding("encryption", "problem", says, do))
        elif open_proof(tenant, given, key_id, bytes(proof)) is None:
            says = f"what the store keeps about key {key_id.hex()} of tenant {name!r} does not open with it: damage"
            found.append(Finding("encryption", "problem", says, "run `perdure store verify`; restore a backup"))
    if idle:
        says = f"{many(len(idle), 'key')} retired and still among the keys here: {', '.join(idle[:_SHOWN_MAX])}"
        do = "`perdure keys remove ID` takes it out of the key file, once no backup needs it"
        found.append(Finding("encryption", "note", says, do))
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
