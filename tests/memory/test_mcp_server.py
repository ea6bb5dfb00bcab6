"""`perdure mcp`: a client of the Model Context Protocol uses the memory of one namespace, and reaches no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import perdure
from perdure.cli import main

if TYPE_CHECKING:
    from mcp import Client

pytestmark = pytest.mark.timeout(60)
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("memory_search", {}),
    ("memory_search", {"query": ["a"]}),
    ("memory_search", {"query": "x", "limit": "many"}),
    ("memory_search", {"query": "x", "limit": -1}),
    ("memory_save", {"key": "", "fact": "x"}),
    ("memory_save", {"key": "k" * 600, "fact": "x"}),
    ("memory_save", {"key": "long", "fact": "x " * 5000}),
    ("memory_save", {"key": "profile", "fact": "x"}),
    ("memory_forget", {"key": "secret"}),
    ("memory_forget", {"key": "../bob/secret"}),
    ("memory_forget", {"key": "bob\x01\x01secret"}),
    ("memory_erase", {"key": "hobby"}),
]


def client(path: Path, *options: str) -> Client:
    from mcp import Client, StdioServerParameters, stdio_client  # slow to import: not in each process that collects

    args = ["-m", "perdure", "mcp", str(path), "--namespace", "users/alice", *options]
    return Client(stdio_client(StdioServerParameters(command=sys.executable, args=args, env={**os.environ})))


async def said(client: Client, tool: str, **arguments: Any) -> tuple[bool, str]:
    result = await client.call_tool(tool, arguments)
    return bool(result.is_error), "".join(getattr(part, "text", "") for part in result.content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with perdure.open(tmp_path / "a.db") as store:
        store.memory("users", "alice").put("profile", {"name": "Alice", "password": "hers"})
        store.memory("users", "alice-b").put("secret", {"fact": "a secret of hiking"})
        store.memory("users", "bob").put("secret", {"fact": "a secret of hiking"})
    return tmp_path / "a.db"


async def test_a_client_in_another_process_saves_searches_and_forgets(path: Path) -> None:
    async with client(path, "--block", "persona") as model:
        assert [tool.name for tool in (await model.list_tools()).tools] == [
            "memory_search",
            "memory_save",
            "memory_forget",
            "memory_append",
            "memory_replace",
        ]
        assert await said(model, "memory_append", block="persona", text="Speaks German") == (
            False,
            "block 'persona' now reads:\nSpeaks German",
        )
        assert (await said(model, "memory_replace", block="persona", old="French", new="x"))[0]
        assert await said(model, "memory_forget", key="persona") == (False, "forgot 'persona'")
        assert await said(model, "memory_save", key="hobby", fact="Alice loves hiking") == (False, "saved 'hobby'")
        failed, found = await said(model, "memory_search", query="hikes")
        assert not failed
        assert "Alice loves hiking" in found
        assert "secret" not in found
        assert await said(model, "memory_save", key="trip", fact="nach Köln \u2603") == (False, "saved 'trip'")
        assert await said(model, "memory_forget", key="trip") == (False, "forgot 'trip'")
    with perdure.open(path) as store:
        assert [item.key for item in store.memory("users", "alice").list()] == ["hobby", "profile"]


async def test_hostile_arguments_are_errors_to_read_and_reach_nothing_else(path: Path) -> None:
    async with client(path) as model:
        for tool, arguments in HOSTILE:
            failed, text = await said(model, tool, **arguments)
            assert failed, (tool, arguments)
            assert text != f"Error executing tool {tool}", "the model reads why"
            assert "a secret" not in text
        for extra in ({"namespace": "users/bob"}, {"labels": ["users", "bob"]}, {"tenant": "x"}):
            assert "a secret" not in (await said(model, "memory_search", query="secret of hiking", **extra))[1]
    with perdure.open(path) as store:
        assert [item.version for item in store.memory("users").list()] == [1, 1, 1]


async def test_read_only_offers_only_the_search(path: Path) -> None:
    async with client(path, "--read-only") as model:
        assert [tool.name for tool in (await model.list_tools()).tools] == ["memory_search"]
        assert (await said(model, "memory_save", key="a", fact="b"))[0]


def test_it_ends_with_its_client_and_never_makes_a_store(path: Path) -> None:
    command = ["mcp", str(path), "--namespace", "users/alice"]
    line = [sys.executable, "-m", "perdure", *command]
    assert subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0
    assert main(["mcp", str(path.with_name("none.db")), "--namespace", "users/alice"]) == 4
    assert not path.with_name("none.db").exists()
