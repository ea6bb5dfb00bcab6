"""Bodies in processes of their own whose functions are in a user's script, or were typed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from perdure.runs.calls.bodies import call

class Mine(Exception): ...
class Point:
    def __init__(self, x): self.x = x

def double(point): return Point(point.x * 2)
def fail(): raise Mine("mine")

if __name__ == "__main__":
    print(call(double, (Point(4),), process=True).x)
    try:
        call(fail, process=True)
    except Mine as error:
        print(error)
"""


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60)


def test_functions_and_classes_of_the_users_script_work(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT)
    assert (done.stdout, done.stderr) == ("8\nmine\n", "")


def test_a_script_without_its_guard_is_told_so(tmp_path: Path) -> None:
    unguarded = "from perdure.runs.calls.bodies import call\ndef body(): return 1\ncall(body, process=True)\n"
    done = run_script(tmp_path / "script.py", unguarded)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('is the `if __name__ == "__main__":` of the script missing?')


def test_a_function_that_was_typed_in_is_told_so() -> None:
    script = (
        "from perdure.runs.calls.bodies import call\ndef body(a): return 1\ncall(body, [bytes(10**6)], process=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert "not typed in at a prompt" in done.stderr
