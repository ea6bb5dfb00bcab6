"""Every snippet of README.md and docs/ runs, and shows what really comes out.

How a page is read, block by block, in one temporary directory:

    ```python              run, in one namespace per page
    ```text                right after it: what it printed
    ```console             `$ holdfast …` and `$ python …` are run; the lines below each are its output
    ```python some/file    the file's own text: must be in it word for word; not run here (tests/docs/test_examples.py)

Other languages are not run. Ids, times and process numbers are masked. docs/reference/cli.md has a test of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES.remove(ROOT / "docs" / "reference" / "cli.md")
POSTGRES = "postgresql://app@localhost/agents"  # what the pages write; replaced by the test server's URL
COMMANDS = {"python": [sys.executable], "holdfast": [sys.executable, "-m", "holdfast.cli"]}


class Block(NamedTuple):
    """A fenced block: its language, what follows that on the same line, its text, and where it is."""

    language: str
    rest: str
    text: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w*) *([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield Block(match[1], match[2], match[3], text.count("\n", 0, match.start()) + 2)


def masked(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"\b0[0-9a-hjkmnp-tv-z]{12}\b", "<id>", text)
    text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>", text)  # LangGraph's ids
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "<time>", text)
    text = re.sub(r"^\S+ [KM]?B -> \S+ [KM]?B$", "<size> -> <size>", text, flags=re.MULTILINE)  # of an import
    text = re.sub(r"just now|\d+ (s|min) ago", "<ago>", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def run_python(block: Block, page: Path, module: ModuleType) -> str:
    """Run a snippet; its line numbers in a traceback are the page's. What it printed."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, module.__dict__)
    return printed.getvalue()


def run_command(command: str) -> str:
    """Run a command as a shell would, and say "Killed" as a shell does."""
    name, *arguments = shlex.split(command)
    environment = {**os.environ, "NO_COLOR": "1"}
    environment.pop("HOLDFAST_STORE", None)
    done = subprocess.run(
        [*COMMANDS[name], *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        timeout=60,
    )
    return done.stdout + ("Killed\n" if done.returncode == -signal.SIGKILL else "")


def run_console(block: Block) -> None:
    first, *examples = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not first, f"line {block.line}: a console block starts with $"
    for example in examples:
        command, _, expected = example.partition("\n")
        assert masked(run_command(command)) == masked(expected), command


def run_page(page: Path, text: str, module: ModuleType) -> None:
    printed: str | None = None
    for block in blocks(text):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        match block.language:
            case "python" if block.rest:
                assert block.text.strip() in (ROOT / block.rest).read_text(), f"{where}: {block.rest} says otherwise"
            case "python":
                assert not printed, f"{where}: the snippet before printed something that is not shown"
                printed = run_python(block, page, module)
            case "text" if printed is not None:
                assert masked(printed) == masked(block.text), where
                printed = None
            case "console":
                run_console(block)
    assert not printed, f"{page}: the last snippet printed something that is not shown"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run_and_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text()
    if POSTGRES in text:
        text = text.replace(POSTGRES, request.getfixturevalue("postgres_url"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"snippets_{page.stem.replace('-', '_')}")  # where its classes are defined
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        run_page(page, text, module)
    finally:
        close: Callable[[], None] | None = getattr(module.__dict__.get("store"), "close", None)
        if close is not None:
            close()


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "docs/reference/cli.md", *ROOT.glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_readme_shows_code_before_line_30() -> None:
    first = next(block for block in blocks((ROOT / "README.md").read_text()) if block.language == "python")
    assert first.line < 30
