"""The benchmarks run, and say by their exit code whether a bar was missed. Figures are judged by `make bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHEAP = ("workload", "sizes", "small", "append", "cold", "fork", "import")

ONE_ROW = """
import sys
from bench import __main__ as program
from bench.measure import Row
program.BENCHMARKS = {{"one": lambda run: [Row("one", 3.0, "ms", ratio=2.0, {row})]}}
sys.exit(program.main([{option!r}]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_cheap_benchmarks_run(tmp_path: Path) -> None:
    done = run("-m", "bench", "--quick", "--json", str(tmp_path / "rows.json"), "--folder", str(tmp_path), *CHEAP)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 18
    for row in rows:
        assert row["name"].strip() in done.stdout
        assert row["bar"] is None or row["passed"] is not None
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"], "a benchmark left files behind"


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("bar=2.0", 0),
        ("bar=1.9", 1),
        ("bar=2.0, sense='at least'", 0),
        ("bar=2.1, sense='at least'", 1),
        ("bar=2.5, judged='ours'", 1),
        ("", 0),
    ],
)
def test_a_missed_bar_is_exit_code_1(row: str, code: int) -> None:
    done = run("-c", ONE_ROW.format(row=row, option="one"))
    assert done.returncode == code, done.stderr
    assert ("FAIL" in done.stdout) == bool(code)


def test_a_smoke_run_judges_nothing() -> None:
    done = run("-c", ONE_ROW.format(row="bar=1.0", option="--quick"))
    assert done.returncode == 0, done.stderr
    assert "FAIL" not in done.stdout


def test_an_unknown_name_is_a_usage_error_that_lists_the_known_ones() -> None:
    done = run("-m", "bench", "nonsense")
    assert done.returncode == 2
    assert "workload" in done.stderr
