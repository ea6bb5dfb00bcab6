"""For the tests of the doctor: a store, what the doctor says of it, and raw writes that make it ill."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest

import perdure
from perdure.ops.doctor.checklist import Finding, Machine, examine
from perdure.storage import migrate
from perdure.storage.program import Batch, Dialect, Rows, Sql, Transaction, drive

DAY_US = 86_400_000_000
LEVELS = ("ok", "note", "warning", "problem")


def add_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this Perdure knows one migration more: stores that exist are older than it."""
    real = migrate.migrations

    def with_later(dialect: Dialect) -> tuple[migrate.Migration, ...]:
        known = real(dialect)
        later = migrate.Migration(len(known) + 1, "later", "CREATE TABLE later (tenant bigint)")
        return (*known, later)

    monkeypatch.setattr(migrate, "migrations", with_later)


def now_us() -> int:
    return time.time_ns() // 1000


def raw(store: perdure.Store, text: str, **params: Any) -> Rows:
    """A statement as it is, in a write transaction of its own."""

    def program() -> Generator[Batch, list[Rows], Rows]:
        [rows] = yield Batch(Sql(text)(**params))
        return rows

    found: Rows = store._context.driver.run(Transaction(program, write=True))
    return found


def said(store: perdure.Store, **machine: Any) -> dict[str, list[Finding]]:
    """What the doctor says, by check. Every line that is not fine says what to do."""
    found: dict[str, list[Finding]] = {}
    for finding in drive(store._context.driver, examine(store._context, Machine(**machine))):
        assert finding.level in LEVELS
        assert finding.message
        assert finding.level in ("ok", "note") or finding.hint, finding
        found.setdefault(finding.check, []).append(finding)
    return found


def worst(findings: list[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index)


def text_of(findings: list[Finding]) -> str:
    return " | ".join(f"{finding.message} -> {finding.hint}" for finding in findings)
