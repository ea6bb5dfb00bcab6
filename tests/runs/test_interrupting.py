"""Tests that raise KeyboardInterrupt anywhere: one that reaches pytest ends its process, so each file has its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interrupting_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interrupts_leave_nothing_locked_and_no_run_claimed(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(file), "--timeout", "120"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stdout + child.stderr
