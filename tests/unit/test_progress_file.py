"""The progress file: people and the next session read in it what was reported."""

from __future__ import annotations

from pathlib import Path

from perdure.agents.progress_file import Progress, from_markdown, read, to_markdown, write


def test_the_sections_are_read_back() -> None:
    for progress in (
        Progress(),
        Progress("Fly", ["Search: 47 found", "Ask"], ["sold out"], "Book\n\nthe other", {"from": "SFO", "limit": 500}),
        Progress("Fly", blocked=["sold out", "no answer"]),
        Progress("Fly", blocked=["- sold out"]),
        Progress("Two\nlines", context={"plan": ["a", "b"], "code": "`x`", "text": "two\nlines", "none": None}),
    ):
        assert from_markdown(to_markdown(progress)) == (progress, [])
    assert to_markdown(Progress("Fly", ["a"])).startswith("# Progress: Fly\n\n## Current Goal\n\nFly\n")


def test_what_a_person_makes_of_the_file_is_read() -> None:
    text = """# Progress: Fly
Notes first.\r
## Current Goal
Fly
## My own section
- mine

## Completed Steps
* Search
  in Lisbon
1. [x] Reported
+ [X] Ask
3. [ ] Pack
see the ticket
## Context
* **from:** SFO
* **code:** `not json`
- Bob knows the hotel
  and its owner
## My own section
- mine too
"""
    progress, done_by_hand = from_markdown(text)
    assert (progress.goal, progress.done) == ("Fly", ["Search in Lisbon", "Reported", "Ask"])
    assert progress.context == {"from": "SFO", "code": "`not json`"}
    assert done_by_hand == ["Search in Lisbon", "Ask"]
    assert progress.notes == {
        "": "Notes first.",
        "Completed Steps": "3. [ ] Pack\nsee the ticket",
        "Context": "- Bob knows the hotel\n  and its owner",
        "My own section": "- mine\n\n- mine too",
    }
    assert from_markdown(to_markdown(progress)) == (progress, []), "what was read is written again"


def test_a_file_is_replaced_as_a_whole_and_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "notes" / "P.md", tmp_path / "link.md"
    assert read(file) is None
    write(file, Progress("one"))
    link.symlink_to(file)
    write(link, Progress("two"))
    assert link.is_symlink()
    assert read(file) == Progress("two")
    assert [one.name for one in file.parent.iterdir()] == ["P.md"]
