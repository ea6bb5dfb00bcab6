"""The doctor's checks that only a store on PostgreSQL has: the server's settings, connections, transactions, roles.

They read views that every role may read; a check that needs more rights says so. Settings are those of this session,
because the store uses them so.
"""

from __future__ import annotations

from time import monotonic

from perdure.ops.doctor.findings import HOUR_S, MINUTE_S, Check, Finding, Level, span
from perdure.storage.program import Flow, Sql, Transaction, fetch
from perdure.threads.context import StoreContext

_LONG_S, _VERY_LONG_S = 5 * MINUTE_S, HOUR_S
_USED_MAX = 0.8

_SETTINGS = Sql(
    postgres="SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(string_to_array(:names, ','))"
)
_ACTIVITY = Sql(
    postgres="""SELECT pid, coalesce(usename, '')::text, coalesce(application_name, ''), coalesce(state, ''),
        coalesce(extract(epoch FROM clock_timestamp() - xact_start), 0)::float8
    FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND datname = current_database() ORDER BY xact_start LIMIT 1"""
)
_USED = Sql(
    # Without pg_read_all_stats, backend_type of other roles' sessions is NULL. Nearly all of them are clients.
    postgres="""SELECT count(*), count(*) FILTER (WHERE application_name = 'perdure') FROM pg_stat_activity
    WHERE coalesce(backend_type, 'client backend') = 'client backend' AND datname IS NOT NULL"""
)
_LEFT = Sql(
    postgres="""SELECT p.gid, extract(epoch FROM clock_timestamp() - p.prepared)::float8,
        EXISTS (SELECT 1 FROM prepared o WHERE o.gid = p.gid)
    FROM pg_prepared_xacts p WHERE p.database = current_database()
    AND p.prepared < clock_timestamp() - interval '1 minute' ORDER BY p.prepared LIMIT 5"""
)
_TENANTS = Sql(postgres="SELECT count(*) FROM tenant")
_NOW = Sql(postgres="SELECT {now}")


def settings(*names: str) -> Flow[dict[str, str]]:
    """Return settings by name. A setting that this role may not see is missing."""
    rows = yield from fetch(_SETTINGS, names=",".join(names))
    return {str(name): str(value) for name, value in rows}


def place(ctx: StoreContext) -> Flow[list[Finding]]:
    """Report the server, database and schema of the store."""
    yield from ()
    return [Finding("place", "ok", str(ctx.driver.capabilities.base))]


def durability(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that a commit is on the server's disk when the call returns."""
    values = yield from settings(
        *("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names", "data_checksums")
    )
    off = [name for name in ("fsync", "full_page_writes") if values.get(name) == "off"]
    if off:
        message = f"{' and '.join(off)} off: a crash of the server's machine may destroy the whole database"
        return [
            Finding("durability", "problem", message, f"set {' and '.join(off)} = on in postgresql.conf, and reload")
        ]
    if values.get("synchronous_commit") == "off":
        message = "synchronous_commit is off for this store: a crash of the server may lose the last commits"
        hint = 'open it with durability="full", the default, unless that is meant; behind PgBouncer set it for the role'
        return [Finding("durability", "warning", message, hint)]
    if values.get("synchronous_commit") == "remote_apply" and not values.get("synchronous_standby_names"):
        message = "this store waits for a standby, and the server names none: a commit is on one server alone"
        hint = "set synchronous_standby_names on the primary, and reload (docs/how-to/postgresql.md)"
        return [Finding("durability", "problem", message, hint)]
    message = (
        f"fsync and full_page_writes are on, synchronous_commit is {values.get('synchronous_commit', 'not visible')}"
    )
    if values.get("data_checksums") == "off":
        hint = "pg_checksums --enable, with the server stopped: it finds what the disk has damaged"
        return [Finding("durability", "note", message + "; pages have no checksums", hint)]
    return [Finding("durability", "ok", message)]


def connections(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that the server has connections left for the pools of all processes."""
    limits = yield from settings("max_connections", "superuser_reserved_connections")
    most = int(limits["max_connections"]) - int(limits.get("superuser_reserved_connections", 3))
    [(used, ours)] = yield from fetch(_USED)
    message = f"{used} of {most} connections in use, {ours} by Perdure"
    hint = "make pools smaller (pool_size), put PgBouncer in between, or raise max_connections"
    return [Finding.of("connections", used > most * _USED_MAX, message, hint)]


def roles(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that the database itself keeps tenants apart."""
    from perdure.storage.postgres.tenants import tenant_security

    security = yield Transaction(tenant_security)
    hint = "`perdure store role app NAME` makes a role that sees one tenant at a time (docs/how-to/postgresql.md)"
    if security.gaps:
        message = f"row-level security is not in force on {', '.join(security.gaps)}"
        return [
            Finding(
                "roles",
                "problem",
                message,
                "open the store once as its owner, or run ALTER TABLE … FORCE ROW LEVEL SECURITY",
            )
        ]
    if security.held:
        whose = f"to tenant {security.tenant!r}" if security.sees == "bound" else "to one tenant at a time"
        message = f'the database holds the role "{security.role}" {whose}; the figures here are what it sees'
        return [Finding("roles", "ok", message, "run the doctor with an operator's role to see all tenants")]
    if security.rights:
        message = (
            f'the role "{security.role}" is held to a tenant, but could reach around it: {", ".join(security.rights)}'
        )
        return [Finding("roles", "problem", message, "revoke that, or make the role anew with `perdure store role`")]
    [(tenants,)] = yield from fetch(_TENANTS)
    kind = "a superuser" if security.superuser else "the tables' owner" if security.owner else "an operator"
    message = f'the role "{security.role}" is {kind} and sees all tenants ({tenants})'
    if tenants > 1:
        return [Finding("roles", "warning", message + ": only the application keeps them apart", hint)]
    return [Finding("roles", "note" if security.superuser or security.owner else "ok", message, hint)]


def transactions(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check the age of the oldest open transaction, which blocks vacuuming and may hold locks, and autovacuum."""
    findings: list[Finding] = []
    rows = yield from fetch(_ACTIVITY)
    for pid, user, application, state, age_s in rows:
        whose = f'of "{user}"' + (f" ({application})" if application else "")
        message = (
            f"the oldest open transaction {whose} has lasted {span(age_s)}, process {pid}, {state or 'state hidden'}"
        )
        if age_s > _LONG_S:
            level: Level = "problem" if age_s > _VERY_LONG_S else "warning"
            hint = f"find out what it does, or end it: SELECT pg_terminate_backend({pid})"
            if state.startswith("idle in transaction"):
                hint += "; idle_in_transaction_session_timeout ends such by itself"
            findings.append(Finding("transactions", level, message, hint))
    vacuum = yield from settings("autovacuum")
    if vacuum.get("autovacuum") == "off":
        message = "autovacuum is off: tables only grow, and the server stops when transaction ids run out"
        findings.append(Finding("transactions", "problem", message, "set autovacuum = on"))
    if findings:
        return findings
    return [Finding("transactions", "ok", f"no visible transaction is open for more than {span(_LONG_S)}")]


def server_clock(ctx: StoreContext) -> Flow[list[Finding]]:
    """Compare this machine's clock with the server's, which leases use."""
    before_us, begun = ctx.clock_us(), monotonic()
    [(server_us,)] = yield from fetch(_NOW)
    trip_s = monotonic() - begun
    apart_s = abs(int(server_us) - before_us) / 1e6 - trip_s
    if apart_s > 2:
        level: Level = "problem" if apart_s > MINUTE_S else "warning"
        message = f"this machine's clock is {span(apart_s)} off the database server's"
        hint = "set both by NTP (chrony, systemd-timesyncd): checkpoints carry this machine's time, leases the server's"
        return [Finding("clock", level, message, hint)]
    return [Finding("clock", "ok", "this machine's clock agrees with the database server's")]


def prepared(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that no prepared transaction was left behind, and whether there can be any."""
    late = yield from fetch(_LEFT)
    findings = [
        Finding(
            "prepared",
            "problem",
            f"the prepared transaction {gid} has waited for {span(age_s)}: it holds locks, and stops snapshots",
            "`perdure store settle` with both stores ends it"
            if is_known
            else f"if it is not another program's: ROLLBACK PREPARED '{gid}'",
        )
        for gid, age_s, is_known in late
    ]
    if (yield from settings("max_prepared_transactions")).get("max_prepared_transactions") == "0":
        message = "max_prepared_transactions is 0: two_phase() cannot use this store with another PostgreSQL store"
        hint = "if you need that, set it to 20 in postgresql.conf, and restart the server"
        return [*findings, Finding("prepared", "note", message, hint)]
    return findings or [Finding("prepared", "ok", "no prepared transaction is left behind")]


CHECKS: tuple[Check, ...] = (place, durability, connections, roles, transactions, prepared, server_clock)
