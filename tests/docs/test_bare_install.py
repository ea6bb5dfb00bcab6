"""Perdure as a new user has it: the wheel alone, or with one extra.

Pages and examples run in such environments too, each with what it names: test_snippets.py, test_examples.py.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from installs import ROOT, Installs, named
from soak import SOAK

# One use of each extra. Without it, each says that it is missing.
USES = {
    "postgres": "import perdure.storage.postgres.driver",
    "cosmos": "from perdure.cosmos import CosmosSaver",
    "crypto": "from perdure.encryption.cipher import TEXT_MARK",
    "metrics": "import perdure; perdure.ops.metrics.serve().close()",
    "langgraph": "from perdure.langgraph import PerdureSaver; PerdureSaver('agent.db')",
    "inspect": "import perdure.inspector.server",
    "adk": "import perdure.adk",
    "agent-framework": "import perdure.agent_framework",
    "burr": "import perdure.burr",
    "claude-agent": "import perdure.claude_agent",
    "crewai": "import perdure.crewai",
    "llama-index": "import perdure.llama_index",
    "crdt": "import perdure; perdure.memory.SharedText().insert(0, 'a')",
    "nats": "import perdure; perdure.teams.NatsRegister(['nats://127.0.0.1:4222'], 'team').close()",
    "openai-agents": "import perdure.openai_agents",
    "pydantic-ai": "import perdure.pydantic_ai",
    "strands": "import perdure.strands",
    "otel": "import perdure; perdure.ops.metrics.otel().close()",
    "mcp": "from mcp.server import MCPServer; import perdure.memory.segments",
    "object-lock": "from perdure.storage.object_lock import _client; _client()",
    "redis": "from perdure.memory import RedisPad; RedisPad(None, 'a')",
    "sql": "import perdure; from perdure.forensics import sql; sql(perdure.open(':memory:'), 'SELECT 1')",
    "qdrant": "from perdure.memory.qdrant import QdrantIndex; QdrantIndex(None)",
    "s3": "from perdure.storage.objects import open_objects; open_objects('s3://bucket/prefix')",
    "schema": "from perdure.runs.functions.schemas import check_answer; check_answer(1, {'type': 'integer'})",
    "search": "import perdure; perdure.open('agent.db', embedder='local').memory('a').search('x')",
    "tokens": "from perdure.agents.tokens import estimate, token_counter; assert token_counter() is not estimate",
}
APART = {"crewai"}  # has an environment of its own: tests/frameworks/test_crewai.py
NO_ERROR = {"tokens", "mcp"}  # tokens are estimated then; the command says it: bare_commands.py
ONE_AFTER_THE_OTHER = """
import sys
from perdure.errors import ExtraMissing

for extra, use in eval(sys.argv[1]).items():
    try:
        exec(use)
    except ExtraMissing as error:
        assert f"pip install '.[{extra}]'" in str(error), error
        assert isinstance(error, ImportError)
    else:
        raise AssertionError(f"{extra} is not missing")
"""


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"]) - {"test", "dev"}


def run(python: Path, folder: Path, *arguments: str) -> None:
    done = subprocess.run([str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_command_works_or_names_the_extra_that_it_needs(installs: Installs, tmp_path: Path) -> None:
    run(installs.python(), tmp_path, str(ROOT / "tests/support/bare_commands.py"))


def test_without_an_extra_its_features_say_what_to_install(installs: Installs, tmp_path: Path) -> None:
    uses = {extra: use for extra, use in USES.items() if extra not in NO_ERROR}
    run(installs.python(), tmp_path, "-c", ONE_AFTER_THE_OTHER, repr(uses))


def test_every_extra_is_tried_alone_and_named_by_a_page() -> None:
    assert set(USES) == extras()
    pages = " ".join(page.read_text() for page in (ROOT / "docs").glob("[!r]*/*.md"))
    told = named(pages)
    assert [extra for extra in extras() if not any(f"[{extra}]" in word or f"{extra}," in word for word in told)] == []


def by_example() -> set[str]:
    """The extras that an example runs with, each alone: test_examples.py proves that they are enough."""
    named_by = [named(example.read_text()) for example in (ROOT / "examples").glob("*.py")]
    return {extra for extra in USES if {f"perdure[{extra}]"} in named_by}


@pytest.mark.parametrize("extra", sorted(set(USES) - APART - (set() if SOAK else by_example())))
def test_an_extra_alone_is_enough(installs: Installs, tmp_path: Path, extra: str) -> None:
    run(installs.python({f"perdure[{extra}]"}), tmp_path, "-c", USES[extra])


ASKS = """
import perdure


@perdure.durable
def seats():
    return perdure.ask("How many seats?", schema=int)


with perdure.open("agent.db") as store:
    run = store.run(seats, id="trip")
    assert (run.status, store.questions()) == ("stuck", [])
    try:
        run.result()
    except perdure.RunStuck as error:
        assert "pip install '.[schema]'" in str(error), error
"""


def test_a_question_that_nobody_could_answer_is_not_asked(installs: Installs, tmp_path: Path) -> None:
    run(installs.python(), tmp_path, "-c", ASKS)
