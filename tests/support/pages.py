"""Run a page of the documentation, as its reader would: `python pages.py page.md`, in an empty folder.

It runs in an environment that has what the page names and nothing else, so it imports Perdure and the standard library
alone. How a page is read, block by block:

    ```python              run, in one namespace per page
    ```text                right after it: what it printed
    ```console             `$ perdure …` and `$ python …` are run; the lines below each are its output
    ```python file trip.py written to this file of the reader's, in the folder
    ```python into trip.py its functions replace those of the same name in that file; new ones come in above them
    ```python some/file    the file's own text: must be in it word for word; not run here (tests/docs/test_examples.py)

A command that ends with `&` runs in the background: the lines below it are the first that it prints. `$ kill %1` ends
the first of these as a shell does (SIGTERM), and waits for it. What a page leaves running is killed.

Other languages are not run. Ids, keys, times and the width of columns are masked.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COMMAND_S_MAX = 180
COMMANDS = {"python": [sys.executable], "perdure": [sys.executable, "-m", "perdure"]}
# These import the reader's files or start processes, so each runs in a process of its own. The other commands run in
# this process, which saves the start of an interpreter.
LOADS_CODE = {"worker", "start", "check", "drill", "replay", "deploy"}


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
    text = re.sub(r"\b[0-9a-f]{32}\b", "<interrupt>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "<time>", text)
    text = re.sub(r"\b\d\d:\d\d:\d\d\.\d{3}\b", "<time>", text)
    text = re.sub(r"^\S+ [KM]?B -> \S+ [KM]?B$", "<size> -> <size>", text, flags=re.MULTILINE)  # of an import
    text = re.sub(r"^- \d{4}-\d\d-\d\d: ", "- <date>: ", text, flags=re.MULTILINE)  # when an item was learned
    text = re.sub(r"just now|\d+ (s|min) ago", "<ago>", text)
    text = re.sub(r"\bpd_[0-9a-f]{29}\b", "<key>", text)
    text = re.sub(r"\bkey [0-9a-f]{16}\b", "key <id>", text)  # of encryption
    text = re.sub(r"^default  [0-9a-f]{16}\b", "default  <id>", text, flags=re.MULTILINE)
    text = re.sub(r"\b(version|arguments) [0-9a-f]{12,}\b", r"\1 <hash>", text)
    text = re.sub(r" \d+\.\d{3}(?= |$)", " <s>", text, flags=re.MULTILINE)  # how long a step took
    text = re.sub(r"\b\d+\.\d ms\b", "<ms>", text)
    text = re.sub(r"\b\d+ (?=\(at \d+ named points)", "<kills> ", text)  # some come when the run has ended
    text = re.sub(r"\b\d\d+ (?=done$|failed|due runs)", "<n> ", text, flags=re.MULTILINE)  # of a random share
    text = re.sub(r"(?<=\S)  +", "  ", text)  # columns are as wide as what they hold
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def compare(said: str, shown: str, where: str) -> None:
    """Raise if what came out is not what the page shows."""
    if masked(said) != masked(shown):
        lines = difflib.unified_diff(
            masked(shown).splitlines(), masked(said).splitlines(), "the page shows", "came out", lineterm=""
        )
        raise AssertionError("\n".join([where, *lines]))


def run_python(block: Block, page: Path, module: ModuleType) -> str:
    """Run a snippet as the main program; its line numbers in a traceback are the page's. What it printed."""
    text = block.text.replace('if __name__ == "__main__":', "if True:")  # its module has another name: classes need one
    code = compile("\n" * (block.line - 1) + text, str(page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, module.__dict__)
    return printed.getvalue()


class Shell:
    """Runs the commands of a page, and ends what it left in the background."""

    def __init__(self) -> None:
        self._jobs: list[subprocess.Popen[str]] = []

    def run(self, command: str, expected: str) -> str:
        """Run a command as a shell would, and say "Killed" as a shell does. What it said."""
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in takewhile(re.compile("[A-Z_]+=").match, words))
        name, *arguments = words[len(variables) :]
        if name == "kill":
            job = self._jobs[int(arguments[0].removeprefix("%")) - 1]
            job.terminate()
            said, _ = job.communicate(timeout=COMMAND_S_MAX)
            return said
        if name == "perdure" and not variables and not LOADS_CODE & set(arguments):
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            from perdure.cli import main

            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                main(arguments)
            printed.seek(0)
            return printed.read()
        in_background = arguments[-1:] == ["&"]
        job = self._start([*COMMANDS[name], *(arguments[:-1] if in_background else arguments)], variables)
        if in_background:
            self._jobs.append(job)
            assert job.stdout is not None
            return "".join(job.stdout.readline() for _ in expected.splitlines())
        try:
            said, _ = job.communicate(timeout=COMMAND_S_MAX)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
        return said + ("Killed\n" if job.returncode == -signal.SIGKILL else "")

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        )

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
            job.communicate()


def run_console(block: Block, shell: Shell) -> None:
    first, *examples = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not first, f"line {block.line}: a console block starts with $"
    for example in examples:
        command, _, expected = example.partition("\n")
        compare(shell.run(command, expected.strip()), expected, f"$ {command}")


def functions(text: str) -> dict[str, tuple[int, int]]:
    """The functions of a file: the lines from the first decorator to the end."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: (min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1, node.end_lineno or node.lineno)
        for node in found
    }


def put_into(old: str, new: str) -> str:
    """What a reader makes of a file who is told to change it so: known functions are replaced, others come above."""
    before, lines = "", new.splitlines()
    for name, (start, end) in functions(new).items():
        before += "\n".join(lines[start:end]) + "\n\n\n"
        places, text = functions(old), old.splitlines()
        if name in places:
            first, last = places[name]
            old = "\n".join([*text[:first], before.rstrip(), *text[last:]]) + "\n"
            before = ""
    assert not before, "a block that goes into a file ends with a function that is there already"
    return old


def run_page(page: Path, text: str, module: ModuleType, shell: Shell) -> None:
    printed: str | None = None
    for block in blocks(text):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        what, _, name = block.rest.partition(" ")
        match block.language:
            case "python" if name and what == "file":
                Path(name).write_text(block.text)
            case "python" if name and what == "into":
                Path(name).write_text(put_into(Path(name).read_text(), block.text))
            case "python" if block.rest:
                assert block.text.strip() in (ROOT / block.rest).read_text(), f"{where}: {block.rest} says otherwise"
            case "python":
                assert not printed, f"{where}: the snippet before printed something that is not shown"
                printed = run_python(block, page, module)
            case "text" if printed is not None:
                compare(printed, block.text, where)
                printed = None
            case "console":
                run_console(block, shell)
    assert not printed, f"{page}: the last snippet printed something that is not shown"


def main_of(page: Path, text: str) -> None:
    """Run a page here and now. The process ends after it."""
    module = ModuleType(f"snippets_{page.stem.replace('-', '_')}")  # where its classes are defined
    sys.modules[module.__name__] = module
    sys.path[0] = os.getcwd()  # as in a Python shell
    sys.dont_write_bytecode = True  # a page changes its files faster than their times can tell
    shell = Shell()
    try:
        run_page(page, text, module, shell)
    finally:
        shell.close()
    close: Callable[[], None] | None = getattr(module.__dict__.get("store"), "close", None)
    if close is not None:
        close()


if __name__ == "__main__":
    main_of(Path(sys.argv[1]), sys.stdin.read())
