"""For the tests of the doctor: a store, what the doctor says of it, and raw writes that make it ill."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import perdure
from perdure.ops.doctor.checklist import Finding, examine
from perdure.storage.program import Batch, Rows, Sql, Transaction, drive
from perdure.storage.sqlite import opening

DAY_US = 86_400_000_000
LEVELS = ("ok", "note", "warning", "problem")


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
    """What the doctor says, by check. Every line that is not fine says what to do. `machine`: what it finds there
    instead: free_bytes, mounts, clock_us."""
    context = replace(store._context, clock_us=machine.get("clock_us", store._context.clock_us))
    with pytest.MonkeyPatch.context() as patch:
        if "free_bytes" in machine:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=machine["free_bytes"]))
        if "mounts" in machine:
            patch.setattr(opening, "read_mountinfo", lambda: machine["mounts"])
        findings = drive(context.driver, examine(context))
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        assert finding.level in LEVELS
        assert finding.message
        assert finding.level in ("ok", "note") or finding.hint, finding
        found.setdefault(finding.check, []).append(finding)
    return found


def worst(findings: list[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index)


def text_of(findings: list[Finding]) -> str:
    return " | ".join(f"{finding.message} -> {finding.hint}" for finding in findings)
