"""The doctor's checks that only a store on PostgreSQL has: the server's settings, connections, transactions, roles.

All from views that every role may read; what needs more rights says so and goes on. Settings are looked at as they are
for this session, which is how the store uses them.
"""

from __future__ import annotations

import os
from datetime import date
from time import monotonic

from perdure.ops.doctor.findings import (
    DAY_S,
    GB,
    HOUR_S,
    MINUTE_S,
    Finding,
    Level,
    Look,
    Patient,
    many,
    query,
    query_one,
    span,
)
from perdure.storage.program import Flow, Sql, Transaction
from perdure.values.amounts import size as shown

# The last release of each major version (postgresql.org/support/versioning).
ENDS = {
    14: date(2026, 11, 12),
    15: date(2027, 11, 11),
    16: date(2028, 11, 9),
    17: date(2029, 11, 8),
    18: date(2030, 11, 14),
}
_LONG_S, _VERY_LONG_S = 5 * MINUTE_S, HOUR_S
_SLOT_LARGE, _SLOT_HUGE = 1 * GB, 20 * GB
_XID_AGE_MAX = 1_500_000_000  # of 2,100,000,000: then the server stops taking writes
_USED_MAX = 0.8
_LOCAL = ("localhost", "127.0.0.1", "::1", "the local socket")

_SETTINGS = Sql(
    postgres="SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(string_to_array(:names, ','))"
)
_ACTIVITY = Sql(
    postgres="""SELECT pid, coalesce(usename, '')::text, coalesce(application_name, ''), coalesce(state, ''),
        coalesce(extract(epoch FROM clock_timestamp() - xact_start), 0)::float8
    FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND datname = current_database() ORDER BY xact_start LIMIT 1"""
)
_HIDDEN = Sql(postgres="SELECT NOT pg_has_role('pg_read_all_stats', 'USAGE')")
_PREPARED = Sql(
    postgres="""SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
    ORDER BY prepared LIMIT 1"""
)
_XID_AGE = Sql(postgres="SELECT age(datfrozenxid)::bigint FROM pg_database WHERE datname = current_database()")
_SLOTS = Sql(
    postgres="""SELECT slot_name::text, active, pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN
        pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END, restart_lsn)::bigint
    FROM pg_replication_slots WHERE restart_lsn IS NOT NULL ORDER BY 3 DESC LIMIT 1"""
)
_MAY_LIST = Sql(postgres="SELECT has_function_privilege('pg_ls_waldir()', 'EXECUTE')")
_WAL = Sql(postgres="SELECT coalesce(sum(size), 0)::bigint FROM pg_ls_waldir()")
_ARCHIVER = Sql(
    postgres="""SELECT archived_count, coalesce(last_failed_time > last_archived_time, last_failed_time IS NOT NULL),
        coalesce(extract(epoch FROM clock_timestamp() - last_archived_time), 0)::float8 FROM pg_stat_archiver"""
)
_USED = Sql(
    # The kind of others' sessions is hidden from a role without pg_read_all_stats; they are clients, nearly all.
    postgres="""SELECT count(*), count(*) FILTER (WHERE application_name = 'perdure') FROM pg_stat_activity
    WHERE coalesce(backend_type, 'client backend') = 'client backend' AND datname IS NOT NULL"""
)
_HOSTS = Sql(
    postgres="""SELECT count(DISTINCT split_part(owner, ':', 3)) FROM run
    WHERE status = 'running' AND owner LIKE 'p:%'"""
)
_TENANTS = Sql(postgres="SELECT count(*) FROM tenant")
_NOW = Sql(postgres="SELECT {now}")
BYTES = Sql(
    postgres="""SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
    WHERE c.relnamespace = to_regnamespace(current_schema()) AND c.relkind IN ('r', 'p', 'm')"""
)


def settings(patient: Patient, *names: str) -> Flow[dict[str, str]]:
    """Settings by their names; one that this role may not see is missing."""
    rows = yield from query(patient, _SETTINGS, names=",".join(names))
    return {str(name): str(value) for name, value in rows}


def place(patient: Patient) -> Flow[list[Finding]]:
    [hosts] = yield from query_one(patient, _HOSTS)
    says = str(patient.driver._target)
    return [Finding("place", "ok", says + (f"; runs of {many(hosts, 'machine')}" if hosts else ""))]


def durability(patient: Patient) -> Flow[list[Finding]]:
    """Whether what a call returned from is on the server's disk."""
    found = yield from settings(
        patient, "fsync", "full_page_writes", "synchronous_commit", "data_checksums", "wal_level"
    )
    off = [name for name in ("fsync", "full_page_writes") if found.get(name) == "off"]
    if off:
        says = f"{' and '.join(off)} off: a crash of the server's machine may destroy the whole database"
        return [Finding("durability", "problem", says, f"set {' and '.join(off)} = on in postgresql.conf, and reload")]
    if found.get("synchronous_commit") == "off":
        says = "synchronous_commit is off for this store: a crash of the server may lose the last commits"
        do = 'open it with durability="full", the default, unless that is meant; behind PgBouncer set it for the role'
        return [Finding("durability", "warning", says, do)]
    says = f"fsync and full_page_writes are on, synchronous_commit is {found.get('synchronous_commit', 'not visible')}"
    if found.get("data_checksums") == "off":
        do = "pg_checksums --enable, with the server stopped: it finds what the disk has damaged"
        return [Finding("durability", "note", says + "; pages have no checksums", do)]
    return [Finding("durability", "ok", says)]


def log(patient: Patient) -> Flow[list[Finding]]:
    """The server's write-ahead log: how large, who holds it back, and whether it is kept elsewhere."""
    found: list[Finding] = []
    slots = yield from query(patient, _SLOTS)
    for name, active, behind in slots:
        if behind is not None and behind > _SLOT_LARGE:
            level: Level = "problem" if behind > _SLOT_HUGE else "warning"
            says = f'replication slot "{name}" holds back {shown(behind)} of the log' + ("" if active else ", unused")
            do = "if nobody needs it: SELECT pg_drop_replication_slot(…); and set max_slot_wal_keep_size"
            found.append(Finding("log", level, says, do))
    modes = yield from settings(patient, "archive_mode")
    if modes.get("archive_mode", "off") == "off":
        says = "archive_mode is off: the database can be restored to a backup, not to a moment between two"
        do = "if losing a day is too much, archive the log (pgBackRest, WAL-G), or use a service that does"
        found.append(Finding("log", "note", says, do))
    else:
        _, failing, age_s = yield from query_one(patient, _ARCHIVER)
        if failing:
            says = f"archiving the log fails; it worked {span(age_s)} ago" if age_s else "archiving the log fails"
            found.append(Finding("log", "problem", says, "look into the server's log; until then the disk fills"))
    [may] = yield from query_one(patient, _MAY_LIST)
    if may:
        [bytes_] = yield from query_one(patient, _WAL)
        found.append(Finding("log", "ok", f"the server's write-ahead log has {shown(bytes_)}"))
    return found


def connections(patient: Patient) -> Flow[list[Finding]]:
    """Whether the server has room for the pools of all processes."""
    driver = patient.driver
    limits = yield from settings(patient, "max_connections", "superuser_reserved_connections")
    most = int(limits["max_connections"]) - int(limits.get("superuser_reserved_connections", 3))
    used, ours = yield from query_one(patient, _USED)
    pool = int(driver._pool_size)
    says = f"{used} of {most} connections in use, {ours} by Perdure; this process may take {pool}, and as many per loop"
    if pool > most:
        do = f"open the store with pool_size below {most}, or raise max_connections"
        return [Finding("connections", "problem", says, do)]
    found: list[Finding] = []
    if not driver._startup_options:
        do = "in transaction mode: open with prepare=False, or a PgBouncer from 1.21 with max_prepared_statements"
        found.append(
            Finding("connections", "note", "behind a pooler (PgBouncer), which refuses settings at the start", do)
        )
    if used > most * _USED_MAX:
        do = "make pools smaller (pool_size), put PgBouncer in between, or raise max_connections"
        return [*found, Finding("connections", "warning", says, do)]
    return [*found, Finding("connections", "ok", says)]


def roles(patient: Patient) -> Flow[list[Finding]]:
    """Whether the database itself keeps tenants apart."""
    from perdure.storage.postgres_tenants import tenant_security

    security = yield Transaction(tenant_security)
    do = "`perdure store role app NAME` makes a role that sees one tenant at a time (how-to/postgresql-in-production)"
    if security.gaps:
        says = f"row-level security is not in force on {', '.join(security.gaps)}"
        return [
            Finding(
                "roles",
                "problem",
                says,
                "open the store once as its owner, or run ALTER TABLE … FORCE ROW LEVEL SECURITY",
            )
        ]
    if security.held:
        whose = f"to tenant {security.tenant!r}" if security.sees == "bound" else "to one tenant at a time"
        says = f'the database holds the role "{security.role}" {whose}; the figures here are what it sees'
        return [Finding("roles", "ok", says, "run the doctor with an operator's role to see all tenants")]
    if security.rights:
        says = (
            f'the role "{security.role}" is held to a tenant, but could reach around it: {", ".join(security.rights)}'
        )
        return [Finding("roles", "problem", says, "revoke that, or make the role anew with `perdure store role`")]
    [tenants] = yield from query_one(patient, _TENANTS)
    kind = "a superuser" if security.superuser else "the tables' owner" if security.owner else "an operator"
    says = f'the role "{security.role}" is {kind} and sees all tenants ({tenants})'
    if tenants > 1:
        return [Finding("roles", "warning", says + ": only the application keeps them apart", do)]
    return [Finding("roles", "note" if security.superuser or security.owner else "ok", says, do)]


def transactions(patient: Patient) -> Flow[list[Finding]]:
    """The oldest transaction that is open: it keeps the server from cleaning up, and may hold locks."""
    found: list[Finding] = []
    rows = yield from query(patient, _ACTIVITY)
    for pid, user, application, state, age_s in rows:
        whose = f'of "{user}"' + (f" ({application})" if application else "")
        says = f"the oldest open transaction {whose} has lasted {span(age_s)}, process {pid}, {state or 'state hidden'}"
        if age_s > _LONG_S:
            level: Level = "problem" if age_s > _VERY_LONG_S else "warning"
            do = f"find out what it does, or end it: SELECT pg_terminate_backend({pid})"
            if state.startswith("idle in transaction"):
                do += "; idle_in_transaction_session_timeout ends such by itself"
            found.append(Finding("transactions", level, says, do))
    for gid, age_s in (yield from query(patient, _PREPARED)):
        if age_s > _LONG_S:
            says = f"the prepared transaction {gid!r} has been open for {span(age_s)}"
            found.append(Finding("transactions", "problem", says, "COMMIT PREPARED or ROLLBACK PREPARED it"))
    [age] = yield from query_one(patient, _XID_AGE)
    if age > _XID_AGE_MAX:
        says = f"the database's oldest transaction id is {age:,} old; at 2,100,000,000 the server takes no more writes"
        found.append(Finding("transactions", "problem", says, "run VACUUM, and find what keeps autovacuum from it"))
    vacuum = yield from settings(patient, "autovacuum")
    if vacuum.get("autovacuum") == "off":
        says = "autovacuum is off: tables only grow, and the server stops when transaction ids run out"
        found.append(Finding("transactions", "problem", says, "set autovacuum = on"))
    if found:
        return found
    [hidden] = yield from query_one(patient, _HIDDEN)
    if hidden:
        do = "GRANT pg_read_all_stats to the doctor's role, to see those of others too"
        return [Finding("transactions", "ok", "no transaction of this role is open for long", do)]
    return [Finding("transactions", "ok", f"no transaction is open for more than {span(_LONG_S)}")]


def version(patient: Patient) -> Flow[list[Finding]]:
    """The server's version, and how long it gets fixes."""
    found = yield from settings(patient, "server_version_num", "server_version")
    return [version_finding(int(found["server_version_num"]), found["server_version"], date.today())]


def version_finding(number: int, text: str, today: date) -> Finding:
    major, minor = divmod(number, 10_000)
    says = f"PostgreSQL {text.split(' ')[0]}"
    ends = ENDS.get(major)
    if ends is not None and ends < today:
        return Finding(
            "postgresql", "warning", f"{says} gets no fixes since {ends}", "upgrade to a newer major version"
        )
    if major == 14 and minor < 4:
        says += " may damage indexes that are made or rebuilt CONCURRENTLY"
        return Finding("postgresql", "warning", says, "update to the newest 14, then REINDEX those")
    if ends is not None and (ends - today).days * DAY_S < 90 * DAY_S:
        return Finding(
            "postgresql", "note", f"{says} gets fixes until {ends}", "plan the upgrade to a newer major version"
        )
    return Finding("postgresql", "ok", says if ends is None else f"{says}, which gets fixes until {ends}")


FIRST: list[tuple[str, Look]] = [
    ("place", place),
    ("durability", durability),
    ("log", log),
    ("connections", connections),
    ("roles", roles),
    ("transactions", transactions),
]
THEN: list[tuple[str, Look]] = [("postgresql", version)]


# --- for the checks that both databases have


def data_folder(patient: Patient) -> Flow[str | None]:
    """The server's data folder, if it runs on this machine and this user may see it."""
    if patient.driver._target.host not in _LOCAL and not patient.driver._target.host.startswith("/"):
        return None
    found = yield from settings(patient, "data_directory")
    folder = found.get("data_directory")
    return folder if folder and os.path.isdir(folder) else None


def clock_against_server(patient: Patient) -> Flow[list[Finding]]:
    """How far this machine's clock is from the server's, which leases go by."""
    before_us, begun = patient.machine.clock_us(), monotonic()
    [server_us] = yield from query_one(patient, _NOW)
    trip_s = monotonic() - begun
    apart_s = abs(int(server_us) - before_us) / 1e6 - trip_s
    if apart_s > 2:
        level: Level = "problem" if apart_s > MINUTE_S else "warning"
        says = f"this machine's clock is {span(apart_s)} off the database server's"
        do = "set both by NTP (chrony, systemd-timesyncd): checkpoints carry this machine's time, leases the server's"
        return [Finding("clock", level, says, do)]
    return [Finding("clock", "ok", "this machine's clock agrees with the database server's")]
