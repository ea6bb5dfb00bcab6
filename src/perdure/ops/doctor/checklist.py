"""`store.ops.doctor()`: check a deployment, and report for each check what to do.

It only reads, so it works on a store that cannot be written. Each check has its own transactions, so a check that fails
(a missing privilege, a damaged table) does not stop the others. The checks of one database are in `sqlite.py` and
`postgres.py`.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from perdure.errors import KeyMissing, PerdureError, Unavailable
from perdure.log.archived import list_stubs
from perdure.ops.doctor.agents import agents
from perdure.ops.doctor.context import context, memory
from perdure.ops.doctor.findings import DAY_S, MB, Check, Finding, Level, span
from perdure.ops.health import whole_store
from perdure.runs.maintenance.tenant_isolation import GARBAGE
from perdure.snapshots.rows import read_all
from perdure.storage.objects import is_object_url
from perdure.storage.program import Flow, Sql, aside, fetch, read
from perdure.threads.context import StoreContext
from perdure.values.amounts import plural, size

__all__ = ["Finding", "Level", "examine"]

_FULL_SOON_DAYS, _FULL_LATER_DAYS = 7, 45
_FREE_BYTES_MIN = 512 * MB
_BACKUP_DAYS_MAX, _RESTORE_DAYS_MAX = 2, 90
_LARGE_BYTES = 1000 * MB
_LATE_S = 600  # a run that has been due for longer has no worker
_FUTURE_MINUTES = 2
_US = 1_000_000

_RETENTION = Sql(
    """SELECT EXISTS (SELECT 1 FROM meta WHERE key LIKE 'retention %'
            AND (value LIKE '%"threads":%' OR value LIKE '%"checkpoint%'))
        OR EXISTS (SELECT 1 FROM thread WHERE retention IS NOT NULL), EXISTS (SELECT 1 FROM thread)"""
)
_RUNS = Sql(
    """SELECT (SELECT count(*) FROM ask WHERE status = 'open' AND kind = 'doubt'),
    (SELECT count(*) FROM run WHERE tenant IN (SELECT tenant FROM tenant) AND status = 'stuck'),
    (SELECT count(*) FROM run WHERE status = 'running' AND lease_until < {now} - :late),
    (SELECT count(*) FROM run WHERE status = 'queued' AND wake_at < {now} - :late AND changed_at < {now} - :late)"""
)
_LATE_SCHEDULES = Sql("SELECT count(*), min(name) FROM schedule WHERE next_at < {now} - :late")
_RUN_WARNINGS = (
    (
        "in doubt: whether the effect happened is not known",
        "`perdure questions` lists them; then `perdure run resolve`",
    ),
    ("stuck: they cannot resume by themselves", "`perdure runs --status stuck` lists them; then `perdure run resume`"),
    ("whose process died, and no worker took them over", "run a worker: `perdure worker app.py`"),
    ("due, and no worker took them", "run a worker of their queue and version: `perdure worker app.py`"),
)
_KEYS = Sql(
    """SELECT t.tenant, t.name, k.wrapped_by, k.wrapped FROM tenant t LEFT JOIN tenant_key k ON k.tenant = t.tenant
    ORDER BY t.name"""
)
_MAINTENANCE_PROBLEMS = Sql(
    """SELECT t.name, m.value FROM meta m JOIN tenant t ON m.key = 'problem ' || CAST(t.tenant AS text)
    WHERE m.value <> '' ORDER BY t.tenant LIMIT 20"""
)
_NEWEST = Sql("SELECT max(active) FROM thread")


def examine(ctx: StoreContext) -> Flow[list[Finding]]:
    if ctx.driver.dialect == "sqlite":
        from perdure.ops.doctor.sqlite import CHECKS
    else:
        from perdure.ops.doctor.postgres import CHECKS
    findings: list[Finding] = []
    for check in (
        *CHECKS,
        backups,
        replication,
        retention,
        archives,
        disk,
        clock,
        runs,
        agents,
        maintenance,
        context,
        memory,
        encryption,
    ):
        findings += yield from _run_check(ctx, check)
    return findings


def _run_check(ctx: StoreContext, check: Check) -> Flow[list[Finding]]:
    """Return the findings of a check, or one finding that it failed."""
    name = check.__name__
    try:
        return (yield from check(ctx))
    except (PerdureError, OSError) as error:
        return [Finding(name, "note", f"could not be checked: {error}")]
    except GARBAGE as error:
        return [Finding(name, "problem", f"the store is damaged: {error}", "run `perdure store verify`")]


def backups(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check the age of the last backup, and of the last test restore."""
    store = yield from whole_store(ctx)
    if store.last_backup_at is None:
        hint = "run `perdure store backup FILE` every day, unless another tool makes backups"
        return [Finding("backups", "warning", "no backup was ever made with Perdure", hint)]
    age_s = (store.at - store.last_backup_at).total_seconds()
    old = age_s > _BACKUP_DAYS_MAX * DAY_S
    finding = Finding.of(
        "backups", old, f"the last backup was made {span(age_s)} ago", "run `perdure store backup FILE` daily"
    )
    hint = "run `perdure store restore FILE --test`"
    if store.last_restored_at is None:
        return [finding, Finding("restore", "warning", "no backup was ever restored in a test", hint)]
    age_s = (store.at - store.last_restored_at).total_seconds()
    message = f"the last test of a backup was {span(age_s)} ago and found no damage"
    return [finding, Finding.of("restore", age_s > _RESTORE_DAYS_MAX * DAY_S, message, hint)]


def replication(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that replicas are still updated. For one that is not, the store keeps all changes since its last round."""
    rounds = [row for row in (yield from read(read_all)) if row.name.startswith("replica-")]
    if not rounds:
        return []
    age_s = (ctx.clock_us() - rounds[-1].taken_at) / _US
    message = f"the last round of replication was {span(age_s)} ago; the store keeps all old rows since"
    hint = (
        f"run `perdure store replicate`; for a replica that is given up, `perdure snapshot release {rounds[-1].name}`"
    )
    return [Finding.of("replication", age_s > DAY_S, message, hint)]


def retention(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that some rule removes old checkpoints."""
    [(configured, used)] = yield from fetch(_RETENTION)
    if configured:
        return [
            Finding("retention", "ok", "rules remove old checkpoints: workers and `perdure store compact` apply them")
        ]
    if not used:
        return [Finding("retention", "ok", "no checkpoints are stored yet")]
    stored = (yield from whole_store(ctx)).bytes
    level: Level = "warning" if stored > _LARGE_BYTES else "note"
    hint = "to remove old ones, run `perdure retention threads=30d`, and `perdure store compact` daily"
    return [Finding("retention", level, f"checkpoints are kept for ever ({size(stored)} so far)", hint)]


def archives(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that the files of archives are where their stubs say."""
    tenant = yield from ctx.tenant()
    stubs = (yield from read(partial(list_stubs, tenant))) if tenant is not None else []
    gone = {stub.place for stub in stubs if not is_object_url(stub.place) and not os.path.exists(stub.place)}
    if gone:
        hint = "bring it back; if it was moved, `perdure thread unarchive NAME --place PLACE`"
        return [Finding("archives", "problem", f"there is no archive at {place}", hint) for place in sorted(gone)]
    return [Finding("archives", "ok", f"{plural(len(stubs), 'thread or run')} archived")] if stubs else []


def disk(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check free space and growth, and estimate when the disk will be full."""
    store = yield from whole_store(ctx)
    growth, free = store.growth_bytes_per_day, store.disk_free_bytes
    grows = "its growth is not known yet" if growth is None else f"it grows by {size(max(0, growth))} a day"
    message = f"the store takes {size(store.bytes)}; {grows}"
    if free is None:
        hint = "watch the server's free disk: a full one stops every write"
        return [Finding("disk", "note", f"{message}; the server's disk cannot be seen from here", hint)]
    message += f"; {size(free)} are free"
    if (full_at := store.disk_full_at) is not None:
        days = (full_at - store.at).total_seconds() / DAY_S
        message += f"; the disk is full in {span(days * DAY_S)} ({full_at:%Y-%m-%d})"
        if days < _FULL_LATER_DAYS:
            level: Level = "problem" if days < _FULL_SOON_DAYS else "warning"
            return [Finding("disk", level, message, "configure retention and run `perdure store compact`")]
    if free < _FREE_BYTES_MIN:
        return [Finding("disk", "problem", message, "free some space now: a full disk stops every write")]
    hint = "make room for one copy: `perdure store compact` and a backup beside it need as much again"
    return [Finding.of("disk", free < store.bytes, message, hint)]


def clock(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that no checkpoint was saved in the future of this machine's clock."""
    [(newest,)] = yield from fetch(_NEWEST)
    ahead_s = 0 if newest is None else newest * 60 - ctx.clock_us() / _US
    if ahead_s > _FUTURE_MINUTES * 60:
        message = f"the newest checkpoint is {span(ahead_s)} in the future: a clock is wrong, or was set back"
        hint = "set the clocks of all writers by NTP (chrony, systemd-timesyncd)"
        return [Finding("clock", "warning", message, hint)]
    return [Finding("clock", "ok", "no checkpoint is from the future")]


def runs(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check for runs that wait for a person or a worker, and for schedules that no worker fires."""
    [counts] = yield from fetch(_RUNS, late=_LATE_S * _US, now=ctx.clock_us())
    findings = [
        Finding("runs", "warning", f"{plural(count, 'run')} {message}", hint)
        for count, (message, hint) in zip(counts, _RUN_WARNINGS, strict=True)
        if count
    ]
    [(late, name)] = yield from fetch(_LATE_SCHEDULES, late=_LATE_S * _US, now=ctx.clock_us())
    if late:
        message = f"{plural(late, 'schedule')} due, and no worker starts the runs, such as {name!r}"
        findings.append(Finding("runs", "warning", message, "run a worker: `perdure worker app.py`"))
    fine = f"no run is stuck or in doubt, and none has waited for a worker for more than {span(_LATE_S)}"
    return findings or [Finding("runs", "ok", fine)]


def maintenance(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check for tenants whose last daily maintenance by a worker failed."""
    hint = "fix the cause; a worker tries again every day"
    rows = yield from fetch(_MAINTENANCE_PROBLEMS)
    return [
        Finding("maintenance", "warning", f"maintenance of tenant {name!r} failed: {text}", hint) for name, text in rows
    ]


def encryption(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that states are encrypted, that the right keys are here, and that their file is private."""
    rows = yield from fetch(_KEYS)
    encrypted = [row for row in rows if row[2] is not None]
    if not encrypted:
        hint = "if the disk or its backups are not encrypted either, see docs/how-to/encryption.md"
        return [Finding("encryption", "note", "states are not encrypted in the database", hint)]
    cache = ctx.driver.capabilities.keys
    message = f"{len(encrypted)} of {plural(len(rows), 'tenant')} encrypted"
    if cache is None:
        hint = "name the key file in PERDURE_KEYS, or open(url, keys=…): without keys nothing of it can be read"
        return [Finding("encryption", "problem", f"{message}, and the store was opened without keys", hint)]
    hint = "transfer the others into a store that is opened with keys"
    findings = [Finding.of("encryption", len(encrypted) < len(rows), message, hint)]
    path = cache.provider.path if hasattr(cache.provider, "path") else None
    if path is not None and os.path.exists(path) and os.stat(path).st_mode & 0o077:
        message = f"other users may read the key file {path}: Perdure does not use its keys until you change that"
        return [
            *findings,
            Finding("encryption", "warning", message, f"chmod 600 {path}; if it was read, make new keys"),
        ]
    return findings + (yield from aside(partial(_keys, cache, ctx.tenant_name, encrypted)))


def _keys(cache: Any, own: str, rows: list[Any]) -> list[Finding]:
    """Check that the provider has the key that wraps each tenant's data key. May wait for the provider."""
    from perdure.encryption.cipher import unwrap_data_key
    from perdure.ops.keys import fresh_keys

    findings: list[Finding] = []
    without: list[str] = []
    hint = "name the right key file in PERDURE_KEYS, or restore it from its backup"
    for tenant, name, key, wrapped in rows:
        try:
            keys = fresh_keys(cache, name)
        except KeyMissing:
            without.append(name)
            continue
        except Unavailable as error:  # the next tenants would wait as long for the same error
            return [*findings, Finding("encryption", "problem", str(error), "check the service or file of the keys")]
        if bytes(key) not in keys.by_id:
            message = (
                f"data of tenant {name!r} is encrypted with key {bytes(key).hex()}, which this process does not have"
            )
            findings.append(Finding("encryption", "problem", message, hint))
        elif unwrap_data_key(tenant, keys, bytes(key), bytes(wrapped)) is None:
            message = f"the stored data key of tenant {name!r} does not open with key {bytes(key).hex()}: it is damaged"
            findings.append(Finding("encryption", "problem", message, "restore a backup"))
    if own in without or len(without) == len(rows):
        findings.append(Finding("encryption", "problem", f"this process has no key for: {', '.join(without)}", hint))
    elif without:
        message = f"this process has no key for: {', '.join(without)}; that is right if you forgot their keys"
        findings.append(Finding("encryption", "note", message))
    return findings
