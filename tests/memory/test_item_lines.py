"""Items as lines of JSON: what is exported comes back as it was; items of LangGraph's stores and of mem0 come in."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from langgraph.store.memory import InMemoryStore

import perdure
from perdure import UsageError
from perdure.cli import main

SINCE = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_an_exported_namespace_comes_back_as_it_was_and_only_once(url: str) -> None:
    with perdure.open(url) as store:
        alice = store.memory("users", "alice")
        alice.put(
            "theme", {"fact": "dark", "at": (1, SINCE)}, kind="episodic", text="colour", context="asked", source="form"
        )
        alice.put("pin", {"^obj": "no tag"}, pinned=True, valid_from=SINCE)
        alice.put("short", "lived", ttl_s=3600)
        store.memory("users", "alice", "facts").put("ünï\x01", ["a\u2028b"])
        lines = alice.export_lines()
        assert len(lines) == 4
        assert all("\n" not in line and json.loads(line)["key"] for line in lines)
        copy = store.memory("copies", "alice")
        assert copy.import_lines(lines) == 4
        assert copy.import_lines([*lines, "", "\n"]) == 0
        fields = ("key", "value", "kind", "pinned", "text", "context", "source", "valid_from", "ttl_s", "expires_at")
        assert [[getattr(item, name) for name in fields] for item in copy.list()] == [
            [getattr(item, name) for name in fields] for item in alice.list()
        ]
        assert [item.namespace[2:] for item in copy.list()] == [item.namespace[2:] for item in alice.list()]
        assert [item.key for item in copy.search("colour")] == ["theme"]
        copy.put("theme", "bright")
        assert copy.import_lines(lines) == 1
        assert len(copy.history("theme")) == 3
        assert store.ops.verify().ok


def test_a_line_that_cannot_be_read_imports_nothing(tmp_path: Path) -> None:
    good = json.dumps({"namespace": [], "key": "a", "value": 1})
    wrong = ["{", "[]", '{"key": "a"}', '{"namespace": [], "key": "a", "value": 1, "colour": 2}']
    wrong += [
        '{"namespace": [], "key": "", "value": 1}',
        '{"namespace": [], "key": "a", "value": {"^obj": ["os.system", 1]}}',
    ]
    with perdure.open(tmp_path / "a.db") as store:
        for line in wrong:
            with pytest.raises((UsageError, perdure.errors.ValueProblem)):
                store.memory("a").import_lines([good, line])
        for form, line in (("items", good.replace("1", '"x"')), ("mem0", good), ("other", good)):
            with pytest.raises(UsageError):
                store.memory("a").import_lines([line], form=form)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="needs a namespace"):
            store.memory().import_lines([good])
        assert store.memory().list() == []


def test_items_of_langgraph_and_mem0_come_in(tmp_path: Path) -> None:
    stock = InMemoryStore()
    stock.put(("users", "alice"), "hobby", {"fact": "hiking", "^obj": 1})
    mem0 = {
        "results": [
            {"id": "1", "memory": "Likes tea", "hash": "x", "metadata": {"topic": "food"}, "user_id": "alice"},
            {
                "id": "2",
                "memory": "Speaks French",
                "metadata": None,
                "agent_id": "guide",
                "created_at": SINCE.isoformat(),
            },
            {"id": "3", "memory": "The office is in Graz"},
        ]
    }
    with perdure.open(tmp_path / "a.db") as store:
        found = stock.search(())
        assert store.memory("old").import_lines(found, form="items") == 1
        assert store.memory("old").import_lines([json.dumps(item.dict()) for item in found], form="items") == 0
        assert store.memory("old", "users", "alice").get("hobby").value == {"fact": "hiking", "^obj": 1}  # type: ignore[union-attr]
        assert store.memory().import_lines([mem0], form="mem0") == 3
        assert store.memory().import_lines(mem0, form="mem0") == 0
        tea, french = store.memory("users", "alice").get("1"), store.memory("agents", "guide").get("2")
        assert tea is not None
        assert tea.value == {"fact": "Likes tea", "metadata": {"topic": "food"}}
        assert french is not None
        assert french.valid_from == SINCE
        assert store.memory("shared").get("3") is not None


def test_the_command_line_exports_and_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file, mem0 = str(tmp_path / "a.db"), tmp_path / "alice.jsonl", tmp_path / "mem0.json"
    monkeypatch.setenv("PERDURE_STORE", path)
    with perdure.open(path) as store:
        store.memory("users", "alice").put("theme", {"fact": "dark"})
    mem0.write_text(json.dumps({"results": [{"id": "1", "memory": "Likes tea", "user_id": "bob"}]}, indent=2))
    assert main(["memory", "export", "users/alice"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["memory", "import", "users/bob", str(file)]) == 0
    assert main(["memory", "import", "/", str(mem0), "--form", "mem0"]) == 0
    assert "1 item imported" in capsys.readouterr().out
    assert main(["memory", "export", "users/bob"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
