"""The progress file: what is written is read back, a person may change it, and git never stops a run."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import UsageError
from perdure.runs.agents import progress_file
from perdure.runs.agents.progress_file import Progress, commit, from_markdown, merge, read, to_markdown, write

FACTS: dict[str, Any] = {"Departure": "SFO", "limit": 500, "files": ["a.py", "b.py"]}
FLIGHT = Progress(
    goal="Book morning flight to NYC for tomorrow",
    done=["Parsed user intent: destination=NYC, date=tomorrow", "Searched flights: 47 options found"],
    blocked="8am flight sold out while user was deciding",
    next="Present 9am alternative ($12 more)",
    context=FACTS,
)

# As the seed has it: a file that no code of ours wrote.
BY_HAND = """\
# Progress: Book Flight to NYC

## Current Goal

Book morning flight to NYC for tomorrow

## Completed Steps

1. [x] Parsed user intent: destination=NYC, date=tomorrow
2. [x] Inferred departure: SFO (from calendar)

## Current Blocker

8am flight sold out while user was deciding

## Next Action

Present 9am alternative ($12 more)

## Context

- User prefers aisle seats
- Departure: SFO
"""

# Texts that Markdown, the reader's kindness or a file could spoil.
ODD = [
    "",
    " ",
    "None",
    "- none",
    "_None_",
    " leading",
    "trailing ",
    "two\nlines",
    "a\n\nb",
    "a\n",
    "\na",
    "a\n  \nb",
    "## Context",
    "\\## Context",
    "goal\n## Next Action\n\nnothing",
    "# Title",
    "### deep",
    "- item",
    "1. [x] item",
    "[ ] unchecked",
    "[x] checked",
    "**key:** value",
    "key: value",
    "`code`",
    "`3`",
    '`"json"`',
    "```python\nprint()",
    "<!-- a comment",
    "carriage\rreturn",
    "crlf\r\nline",
    "bell\x07",
    "next line\x85 and\u2028",
    "half \ud83d of a character",
    "zero\x00",
    "naïve 日本 🛫",
    "* star * and _under_",
    "a | b",
    "\ttab",
]


def test_the_file_has_the_structure_that_its_readers_know() -> None:
    assert to_markdown(FLIGHT, "Book Flight to NYC") == (
        "# Progress: Book Flight to NYC\n\n"
        "## Current Goal\n\nBook morning flight to NYC for tomorrow\n\n"
        "## Completed Steps\n\n"
        "1. [x] Parsed user intent: destination=NYC, date=tomorrow\n"
        "2. [x] Searched flights: 47 options found\n\n"
        "## Current Blocker\n\n8am flight sold out while user was deciding\n\n"
        "## Next Action\n\nPresent 9am alternative ($12 more)\n\n"
        '## Context\n\n- **Departure:** SFO\n- **limit:** `500`\n- **files:** `["a.py", "b.py"]`\n'
    )


def test_nothing_done_and_nothing_in_the_way_reads_as_such() -> None:
    text = to_markdown(Progress(goal="Ship it"))
    assert text.count("_None_") == 4
    assert text.startswith("# Progress: Ship it\n")
    assert from_markdown(text) == Progress(goal="Ship it")


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_any_text_comes_back_from_every_place(odd: str) -> None:
    for progress in (
        Progress(goal=odd),
        Progress(goal="g", blocked=odd, next=odd),
        Progress(goal="g", done=["first", odd, "last"]),
        Progress(goal="g", context={"key": odd, odd: "value", "n": 1}),
        Progress(goal="g", context={odd: None}),
        Progress(goal="g", context=["first", odd, "last"]),
        Progress(goal=odd, done=[odd, odd], blocked=odd, next=odd, context=[odd]),
    ):
        assert from_markdown(to_markdown(progress, odd)) == progress
        to_markdown(progress, odd).encode()


def test_texts_of_several_lines_stay_readable() -> None:
    progress = Progress(goal="Fix\nthe build", done=["Read the log:\n\n- two errors"], context={"why": "a\nb"})
    text = to_markdown(progress)
    assert "\nFix\nthe build\n" in text
    assert "1. [x] Read the log:\n\n    - two errors\n" in text
    assert "- **why:** a\n    b\n" in text
    assert from_markdown(text) == progress


TEXT = st.one_of(st.sampled_from(ODD), st.text(max_size=30), st.text(alphabet="#`*-_[x] :\\\n1.a", max_size=20))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@given(
    st.builds(
        Progress,
        goal=TEXT,
        done=st.lists(TEXT, max_size=4),
        blocked=st.one_of(st.none(), TEXT),
        next=st.one_of(st.none(), TEXT),
        context=st.one_of(st.dictionaries(TEXT, JSON, max_size=4), st.lists(TEXT, max_size=4)),
    ),
    st.one_of(st.none(), TEXT),
)
@settings(max_examples=400, deadline=None)
def test_what_is_written_is_read_back(progress: Progress, title: str | None) -> None:
    text = to_markdown(progress, title)
    assert from_markdown(text) == progress
    assert from_markdown(text.encode().decode()) == progress


@given(st.text(max_size=200) | st.lists(st.sampled_from([*BY_HAND.split("\n"), *ODD]), max_size=20).map("\n".join))
@settings(max_examples=300, deadline=None)
def test_any_file_can_be_read_and_what_was_read_is_kept(text: str) -> None:
    progress = from_markdown(text)
    assert from_markdown(to_markdown(progress)) == progress


def test_values_that_json_has_no_form_for_are_there_as_text() -> None:
    circle: list[Any] = []
    circle.append(circle)
    context = {"when": date(2026, 11, 16), "pair": (1, 2), "odd": {(1, 2): 3}, "circle": circle}
    found = from_markdown(to_markdown(Progress(goal="g", context=context))).context
    assert isinstance(found, dict)
    assert found["odd"] == "{(1, 2): 3}"
    simple = from_markdown(to_markdown(Progress(goal="g", context={"when": date(2026, 11, 16), "pair": (1, 2)})))
    assert simple.context == {"when": "2026-11-16", "pair": [1, 2]}


def test_a_file_written_by_hand_is_understood() -> None:
    assert from_markdown(BY_HAND) == Progress(
        goal="Book morning flight to NYC for tomorrow",
        done=["Parsed user intent: destination=NYC, date=tomorrow", "Inferred departure: SFO (from calendar)"],
        blocked="8am flight sold out while user was deciding",
        next="Present 9am alternative ($12 more)",
        context=["User prefers aisle seats", "Departure: SFO"],
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("## Current Blocker", "## blockers:", {"blocked": FLIGHT.blocked}),
        ("## Next Action", "##Next steps ##", {"next": FLIGHT.next}),
        ("8am flight sold out while user was deciding", "None.", {"blocked": None}),
        ("8am flight sold out while user was deciding\n", "\n", {"blocked": None}),
        ("## Current Blocker\n\n8am flight sold out while user was deciding\n\n", "", {"blocked": None}),
        ("1. [x] Parsed", "* [X] Parsed", {"done": FLIGHT.done}),
        ("1. [x] Parsed", "- Parsed", {"done": FLIGHT.done}),
        ("2. [x] Searched", "\n\n2) [x] Searched", {"done": FLIGHT.done}),
        ("- **limit:** `500`", "- **limit:** 400", {"context": {**FACTS, "limit": "400"}}),
        ("- **limit:** `500`", "- limit: 400", {"context": {**FACTS, "limit": "400"}}),
        ("- **limit:** `500`", "- **limit:** `500`\n- No red-eye", {"context": {**FACTS, "notes": ["No red-eye"]}}),
        (
            "2. [x] Searched",
            "2. [ ] Searched",
            {"done": FLIGHT.done[:1], "context": {**FACTS, "unchecked steps": FLIGHT.done[1:]}},
        ),
        ("## Context", "## Ideas\n\nAsk Ann.\n\n## Context", {"context": {**FACTS, "Ideas": "Ask Ann."}}),
        ("## Current Goal", "Hurry!\n\n## Current Goal", {"context": {**FACTS, "notes": ["Hurry!"]}}),
        ("\n", "\r\n", {}),
    ],
)
def test_the_reader_takes_what_a_person_makes_of_it(before: str, after: str, expected: dict[str, Any]) -> None:
    text = to_markdown(FLIGHT)
    assert before in text
    found = from_markdown(text.replace(before, after))
    assert vars(found) == {**vars(FLIGHT), **expected}


def test_a_file_without_headings_is_a_goal() -> None:
    assert from_markdown("Book a flight,\nsoon.\n") == Progress(goal="Book a flight,\nsoon.")
    assert from_markdown("") == Progress()


def test_merge_adds_what_is_done_once_and_leaves_the_old_one_alone() -> None:
    old = Progress(goal="g", done=["a"], context={"x": [1]})
    new = merge(old, done=["a", "b", "b"])
    assert new.done == ["a", "b"]
    assert merge(new, done="c").done == ["a", "b", "c"]
    assert old == Progress(goal="g", done=["a"], context={"x": [1]})
    assert merge(None, goal="g") == Progress(goal="g")


def test_merge_keeps_replaces_and_clears() -> None:
    old = Progress(goal="g", blocked="b", next="n")
    assert merge(old) == old
    assert merge(old, blocked=None).blocked is None
    assert merge(old, blocked="", next="").next is None
    assert merge(old, goal="h", blocked="c", next="m") == Progress(goal="h", blocked="c", next="m")


def test_a_next_action_that_is_done_is_no_longer_next() -> None:
    old = Progress(goal="g", next="Call Ann")
    assert merge(old, done="Call Ann").next is None
    assert merge(old, done="Call Ann", next="Call Bob").next == "Call Bob"
    assert merge(old, done="Call Bob").next == "Call Ann"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({}, ["a", "a"], ["a"]),
        (["a"], "b", ["a", "b"]),
        (["a"], {"b": 1}, {"notes": ["a"], "b": 1}),
        ({"b": 1}, ["a"], {"b": 1, "notes": ["a"]}),
        ({"notes": ["a"]}, ["a", "b"], {"notes": ["a", "b"]}),
        ({"notes": "a"}, "b", {"notes": ["a", "b"]}),
        ({"a": 1}, None, {"a": 1}),
        (["a"], None, ["a"]),
        ([], {"a": 1}, {"a": 1}),
    ],
)
def test_merge_adds_to_the_context_whichever_form_it_has(old: Any, new: Any, expected: Any) -> None:
    before = repr(old)
    assert merge(Progress(context=old), context=new).context == expected
    assert repr(old) == before


@pytest.mark.parametrize(
    "change", [{"done": 3}, {"done": [3]}, {"done": {"a": 1}}, {"goal": 3}, {"blocked": ["a"]}, {"context": {1: 2}}]
)
def test_merge_says_what_is_not_a_text(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="progress: "):
        merge(Progress(), **change)


def test_a_file_is_replaced_as_a_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "PROGRESS.md"
    assert read(path) is None
    write(path, FLIGHT, "NYC")
    assert read(path) == FLIGHT
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    path.chmod(0o640)
    first = path.stat().st_ino
    write(path, Progress(goal="next"))
    assert read(path) == Progress(goal="next")
    assert path.stat().st_ino != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["PROGRESS.md"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")
    write(tmp_path / "link.md", FLIGHT)
    assert (tmp_path / "link.md").is_symlink()
    assert read(tmp_path / "real.md") == FLIGHT


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "PROGRESS.md"
    write(path, FLIGHT)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            write(path, Progress(goal="lost"))
    assert read(path) == FLIGHT
    assert [entry.name for entry in tmp_path.iterdir()] == ["PROGRESS.md"]


# -- git


def git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git work tree, and no identity, hooks or settings from this machine."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    folder = tmp_path / "work tree"
    folder.mkdir()
    git(folder, "init", "--quiet")
    return folder


def test_a_commit_takes_this_file_and_leaves_what_else_is_staged(repository: Path) -> None:
    path = repository / "PROGRESS.md"
    write(path, FLIGHT)
    (repository / "other.txt").write_text("mine")
    git(repository, "add", "other.txt")
    assert commit(path, "First step") == (True, "committed")
    assert git(repository, "show", "--name-only", "--format=%an <%ae>: %s") == (
        "Perdure <perdure@localhost>: First step\n\nPROGRESS.md"
    )
    assert git(repository, "diff", "--cached", "--name-only") == "other.txt"
    assert commit(path, "Again") == (True, "nothing to commit")
    write(path, merge(FLIGHT, done="Booked"))
    assert commit(path, "Second step").ok
    assert git(repository, "log", "--format=%s").split("\n") == ["Second step", "First step"]


def test_an_identity_that_is_set_is_used(repository: Path) -> None:
    git(repository, "config", "user.name", "Ann")
    write(repository / "PROGRESS.md", FLIGHT)
    assert commit(repository / "PROGRESS.md", "Ann's").ok
    assert git(repository, "log", "--format=%an <%ae>") == "Ann <perdure@localhost>"


@pytest.mark.parametrize("name", ["-n.md", "a*.md", ":!x.md", "häß lich.md", 'quo"te.md'])
@pytest.mark.parametrize(
    "message", ["plain", "", "-F x", "# hash", "two\n\nlines", "half \ud83d", "zero\x00", "$(touch x)"]
)
def test_odd_names_and_messages_are_no_options_and_no_shell(repository: Path, name: str, message: str) -> None:
    write(repository / name, FLIGHT)
    (repository / "ab.md").write_text("not this")
    assert commit(repository / name, message) == (True, "committed")
    assert git(repository, "show", "-z", "--name-only", "--format=") == name + "\0"
    assert not (repository / "x").exists()


def test_a_file_outside_of_git_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    path = tmp_path / "PROGRESS.md"
    assert commit(path, "m") == (False, f"there is no file {path}")
    write(path, FLIGHT)
    ok, reason = commit(path, "m")
    assert not ok
    assert "no git work tree" in reason


def test_a_machine_without_git_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "PROGRESS.md", FLIGHT)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path / "PROGRESS.md", "m") == (False, "git is not installed")


def test_what_git_refuses_is_the_reason(repository: Path) -> None:
    path = repository / "PROGRESS.md"
    write(path, FLIGHT)
    (repository / ".gitignore").write_text("PROGRESS.md\n")
    ok, reason = commit(path, "m")
    assert not ok
    assert "ignored" in reason
    (repository / ".gitignore").unlink()
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'not today'\nexit 1\n")
    hook.chmod(0o755)
    assert commit(path, "m") == (False, "not today")
    hook.unlink()
    lock = repository / ".git" / "index.lock"
    lock.touch()
    ok, reason = commit(path, "m")
    assert not ok
    assert "index.lock" in reason
    lock.unlink()
    assert commit(path, "m").ok


def test_a_hook_that_hangs_is_stopped_and_leaves_no_lock(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = repository / "PROGRESS.md"
    write(path, FLIGHT)
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    hook.chmod(0o755)
    monkeypatch.setattr(progress_file, "_GIT_TIMEOUT_S", 0.5)
    begin = time.monotonic()
    ok, reason = commit(path, "m")
    assert not ok
    assert "took longer" in reason
    assert time.monotonic() - begin < 20
    hook.unlink()
    monkeypatch.undo()
    assert commit(path, "m").ok


def test_git_looks_at_the_files_work_tree_not_at_the_environments(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the agent was started by a hook of another repository."""
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    write(repository / "PROGRESS.md", FLIGHT)
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(other / ".git"))
        patch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
        assert commit(repository / "PROGRESS.md", "Here").ok
    assert git(repository, "log", "--format=%s") == "Here"
