"""The front door: what README.md must begin with, promise, and be able to reproduce."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bench.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROMISE = (
    "**A step is recorded once. An effect is performed once if the receiver honours the key or `reconcile` is "
    "accurate; otherwise the run is parked and asks. It is never repeated by guess.**"
)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_it_begins_with_one_sentence_of_at_most_15_words() -> None:
    first = README.split("\n\n")[1]
    assert first.count(".") == 1
    assert len(first.split()) <= 15


def test_the_problem_is_told_in_three_sentences() -> None:
    assert len(re.findall(r"[.!?](?:\s|$)", README.split("\n\n")[2])) == 3


def test_the_first_code_is_a_durable_run() -> None:
    first = README[README.index("```python") :].split("```")[1]
    assert "@perdure.durable" in first
    assert "store.run(" in first


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/guarantees.md"])
def test_the_promise_is_in_these_words(page: str) -> None:
    assert PROMISE in flat((ROOT / page).read_text())


def test_every_number_stands_beside_a_command_that_exists() -> None:
    numbers = README[README.index("## Numbers") : README.index("## Guarantees")]
    named = set(re.findall(r"^\| `([\w-]+)`:", numbers, flags=re.MULTILINE))
    named |= {name for line in re.findall(r"`python -m bench ([\w -]+)`", numbers) for name in line.split()}
    assert {"runs", "workload"} <= named <= set(BENCHMARKS)


def test_every_target_of_make_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert (
        set(re.findall(r"\bmake (\w+)\b(?= |`|$)", README[README.index("## Tests") :], flags=re.MULTILINE)) <= targets
    )


def test_every_extra_that_it_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [named] = re.findall(r"^pip install '\.\[([\w,]+)\]'", README, flags=re.MULTILINE)
    [others] = re.findall(r"Other extras: ([\w, -]+)\.", flat(README))
    assert {*named.split(","), *others.split(", ")} == extras.keys() - {"test", "dev"}


def test_each_guarantee_names_the_test_that_tries_to_break_it() -> None:
    part = README[README.index("## Guarantees") : README.index("[All guarantees](docs/explanation/guarantees.md)")]
    rows = [line for line in part.splitlines() if line.startswith("| ") and "proved by" not in line]
    assert len(rows) == 5
    assert [row for row in rows if not re.search(r"\]\(tests/\S+\.py\) \|$", row)] == []


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 170


def test_a_worker_can_import_the_first_file_without_running_it(tmp_path: Path) -> None:
    first = README[README.index("```python\n") + 10 :].split("```")[0]
    (tmp_path / "app.py").write_text(first)
    code = "import app; assert app.travel; assert not hasattr(app, 'store')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert not (tmp_path / "agent.db").exists()
