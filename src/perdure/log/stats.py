"""Count a tenant's threads, records and bytes in the database."""

from __future__ import annotations

from perdure.storage.program import Batch, Program, Sql

_THREADS = Sql("SELECT count(*) FROM thread WHERE tenant = :tenant")
_RECORDS = Sql(
    """SELECT count(*), CAST(coalesce(sum(keyframe), 0) AS bigint), CAST(coalesce(sum(size), 0) AS bigint)
    FROM record WHERE tenant = :tenant AND body IS NOT NULL"""
)
_BODIES = Sql(
    """SELECT CAST(coalesce(sum(length(diff)), 0) AS bigint), CAST(coalesce(sum(length(full_text)), 0) AS bigint)
    FROM body WHERE tenant = :tenant"""
)
_WRITES = Sql("SELECT CAST(coalesce(sum(length(value)), 0) AS bigint) FROM write WHERE tenant = :tenant")


def count(tenant: int) -> Program[tuple[int, int, int, int, int, int, int]]:
    """Count threads, records and keyframes; bytes of differences, full texts, all states as JSON, pending writes."""
    [
        [(threads,)],
        [(records, keyframes, states)],
        [(differences, full_texts)],
        [(pending,)],
    ] = yield Batch(
        _THREADS(tenant=tenant),
        _RECORDS(tenant=tenant),
        _BODIES(tenant=tenant),
        _WRITES(tenant=tenant),
        last=True,
    )
    return threads, records, keyframes, differences, full_texts, states, pending
