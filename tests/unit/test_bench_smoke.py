"""The benchmarks run, and say by their exit code whether a bar was missed. Figures are judged by `make bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHEAP = ("workload", "sizes", "small", "append", "cold", "fork", "import", "precision", "bulk")

ROWS = """
import io, sys
from contextlib import redirect_stdout
from bench import __main__ as program
from bench.measure import Row
known = program.BENCHMARKS
for given in sys.argv[1:]:
    option, _, row = given.partition("|")
    one = eval(f"Row('one', 3.0, 'ms', ratio=2.0, {row})")
    program.BENCHMARKS = {"one": lambda run: [one]}
    with redirect_stdout(io.StringIO()) as printed:
        code = program.main([option])
    print(code, "FAIL" in printed.getvalue())
program.BENCHMARKS = known
sys.exit(program.main(["nonsense"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_cheap_benchmarks_run(tmp_path: Path) -> None:
    done = run("-m", "bench", "--quick", "--json", str(tmp_path / "rows.json"), "--folder", str(tmp_path), *CHEAP)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 25
    for row in rows:
        assert row["name"].strip() in done.stdout
        assert row["bar"] is None or row["passed"] is not None
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"], "a benchmark left files behind"


def test_a_missed_bar_is_exit_code_1_a_smoke_run_judges_nothing_and_an_unknown_name_lists_the_known_ones() -> None:
    rows = {
        "bar=2.0": 0,
        "bar=1.9": 1,
        "bar=2.0, sense='at least'": 0,
        "bar=2.1, sense='at least'": 1,
        "bar=2.5, judged='ours'": 1,
        "": 0,
    }
    done = run("-c", ROWS, *(f"one|{row}" for row in rows), "--quick|bar=1.0")
    assert done.stdout.splitlines() == [f"{code} {bool(code)}" for code in (*rows.values(), 0)], done.stderr
    assert done.returncode == 2
    assert "workload" in done.stderr
