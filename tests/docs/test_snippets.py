"""Every snippet of README.md and docs/ runs with the extras that its page names, and shows what really comes out.

How a page is read: tests/support/pages.py. docs/reference/cli.md has a test of its own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.cosmos_server import KEY, emulator
from installs import Installs, named
from model_server import ModelServer
from pages import ROOT, blocks

from perdure.testing.ports import free_port

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES.remove(ROOT / "docs" / "reference" / "cli.md")
RUN = [page for page in PAGES if {"python", "console"} & {block.language for block in blocks(page.read_text())}]
# What the pages write; replaced by the test server's URL. `app` and `owner` are its superuser there, other roles are
# those that the page makes.
POSTGRES = re.compile(r"postgresql://(\w+)@localhost/agents\b")
PORT = "8321"  # where the pages' airline listens; replaced by a free one
CLIENT = re.compile(r"\b(OpenAI|Anthropic)\(")
COSMOS = 'os.environ["COSMOS_KEY"]'  # of a client; an emulator does not know the address by which it is reached
PAGE_S_MAX = 280


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model that the clients of OpenAI and Anthropic reach by their variables, as the reader's do."""
    with ModelServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def cosmos() -> Iterator[str]:
    """The account of Cosmos DB that the pages name by their variables."""
    with emulator() as url:
        yield url


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run_and_print_what_it_shows(
    page: Path, tmp_path: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text()
    python = installs.python(named(text))
    if POSTGRES.search(text):
        url = str(request.getfixturevalue("postgres_url"))
        superuser = url.partition("//")[2].partition("@")[0]
        who = {"app": superuser, "owner": superuser}
        text = POSTGRES.sub(lambda found: url.replace(f"//{superuser}@", f"//{who.get(found[1], found[1])}@"), text)
    text = text.replace(PORT, str(free_port())) if PORT in text else text
    if CLIENT.search(text):
        request.getfixturevalue("model")
    if COSMOS in text:
        monkeypatch.setenv("COSMOS_ENDPOINT", request.getfixturevalue("cosmos"))
        monkeypatch.setenv("COSMOS_KEY", KEY)
        text = text.replace(COSMOS, f"{COSMOS}, enable_endpoint_discovery=False")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    command = [str(python), "-W", "error", str(ROOT / "tests/support/pages.py"), str(page)]
    done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, timeout=PAGE_S_MAX)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "docs/reference/cli.md", *ROOT.glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_readme_shows_code_before_line_30() -> None:
    first = next(block for block in blocks((ROOT / "README.md").read_text()) if block.language == "python")
    assert first.line < 30
