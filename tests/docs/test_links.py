"""Links lead somewhere, every `perdure …` line is one that the command takes, and ARCHITECTURE.md names what exists."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from perdure.cli.base import command_names, root

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = FENCED.sub("", page.read_text())
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found) for found in re.findall(r"(?m)^#+ +(.*)$", text)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def lines(page: Path) -> Iterator[str]:
    """The commands of a page's blocks, without what a shell does with them. Synopses, with [ and (, are left out."""
    for language, block in FENCED.findall(page.read_text()):
        if language == "python":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+# .*", "", line.strip().removeprefix("$ "))
            for command in re.split(r"\s*(?:;|&&|\|\||\s\|\s)\s*", line):
                if command.startswith("perdure ") and not re.search(r" [\[(]|[A-Z]+ \[", command):
                    yield re.sub(r"\s*(?:>\s*\S+|&)$", "", command)


def test_every_command_line_is_one_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("alice.jsonl", "mem0.json"):  # a file that is read must be there
        Path(file).touch()
    commands = command_names(root)
    found = [(page, line) for page in PAGES for line in lines(page)]
    assert len(found) > 100
    for page, line in found:
        words = shlex.split(line)[1:]
        if words[0].isupper() or re.search(r" [A-Z]{3,}( |$)", line):  # a synopsis without options
            continue
        name = words[0] if words[0] in commands else " ".join(words[:2])
        assert name in commands, f"{page.name}: {line}"
        try:
            commands[name].make_context("perdure", words[len(name.split()) :])
        except click.ClickException as error:
            raise AssertionError(f"{page.name}: {line}: {error.format_message()}") from error


def test_every_command_that_a_message_or_a_page_names_is_one_that_is_taken() -> None:
    commands = command_names(root)
    pages = [page for page in PAGES if page.name != "cli.md"]
    for path in [*pages, *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py")]:
        for line in re.findall(r"`(perdure [a-z][^`\n]*)`", path.read_text()):
            words = [word for word in shlex.split(re.sub(r"\{[^}]*\}", "X", line))[1:] if word != "…"]
            name = words[0] if words[0] in commands else " ".join(words[:2])
            if words[0] in root.commands and len(words) == 1 and name not in commands:
                continue  # a group
            assert name in commands, f"{path.name}: {line}"
            try:
                commands[name].make_context("perdure", words[len(name.split()) :])
            except click.MissingParameter:
                continue  # only named
            except click.ClickException as error:
                raise AssertionError(f"{path.name}: {line}: {error.format_message()}") from error


def test_the_architecture_names_what_exists() -> None:
    source, text = ROOT / "src" / "perdure", (ROOT / "ARCHITECTURE.md").read_text()
    files = [*source.rglob("*.py"), *source.rglob("*.sql")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    for name in re.findall(r"`([\w./]+)`", text):
        if "/" in name or name.endswith((".py", ".toml")):
            assert (ROOT / name).exists() or any(source.rglob(name)), name
        elif name.count(".") > 1:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(f"perdure.{module}"), attribute), name
        else:
            assert set(name.split(".")) <= words | {path.stem for path in files}, name
    assert len(text.encode()) <= 12 * 1024
