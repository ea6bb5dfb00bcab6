"""`store.ops.doctor()`: goes through the checklist of a deployment, and says for each line what to do.

Reads only: it never changes the store, and works on one that cannot be written. Each check is a transaction of its own,
so that one that fails (a privilege that is missing, a damaged table) takes no other with it. What only one of the
databases has is in `sqlite.py` and `postgres.py` beside this file; `triage` is for a store that cannot be opened.
"""

from __future__ import annotations

from datetime import date, timedelta
from functools import partial

from perdure.errors import PerdureError
from perdure.log import store_size
from perdure.ops.doctor.findings import (
    DAY_S,
    GB,
    MB,
    Check,
    CheckContext,
    Finding,
    Level,
    Machine,
    looked,
    many,
    query_one,
    span,
)
from perdure.storage import migrate
from perdure.storage.program import Flow, Sql, read
from perdure.storage.urls import is_postgres
from perdure.threads.context import Context
from perdure.values.amounts import size as shown

__all__ = ["Finding", "Level", "Machine", "examine", "triage", "would_change"]

_FULL_SOON_DAYS, _FULL_LATER_DAYS = 7, 45
_FREE_BYTES_MIN = 512 * MB
_FREE_SHARE_MIN = 0.05
_BACKUP_DAYS_MAX, _RESTORE_DAYS_MAX = 2, 90
_LARGE_BYTES = 1 * GB
_LATE_S = 600  # a run that is due for so long has no worker
_FUTURE_MINUTES = 2
_US = 1_000_000

_COPIES = Sql("SELECT max(at), max(restored_at), count(*) FROM copy WHERE kind = 'backup'")
_RETENTION = Sql(
    """SELECT (SELECT count(*) FROM meta WHERE key LIKE 'retention %'),
    EXISTS (SELECT 1 FROM thread WHERE retention IS NOT NULL), EXISTS (SELECT 1 FROM thread)"""
)
_STUCK = Sql(
    """SELECT (SELECT count(*) FROM run WHERE tenant IN (SELECT tenant FROM tenant) AND status = 'stuck'),
    (SELECT count(*) FROM ask WHERE status = 'open' AND kind = 'doubt'),
    (SELECT count(*) FROM run WHERE status = 'running' AND lease_until < {now} - :late),
    (SELECT count(*) FROM run WHERE status = 'queued' AND wake_at < {now} - :late AND changed_at < {now} - :late)"""
)
_SEALS = Sql("SELECT count(*), (SELECT count(*) FROM tenant) FROM tenant_key")
_NEWEST = Sql("SELECT max(active) FROM thread")
_APPLIED = Sql("SELECT max(version) FROM migration")


def examine(ctx: Context, machine: Machine | None = None) -> Flow[list[Finding]]:
    """The whole list, in its order."""
    context = CheckContext(ctx, ctx.driver.capabilities.base, machine or Machine())
    found: list[Finding] = []
    for name, look in _checks(context):
        found += yield from looked(context, name, look)
    return found


def _checks(context: CheckContext) -> list[tuple[str, Check]]:
    if context.is_sqlite:
        from perdure.ops.doctor import sqlite as special
    else:
        from perdure.ops.doctor import postgres as special  # type: ignore[no-redef]
    return [
        *special.FIRST,
        ("backups", backups),
        ("retention", retention),
        *special.THEN,
        ("disk", disk),
        ("clock", clock),
        ("schema", schema),
        ("runs", runs),
        ("encryption", encryption),
    ]


def triage(url: str, error: PerdureError, machine: Machine | None = None) -> list[Finding]:
    """What can be said of a store that cannot be opened. The error's text says what to do."""
    found = [Finding("open", "problem", f"the store cannot be opened: {error}", "see above; then run the doctor again")]
    if not is_postgres(url):
        from perdure.ops.doctor.sqlite import outside

        found += outside(url, machine or Machine())
    return found


def would_change(url: str) -> Finding | None:
    """What opening a store would change, if anything: an old schema is brought up to date. Changes nothing itself."""
    if is_postgres(url):
        return None  # on PostgreSQL `create=False` refuses that by itself
    from perdure.ops.doctor.sqlite import look_before_opening

    return look_before_opening(url)


# --- backups, retention


def backups(context: CheckContext) -> Flow[list[Finding]]:
    """When the last one was made, and when one was last restored in a test."""
    at, restored_at, count = yield from query_one(context, _COPIES)
    now = context.machine.clock_us()
    if not count:
        return [
            Finding(
                "backups",
                "warning",
                "no backup was ever made with Perdure",
                "run `perdure store backup` every day, or make sure that something else does (then ignore this)",
            )
        ]
    age_s = max(0, now - at) / _US
    level: Level = "ok" if age_s <= _BACKUP_DAYS_MAX * DAY_S else "warning"
    hint = "" if level == "ok" else "run `perdure store backup`; a timer should do it every day"
    made = Finding("backups", level, f"the last backup was made {span(age_s)} ago", hint)
    if restored_at is None:
        message, hint = "no backup was ever restored in a test", "run `perdure store restore FILE --test`"
        return [made, Finding("restore", "warning", message, hint)]
    age_s = max(0, now - restored_at) / _US
    tried: Level = "ok" if age_s <= _RESTORE_DAYS_MAX * DAY_S else "warning"
    message = f"a backup was last restored, and found whole, {span(age_s)} ago"
    return [
        made,
        Finding(
            "restore", tried, message, "" if tried == "ok" else "try it again: `perdure store restore FILE --test`"
        ),
    ]


def retention(context: CheckContext) -> Flow[list[Finding]]:
    """Whether anything ever removes old checkpoints."""
    policies, on_threads, used = yield from query_one(context, _RETENTION)
    if policies or on_threads:
        return [
            Finding(
                "retention", "ok", "old checkpoints are removed by a retention policy; `perdure store compact` does it"
            )
        ]
    if not used:
        return [Finding("retention", "ok", "no checkpoints are stored yet")]
    stored = yield from stored_bytes(context)
    level: Level = "warning" if stored > _LARGE_BYTES else "note"
    return [
        Finding(
            "retention",
            level,
            f"checkpoints are kept for ever ({shown(stored)} so far)",
            "if that is not meant, set a ttl or keep_last (how-to/retention) and run `perdure store compact` daily",
        )
    ]


# --- space


def stored_bytes(context: CheckContext) -> Flow[int]:
    """What the store takes on its disk."""
    if context.is_sqlite:
        from perdure.ops.doctor.sqlite import file_bytes

        return file_bytes(context.driver.path)
    from perdure.ops.doctor.postgres import BYTES

    [found] = yield from query_one(context, BYTES)
    return int(found)


def growth_per_day(context: CheckContext) -> Flow[float | None]:
    """Bytes per day, from the sizes that were noted; None: not known yet."""
    size, samples = yield from read(partial(store_size.size_and_samples, context.machine.clock_us()))
    return store_size.growth_per_day([*samples, size])


def disk(context: CheckContext) -> Flow[list[Finding]]:
    """How much is free, how fast the store grows, and when the two meet."""
    stored = yield from stored_bytes(context)
    growth = yield from growth_per_day(context)
    grows = "how fast it grows is not known yet" if growth is None else f"it grows by {shown(max(0, growth))} a day"
    place = yield from _place(context)
    if place is None:
        message = f"the store takes {shown(stored)}; {grows}; the server's disk cannot be seen from here"
        return [Finding("disk", "note", message, "watch the server's free disk; a full one stops every write")]
    total, free = context.machine.disk(place)
    message = f"the store takes {shown(stored)}; {grows}; {shown(free)} of {shown(total)} are free"
    if growth is not None and growth > 0:
        days = free / growth
        full = (date.today() + timedelta(days=min(days, 36_500))).isoformat()
        message += f"; the disk is full in {span(days * DAY_S)} ({full})" if days < 3650 else ""
        if days < _FULL_LATER_DAYS:
            level: Level = "problem" if days < _FULL_SOON_DAYS else "warning"
            return [
                Finding("disk", level, message, "set retention and run `perdure store compact`, or get a larger disk")
            ]
    if free < _FREE_BYTES_MIN or free < total * _FREE_SHARE_MIN:
        level = "problem" if free < _FREE_BYTES_MIN else "warning"
        return [Finding("disk", level, message, "free some space now: a full disk stops every write")]
    if free < stored:
        hint = "make room for one copy: `perdure store compact` and a backup beside it need as much again"
        return [Finding("disk", "warning", message, hint)]
    return [Finding("disk", "ok", message)]


def _place(context: CheckContext) -> Flow[str | None]:
    """A path on the store's disk, if this machine sees it."""
    if context.is_sqlite:
        from perdure.ops.doctor.sqlite import folder_of

        return folder_of(context.driver.path)
    from perdure.ops.doctor.postgres import data_folder

    return (yield from data_folder(context))


# --- time


def clock(context: CheckContext) -> Flow[list[Finding]]:
    """This machine's clock: against the server's, and against what was saved."""
    found: list[Finding] = []
    if not context.is_sqlite:
        from perdure.ops.doctor.postgres import clock_against_server

        found += yield from clock_against_server(context)
    [newest] = yield from query_one(context, _NEWEST)
    minutes = context.machine.clock_us() // (60 * _US)
    if newest is not None and newest > minutes + _FUTURE_MINUTES:
        ahead = span((newest - minutes) * 60)
        message = f"the newest checkpoint is {ahead} in the future: a clock is wrong, or was set back"
        found.append(
            Finding("clock", "warning", message, "set the clocks of all writers by NTP (chrony, systemd-timesyncd)")
        )
    if all(finding.level == "ok" for finding in found):
        return found or [Finding("clock", "ok", "nothing is from the future")]
    return [finding for finding in found if finding.level != "ok"]


# --- the store itself


def schema(context: CheckContext) -> Flow[list[Finding]]:
    """An open store has the newest: opening brings it up to date, and refuses what is newer."""
    dialect = context.driver.dialect
    [version] = yield from query_one(context, _APPLIED)
    newest = migrate.newest(dialect)
    if version == newest:
        return [Finding("schema", "ok", f"schema {version}, the newest that this Perdure knows")]
    if version < newest:
        return [schema_is_old(version, newest)]
    message = f"schema {version}, and this Perdure knows {newest}: another process has a newer one"
    return [Finding("schema", "problem", message, "upgrade Perdure everywhere")]


def schema_is_old(version: int, newest: int) -> Finding:
    return Finding(
        "schema",
        "warning",
        f"schema {version}; this Perdure writes {newest}",
        "make a backup, then open the store once with this Perdure: that brings it up to date. Older versions of "
        "Perdure cannot open it after that",
    )


def runs(context: CheckContext) -> Flow[list[Finding]]:
    """Runs that need somebody."""
    params = {"late": _LATE_S * _US, "now": context.ctx.clock_us()}
    stuck, doubts, leases, due = yield from query_one(context, _STUCK, **params)
    found: list[Finding] = []
    if doubts:
        message = f"{many(doubts, 'effect')} in doubt: nobody knows whether they happened"
        found.append(
            Finding("runs", "warning", message, "look with `perdure questions`, say it with `perdure run resolve`")
        )
    if stuck:
        message = f"{many(stuck, 'run')} stuck: they cannot go on by themselves"
        found.append(
            Finding("runs", "warning", message, "look with `perdure runs --status stuck`; then `perdure run resume`")
        )
    if leases:
        message = f"{many(leases, 'run')} whose process died more than {span(_LATE_S)} ago, and nobody took over"
        found.append(Finding("runs", "warning", message, "run a worker: `perdure worker app.py`"))
    if due:
        message = f"{many(due, 'run')} due for more than {span(_LATE_S)}"
        found.append(
            Finding("runs", "warning", message, "run a worker of their queue and version: `perdure worker app.py`")
        )
    return found or [
        Finding("runs", "ok", f"no run is stuck or in doubt, and none has been due for more than {span(_LATE_S)}")
    ]


def encryption(context: CheckContext) -> Flow[list[Finding]]:
    """Whether states are encrypted in the database, and whether the keys are here."""
    sealed, tenants = yield from query_one(context, _SEALS)
    if not sealed:
        message = "states are not encrypted in the database"
        return [Finding("encryption", "note", message, "if the disk or its backups are not, see how-to/encryption")]
    found = Finding("encryption", "ok", f"{sealed} of {many(tenants, 'tenant')} encrypted")
    if sealed < tenants:
        found = Finding(
            "encryption",
            "warning",
            found.message,
            "`perdure keys encrypt --tenant NAME` for each that `perdure keys` shows without a key",
        )
    from perdure.ops.doctor.keys import keys

    wrong = yield from keys(context)
    return [found, *wrong]
