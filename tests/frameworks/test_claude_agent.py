"""Transcripts of the Claude Agent SDK in a store. The package's own conformance suite has 14 contracts."""

from __future__ import annotations

import itertools
from pathlib import Path

from agent_contract import SessionContract
from claude_agent_sdk.testing import run_session_store_conformance

import perdure
from perdure.claude_agent import PerdureSessionStore


class TestContract(SessionContract):
    module = "claude_agent_shop"


async def test_the_conformance_suite_of_the_package_passes(tmp_path: Path) -> None:
    opened, numbers = [], itertools.count()

    def make() -> PerdureSessionStore:
        opened.append(perdure.open(str(tmp_path / f"{next(numbers)}.db"), durability="normal"))
        return PerdureSessionStore(opened[-1])

    await run_session_store_conformance(make)
    assert len(opened) >= 14, "each contract has a store of its own"
    for store in opened:
        assert (await store.ops.averify()).ok
        await store.aclose()


async def test_names_with_slashes_are_different_sessions_and_an_entry_is_kept_once(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "store.db")) as store:
        sessions = PerdureSessionStore(store)
        await sessions.append({"project_key": "a/b", "session_id": "c"}, [{"type": "user", "uuid": "1"}])
        for _ in range(2):
            await sessions.append({"project_key": "a", "session_id": "b/c"}, [{"type": "user", "uuid": "2"}])
        assert await sessions.load({"project_key": "a", "session_id": "b/c"}) == [{"type": "user", "uuid": "2"}]
        assert [each["session_id"] for each in await sessions.list_sessions("a/b")] == ["c"]
