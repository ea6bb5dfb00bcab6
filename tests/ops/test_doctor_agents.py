"""The doctor's lines about agents: effects, checks before a retry, progress files, commits, next actions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from doctor_kit import DAY_US, now_us, said, text_of, worst

import perdure


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    url = str(tmp_path / "d.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as opened:
        yield opened


def test_effects_are_counted_and_a_doubt_that_a_person_settled_asks_for_reconcile(store: perdure.Store) -> None:
    @perdure.effect(name="doctor.pay")
    def pay(lost: bool) -> str:
        if lost:
            raise ConnectionError
        return "paid"

    @perdure.durable(name="doctor.agent")
    def agent(lost: bool) -> str:
        return pay(lost)

    assert worst(said(store)["effects"]) == "note"
    store.run(agent, False, id="fine").result()
    found = said(store)
    assert "1 effect in the newest 1 run" in text_of(found["effects"])
    assert (worst(found["effects"]), worst(found["reconcile"])) == ("ok", "ok")
    assert "before each began and after it" in text_of(found["effects"])
    store.run(agent, True, id="lost")
    assert "2 effects in the newest 2 runs: saved before each began; 1 of them" in text_of(said(store)["effects"])
    store.get_run("lost").resolve("1", done="paid")
    [found_doubt] = said(store)["reconcile"]
    assert (found_doubt.level, "1 effect" in found_doubt.message) == ("warning", True)
    assert worst(said(store, clock_us=lambda: now_us() + 40 * DAY_US)["reconcile"]) == "ok"


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def test_a_progress_file_is_there_fresh_committed_and_says_what_comes_next(
    store: perdure.Store, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    file = folder / "PROGRESS.md"

    @perdure.durable(name="doctor.session")
    def session(next: str | None, file: str | None, git: bool, stay: bool) -> None:
        perdure.progress(goal="Ship", done="Built", next=next, file=file, git=git)
        if stay:
            perdure.ask("Go on?")

    assert worst(said(store)["progress"]) == "note"
    store.run(session, "Test", None, False, False, id="none").result()
    found = said(store)
    assert "without a file" in text_of(found["progress"])
    assert worst(found["next"]) == "ok"
    store.run(session, None, str(file), False, True, id="open")
    found = said(store)
    assert worst([one for one in found["progress"] if str(file) in one.message]) == "ok"
    assert "no git repository" in text_of(found["commits"])
    assert "does not say what comes next" in text_of(found["next"])
    later = said(store, clock_us=lambda: now_us() + 9 * DAY_US)["progress"]
    assert "9 days old" in text_of(later)
    git(folder, "init", "--quiet")
    [found_git] = said(store)["commits"]
    assert (found_git.level, "git=True" in found_git.hint) == ("warning", True)
    git(folder, "config", "user.email", "a@b.c")
    git(folder, "config", "user.name", "a")
    store.run(session, "Test", str(file), True, False, id="committed").result()
    found = said(store)
    assert worst(found["commits"]) == "ok"
    assert {one.level for one in found["next"]} == {"ok"}
    (folder / "code.py").write_text("pass")
    if "d.db" in repr(store):
        (folder / "d.db-wal").touch()  # a file of the store, as if it were here
    [found_git] = said(store)["commits"]
    assert (found_git.level, "1 other change" in found_git.message) == ("note", True)
    file.write_text(file.read_text().replace("Built", "Dreamt"))
    found = said(store)
    assert "lacks steps" in text_of(found["progress"])
    assert worst(found["commits"]) == "warning"
    file.unlink()
    assert "not on this machine" in text_of(said(store)["progress"])
