"""The commands about long-term memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_runs_kit import Run, lines

import perdure
from perdure.cli.parameters import namespace, namespace_text
from perdure.memory import ORSet, PNCounter

HOSTILE = ("a/b", "100%", "%2F", "é", "\x01\n", " ", "..")


@pytest.fixture
def filled(where: Path) -> Path:
    with perdure.open("agent.db", durability="normal") as store:
        alice = store.memory("users", "alice")
        alice.put("theme", {"fact": "Alice prefers light mode", "topic": "ui"})
        alice.put("theme", {"fact": "Alice prefers dark mode", "topic": "ui"}, pinned=True)
        alice.put("hobby", {"fact": "Alice loves hiking in the mountains"}, kind="episodic")
        store.memory("users", *HOSTILE).put("x", "a secret")
    return where


def test_namespaces_are_listed_as_they_are_named(run: Run, filled: Path) -> None:
    code, out, _ = run("memory", "namespaces")
    head, hostile, alice = out.splitlines()
    assert (code, head.split()) == (0, ["namespace", "items", "size"])
    assert alice.split()[:2] == ["users/alice", "2"]
    assert hostile.startswith("users/a%2Fb/100%25/%252F/é/%01%0A/ /..  ")
    [named, _] = lines(run("memory", "namespaces", "--json")[1])
    assert named["labels"] == ["users", *HOSTILE]
    [found] = lines(run("memory", "items", named["namespace"], "--json")[1])
    assert (found["value"], found["labels"]) == ("a secret", ["users", *HOSTILE])


def test_a_namespace_is_read_as_it_is_written() -> None:
    for labels in (HOSTILE, ("users",), ("/", "//", "a%2fb"), ()):
        assert namespace(namespace_text(labels)) == labels


@pytest.mark.parametrize("wrong", ["", "users//alice", "/users", "users/", "%ff"])
def test_what_is_no_namespace_is_a_usage_error(run: Run, filled: Path, wrong: str) -> None:
    code, out, err = run("memory", "items", wrong)
    assert (code, out) == (2, "")
    assert "is not a namespace: write users/alice" in err


def test_items_are_listed_and_shown(run: Run, filled: Path) -> None:
    assert [item["key"] for item in lines(run("memory", "items", "users/alice", "--json")[1])] == ["hobby", "theme"]
    assert [item["key"] for item in lines(run("memory", "items", "users", "--where", "topic=ui", "--json")[1])] == [
        "theme"
    ]
    assert "[pinned]" in run("memory", "items", "users/alice")[1].splitlines()[2]
    code, out, _ = run("memory", "get", "users/alice", "theme")
    assert (code, out.splitlines()[0].split("  ")[:2]) == (0, ["theme", "version 2"])
    assert json.loads(out[out.index("{") :])["fact"] == "Alice prefers dark mode"
    history = lines(run("memory", "get", "users/alice", "theme", "--history", "--json")[1])
    assert [(one["version"], one["pinned"]) for one in history] == [(1, False), (2, True)]
    assert run("memory", "get", "users/alice", "theme", "--as-of", "1d")[0] == 3
    code, out, err = run("memory", "get", "users/alice", "nothing")
    assert (code, out) == (3, "")
    assert "there is no item 'nothing' in users/alice" in err


def test_search_ranks_by_words_and_by_the_named_embedder(run: Run, filled: Path) -> None:
    assert [item["key"] for item in lines(run("memory", "search", "users", "hikes", "--json")[1])] == ["hobby"]
    assert "(matched hikes words " in run("memory", "search", "users", "hikes", "--explain")[1]
    assert run("memory", "search", "users/alice", "outdoors") == (0, "", "perdure: nothing was found\n")
    Path("app.py").write_text("def embed(texts):\n    return [[1.0, len(text)] for text in texts]\n")
    assert run("memory", "reembed", "--embedder", "app.py:embed")[:2] == (0, "3 items embedded\n")
    assert json.loads(run("memory", "stats", "users", "--embedder", "app.py:embed", "--json")[1])["embedded"] == 3
    out = run("memory", "search", "/", "outdoors", "--embedder", "app.py:embed", "--explain")[1]
    assert len(out.splitlines()) == 4
    assert "cosine" in out
    for wrong in ("app.py", "nothing.py:x", "app.py:nothing", "locl"):
        assert run("memory", "reembed", "--embedder", wrong)[0] == 2
    assert (
        "--embedder locl is not an embedder: write local, or a function"
        in run("memory", "search", "/", "x", "--embedder", "locl")[2]
    )
    assert run("memory", "reembed")[0] == 2


def test_the_environment_names_the_analyzer(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("app.py").write_text("def first(text):\n    return [word[:3] for word in text.split()]\n")
    monkeypatch.setenv("PERDURE_WORDS", "app.py:first")
    assert [item["key"] for item in lines(run("memory", "search", "users", "mounted", "--json")[1])] == ["hobby"]
    assert run("memory", "reindex", "users/alice")[:2] == (0, "3 versions indexed\n")
    assert json.loads(run("memory", "reindex", "--json")[1]) == {"namespace": "/", "indexed": 1}
    assert run("store", "verify")[0] == 0
    monkeypatch.setenv("PERDURE_WORDS", "simple")
    assert lines(run("memory", "search", "users", "mounted hikes", "--json")[1]) == []
    assert [item["key"] for item in lines(run("memory", "search", "users", "hiking", "--json")[1])] == ["hobby"]
    monkeypatch.setenv("PERDURE_WORDS", "klingon")
    assert run("memory", "search", "users", "hikes")[0] == 2


def test_a_search_that_finds_nothing_says_why(run: Run, filled: Path) -> None:
    Path("app.py").write_text("def embed(texts):\n    return [[1.0, len(text)] for text in texts]\n")
    assert "there are no items in users/alise" in run("memory", "search", "users/alise", "hikes")[2]
    said = run("memory", "search", "users", "outdoors", "--embedder", "app.py:embed")[2]
    assert "run `perdure memory reembed users --embedder app.py:embed`" in said


def test_verify_says_how_many_versions_it_checked(run: Run, filled: Path) -> None:
    said = "0 checkpoints of 0 threads and 4 versions of items checked: no problems\n"
    assert run("store", "verify") == (0, said, "")


def test_put_overwrites_unless_another_version_is_expected(run: Run, filled: Path) -> None:
    line = ("memory", "put", "users/bob", "seat", '{"row": 4}')
    assert run(*line, "--ttl", "7d", "--pin", "--kind", "working") == (0, "users/bob seat: version 1\n", "")
    found = json.loads(run("memory", "get", "users/bob", "seat", "--json")[1])
    assert (found["value"], found["kind"], found["pinned"]) == ({"row": 4}, "working", True)
    assert found["expires_at"]
    code, _, err = run(*line, "--expect", "0")
    assert code == 4
    assert "no item was expected, and there is version 1: nothing was written" in err


def test_erase_leaves_no_byte_and_asks_first(run: Run, filled: Path) -> None:
    code, _, err = run("memory", "erase", "users/alice")
    assert code != 0
    assert "--yes" in err
    assert run("memory", "erase", "--yes")[0] == 2  # of everything: name a namespace
    assert run("memory", "erase", "users/alice", "theme", "--label", "alice", "--yes")[0] == 2
    code, out, _ = run("memory", "erase", "users/alice", "theme", "--yes")
    assert (code, out.splitlines()[0]) == (0, "erased 2 versions of items in users/alice")
    assert "journals of runs" in out
    assert b"dark mode" not in (filled / "agent.db").read_bytes()
    assert json.loads(run("memory", "erase", "--label", "alice", "--yes", "--json")[1])["versions"] == 1
    assert [found["key"] for found in lines(run("memory", "items", "users", "--json")[1])] == ["x"]
    assert run("memory", "erase", "users", "--yes")[0] == 0
    assert run("memory", "items", "users", "--json")[1] == ""


def test_erase_says_when_there_is_nothing_of_that_name(run: Run, filled: Path) -> None:
    for names, said in (
        (("users/alise", "theme"), "users/alise has no such item, nor does its history"),
        (("users/alice", "seat"), "users/alice has no such item, nor does its history"),
        (("users/alise",), "there is no namespace users/alise"),
        (("users", "--label", "alise"), "there is no namespace with the label 'alise' in users"),
    ):
        assert run("memory", "erase", *names, "--yes") == (3, "", f"perdure: {said}\n")
    assert run("memory", "forget", "users/alice", "--all", "--yes")[0] == 0
    assert run("memory", "erase", "users/alice", "theme", "--yes")[0] == 0  # its history was there


def test_forget_deletes_what_is_named_and_asks_first(run: Run, filled: Path) -> None:
    code, _, err = run("memory", "forget", "users/alice", "theme")
    asked = (
        "Delete 'theme' of users/alice? The history keeps the old values. There is no terminal to ask on: give --yes"
    )
    assert (code, err) == (2, f"perdure: {asked}\n")
    assert run("memory", "forget", "users/alice", "--yes")[0] == 2  # what?
    assert run("memory", "forget", "users/alice", "theme", "--all", "--yes")[0] == 2
    assert run("memory", "forget", "users/alice", "theme", "--yes") == (0, "1 item deleted\n", "")
    assert run("memory", "forget", "users/alice", "theme", "--yes")[0] == 3
    assert run("memory", "get", "users/alice", "theme", "--history")[1].rstrip().endswith("(deleted)")
    assert run("memory", "forget", "users", "--kind", "episodic", "--yes") == (0, "1 item deleted\n", "")
    assert json.loads(run("memory", "forget", "/", "--all", "--yes", "--json")[1])["deleted"] == 1


def test_migrate_uses_the_migrations_of_an_app(run: Run, where: Path) -> None:
    with perdure.open("agent.db") as store:
        store.memory("users", "alice").put("profile", {"name": "Alice"}, schema="cli-profile:1")
    Path("app.py").write_text(
        "import perdure\n\n@perdure.memory.migration('cli-profile', 1, 2)\ndef two(old):\n"
        "    return {'first': old['name']}\n"
    )
    assert run("memory", "migrate", "app.py", "users") == (0, "1 item migrated\n", "")
    found = json.loads(run("memory", "get", "users/alice", "profile", "--json")[1])
    assert (found["schema"], found["value"], found["version"]) == ("cli-profile:2", {"first": "Alice"}, 2)
    assert run("memory", "migrate", "app.py")[1] == "0 items migrated\n"


@dataclass
class Seat:
    row: int


def test_values_are_shown_without_their_classes(run: Run, where: Path) -> None:
    with perdure.open("agent.db", trust=[__name__]) as store:
        store.memory("users").put("seat", Seat(4))
    found = json.loads(run("memory", "get", "users", "seat", "--json")[1])
    assert found["value"]["row"] == 4
    assert "row" in run("memory", "items", "users")[1]


def test_an_item_is_pinned_and_unpinned(run: Run, filled: Path) -> None:
    pinned = json.loads(run("memory", "pin", "users/alice", "hobby", "--json")[1])
    assert (pinned["pinned"], pinned["version"], pinned["kind"]) == (True, 2, "episodic")
    assert "not pinned, version 3" in run("memory", "unpin", "users/alice", "hobby")[1]
    assert run("memory", "pin", "users/alice", "nothing")[0] == 3


def test_merge_brings_what_merges_and_shows_values_without_their_writers(
    run: Run, filled: Path, tmp_path: Path
) -> None:
    with perdure.open(tmp_path / "other.db") as other:
        other.memory("team").put("votes", PNCounter().add(3))
        other.memory("team").put("topics", ORSet().add("tides"))
    code, out, _ = run("memory", "merge", "team", "--from", str(tmp_path / "other.db"), "--both")
    assert (code, out) == (0, "2 items changed, 0 items in the other store\n")
    [topics, votes] = sorted(lines(run("memory", "items", "team", "--json")[1]), key=lambda item: item["key"])
    assert votes["value"] == {"<type>": "PNCounter", "value": 3}
    assert topics["value"] == {"<type>": "ORSet", "value": ["tides"]}


def test_what_is_exported_can_be_imported_and_a_wrong_file_is_refused_whole(run: Run, filled: Path) -> None:
    _, exported, _ = run("memory", "export", "users")
    Path("items.jsonl").write_text(exported)
    Path("cut.jsonl").write_text(exported + exported[: exported.index("\n") // 2])
    Path("binary").write_bytes(b"\xff\xfe")
    for wrong, message in (
        ("cut.jsonl", "line 4 is no item"),
        ("binary", "not text in UTF-8"),
        ("none", "No such file"),
    ):
        assert message in run("memory", "import", "copies", wrong)[2]
    with perdure.open("agent.db") as store:
        assert store.memory("copies").list() == []
    assert run("memory", "import", "copies", "items.jsonl")[1] == "3 items imported\n"
    assert run("memory", "import", "copies", "items.jsonl")[1] == "0 items imported\n"
    with perdure.open("agent.db") as store:
        assert [item.value for item in store.memory("copies", *HOSTILE).list()] == ["a secret"]
