"""`docs/reference/cli.md` names every command, argument, option and exit code, and its output is what comes out."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli import main
from perdure.cli.parser import COMMANDS, build

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def sections() -> dict[str, str]:
    """The text under each second-level heading."""
    parts = re.split(r"^## +`?(?:perdure )?([^`\n]+)`?$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands() -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in build()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {text for action in parser._actions for text in action.option_strings if text.startswith("--")} - {"--help"}


def words(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def test_the_options_of_all_commands_are_documented() -> None:
    assert options(build()) <= words(sections()["Options of all commands"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_all_it_takes_are_documented(name: str) -> None:
    section = sections()[name]
    parser = commands()[name]
    assert options(parser) - options(build()) <= words(section)
    usage = section.partition("```")[2].partition("```")[0]
    for action in parser._actions:
        if not action.option_strings:
            assert str(action.metavar) in usage


def test_nothing_is_documented_that_does_not_exist() -> None:
    known = options(build()).union(*(options(parser) for parser in commands().values())) | {"--help"}
    assert words(PAGE.read_text()) <= known


def test_every_exit_code_is_documented() -> None:
    for code in (0, 1, 2, 3, 4, 130, 141):
        assert re.search(rf"^\| {code} \|", sections()["Exit codes"], flags=re.MULTILINE)


def masked(text: str) -> str:
    """Without what differs from run to run: ids, keys, times, and the sizes that go with compression."""
    text = re.sub(r"\b0[0-9a-z]{12}\b", "<id>", text)
    text = re.sub(r"\bhf_[0-9a-f]{29}\b", "<key>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z?(?!\+)", "<time>", text)
    text = re.sub(r"\bjust now\b|\b\d\d s ago\b|\b\d\d:\d\d:\d\d\.\d{3}\b|\b\d\.\d{3}\b", "<time>", text)
    return re.sub(r"^(stored|  differences|  keyframes|ratio|  journals|file) .*", r"\1", text, flags=re.MULTILINE)


def test_the_page_shows_what_really_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    page = PAGE.read_text()
    app, setup = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert app.startswith("# app.py\n")
    Path("app.py").write_text(app)
    # In a process of its own: the command line must not know the classes.
    subprocess.run([sys.executable, "-c", setup], check=True)
    for block in re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = example.partition("\n")
            said = outside(command) if "app.py" in command else inside(command, capsys)
            assert masked(said) == masked(expected), command


def inside(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    main(shlex.split(command)[1:])
    captured = capsys.readouterr()
    return captured.out + captured.err


def outside(command: str) -> str:
    """What imports the app is run in a process that ends with it."""
    line = [sys.executable, "-m", "perdure.cli", *shlex.split(command)[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr
