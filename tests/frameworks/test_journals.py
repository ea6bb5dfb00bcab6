"""Journals that were recorded with the oldest supported release of a framework still replay.

`python tests/frameworks/test_journals.py NAME` records that of a framework anew, with the release that is installed:
only after its lower bound in pyproject.toml was raised, or before the first release of Perdure. Entries have neither
the times nor the numbers of their rows. The values are those of `perdure.values.codec`.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agent_contract
import pytest

import perdure
from perdure.runs.journal import rows
from perdure.runs.journal.entries import DIGEST_MASK, Entry, decompress, entry_digest, pack
from perdure.runs.journal.journal import read_journal
from perdure.runs.tables import JOURNAL_BODY
from perdure.storage.program import Batch, Program, Sql, drive, read, write
from perdure.teams.members import handler_of

FOLDER = Path(__file__).parent / "journals"
PACKAGES = {
    "adk": "google-adk",
    "agent_framework": "agent-framework-core",
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
    "strands": "strands-agents",
}
_INSERT = Sql(
    "INSERT INTO journal (tenant, run, seq, kind, body) VALUES (:tenant, :run, :seq, :kind, :body)",
    seals={"body": JOURNAL_BODY},
)
_SUM = Sql(
    """UPDATE run SET entries = :entries, digest = :digest, seq = :entries
    WHERE tenant = :tenant AND run = :run"""
)


@perdure.durable(name="contract.recorded")
async def recorded(module: str) -> Any:
    """Ask the shop's agent, and end after a person's answer."""
    handler = handler_of(importlib.import_module(module).member(), "clerk")
    answer = await handler({}, "buy")
    await perdure.ask("Go on?")
    return answer


def record(framework: str) -> None:
    """Run the agent and write its journal, up to the question."""
    importlib.import_module(f"{framework}_shop")  # that of ADK runs a loop of its own
    with tempfile.TemporaryDirectory() as folder, perdure.open(f"{folder}/store.db") as store:
        agent_contract._place[:] = [Path(folder)]
        assert store.run(recorded, f"{framework}_shop", id="recorded").status == "waiting"
        tenant, row = _row(store)
        entries = [
            [each.kind, each.entry.path, each.entry.name, (each.entry.args_hash or b"").hex(), _text(each.entry),
             each.entry.extra]
            for each in drive(store._context.driver, read(lambda: read_journal(tenant, row)))
        ]  # fmt: skip
    kept = {
        "package": PACKAGES[framework],
        "version": version(PACKAGES[framework]),
        "entries": [each for each in entries if each[2] != "perdure.ask"],
    }
    (FOLDER / f"{framework}.json").write_text(json.dumps(kept, indent=1, default=_hex) + "\n")


def _text(entry: Entry) -> str | None:
    return None if entry.value is None else decompress(entry.value).decode()


def _hex(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else value


def _row(store: perdure.Store) -> tuple[int, Any]:
    tenant = drive(store._context.driver, store._context.tenant())
    assert tenant is not None
    return tenant, drive(store._context.driver, read(lambda: rows.find(tenant, "recorded")))


def restore(store: perdure.Store, framework: str) -> None:
    """Make a run whose journal is the recorded one."""
    kept = json.loads((FOLDER / f"{framework}.json").read_text(), object_hook=_bytes)
    store.start(recorded, f"{framework}_shop", id="recorded")
    tenant, row = _row(store)

    def op() -> Program[None]:
        digest = 0
        for seq, (kind, path, name, args_hash, text, extra) in enumerate(kept["entries"], start=1):
            value = None if text is None else text.encode()
            body = pack(Entry(path, name, 0, bytes.fromhex(args_hash) or None, value=value, extra=extra))
            digest += entry_digest(row.run, seq, kind, body)
            yield Batch(_INSERT(tenant=tenant, run=row.run, seq=seq, kind=kind, body=body))
        about = {"entries": len(kept["entries"]), "digest": digest & DIGEST_MASK}
        yield Batch(_SUM(tenant=tenant, run=row.run, **about))

    drive(store._context.driver, write(op))


@pytest.mark.parametrize("framework", PACKAGES)
def test_a_recorded_journal_replays_and_calls_neither_the_model_nor_a_tool(framework: str, tmp_path: Path) -> None:
    importlib.import_module(f"{framework}_shop")
    agent_contract._place[:] = [tmp_path]
    with perdure.open(str(tmp_path / "store.db"), durability="normal") as store:
        restore(store, framework)
        run = store.run(recorded, f"{framework}_shop", id="recorded").refresh()
        assert run.status == "waiting", run.waiting_for
        store.answer("recorded", "yes")
        assert store.run(recorded, f"{framework}_shop", id="recorded").result() == agent_contract.BOUGHT
    assert agent_contract.notes(tmp_path) == []


def test_every_framework_has_a_journal_of_its_oldest_supported_release() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for framework, package in PACKAGES.items():
        kept = json.loads((FOLDER / f"{framework}.json").read_text())
        [needed] = project["optional-dependencies"][framework.replace("_", "-")]
        bound = needed.removeprefix(f"{package}>=").partition(",")[0]
        assert f"{kept['version']}.".startswith(f"{bound}."), f"{framework}: recorded with {kept['version']}"


if __name__ == "__main__":
    record(sys.argv[1])
