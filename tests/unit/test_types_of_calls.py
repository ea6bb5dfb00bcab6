"""Type checkers know the results of runs and the arguments of steps and effects: right calls pass, wrong ones fail.

This is pyright's part. mypy reads the same calls in `make lint`, where an ignored line without an error is one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

CALLS = Path(__file__).with_name("typed_calls.py").read_text()


def test_right_calls_pass_and_wrong_ones_do_not(tmp_path: Path) -> None:
    wrong = {number for number, line in enumerate(CALLS.splitlines(), 1) if "  # type: ignore" in line}
    assert len(wrong) > 10
    file = tmp_path / "calls.py"
    file.write_text(re.sub("  # type: ignore.*", "", CALLS))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    problems = json.loads(done.stdout)["generalDiagnostics"]
    assert {problem["range"]["start"]["line"] + 1 for problem in problems} == wrong, problems
