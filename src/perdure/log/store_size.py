"""The size of a store and its growth, from at most one sample per hour and a line fitted through the last ones.

`store.ops.health()` and the workers' maintenance take the samples. Nothing here counts rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
_LOOK_BACK_US = 14 * DAY_US  # growth is computed over the last two weeks
_KEEP_US = 400 * DAY_US
# SQLite: the file's pages. PostgreSQL: the size on disk of this schema's tables with their indexes.
_SIZE = Sql(
    sqlite="""SELECT p.page_count * s.page_size, f.freelist_count * s.page_size
    FROM pragma_page_count AS p, pragma_page_size AS s, pragma_freelist_count AS f""",
    postgres="""SELECT CAST(coalesce(sum(pg_total_relation_size(oid)), 0) AS bigint), CAST(0 AS bigint) FROM pg_class
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND relkind = 'r'""",
)
_SAMPLES = Sql("SELECT at, bytes, free_bytes FROM size_sample WHERE at > :since ORDER BY at")
# On PostgreSQL, a role that is bound to one tenant inserts no sample.
_ADD = Sql(
    sqlite="INSERT INTO size_sample (at, bytes, free_bytes) VALUES (:at, :bytes, :free) ON CONFLICT (at) DO NOTHING",
    postgres="""INSERT INTO size_sample (at, bytes, free_bytes)
    SELECT CAST(:at AS bigint), CAST(:bytes AS bigint), CAST(:free AS bigint) WHERE serves_several_tenants()
    ON CONFLICT (at) DO NOTHING""",
)
# A sample from the future comes from a wrong clock.
_DROP_OLD = Sql("DELETE FROM size_sample WHERE at < :before OR at > :after")


class Sample(NamedTuple):
    """The size of the store at a time. `free_bytes` is the part of `bytes` that can be reused."""

    at: int  # microseconds since 1970
    bytes: int
    free_bytes: int


def size_and_samples(now: int) -> Generator[Batch, list[Rows], tuple[Sample, list[Sample]]]:
    """Return the size now, and the samples of the last two weeks, oldest first."""
    [[(size, free)], rows] = yield Batch(_SIZE(), _SAMPLES(since=now - _LOOK_BACK_US))
    return Sample(now, size, free), [Sample(*row) for row in rows if row[0] <= now]


def is_due(samples: Sequence[Sample], now: int) -> bool:
    return not samples or now - samples[-1].at >= HOUR_US


def add_sample(sample: Sample) -> Program[None]:
    yield Batch(
        _ADD(at=sample.at, bytes=sample.bytes, free=sample.free_bytes),
        _DROP_OLD(before=sample.at - _KEEP_US, after=sample.at + HOUR_US),
        last=True,
    )


def take_sample(clock_us: Callable[[], int]) -> Flow[None]:
    """Take a sample if the last one is at least an hour old."""

    def program(now: int) -> Program[None]:
        sample, samples = yield from size_and_samples(now)
        if is_due(samples, now):
            yield from add_sample(sample)

    yield from write(partial(program, clock_us()))


def growth_per_day(samples: Sequence[Sample]) -> float | None:
    """Return the growth in bytes per day, by linear regression. Return None if the samples cover less than an hour."""
    if len(samples) < 2 or samples[-1].at - samples[0].at < HOUR_US:
        return None
    days = [(sample.at - samples[0].at) / DAY_US for sample in samples]
    used = [sample.bytes - sample.free_bytes for sample in samples]
    mean_day, mean_used = sum(days) / len(days), sum(used) / len(used)
    spread = sum((day - mean_day) ** 2 for day in days)
    return sum((day - mean_day) * (size - mean_used) for day, size in zip(days, used, strict=True)) / spread
