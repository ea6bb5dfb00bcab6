"""`perdure import-langgraph` as a process: what it prints, its exit codes, and what is in the store afterwards."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from graph_kit import at, human, talking
from import_kit import assert_equal, everything, stock

from perdure.langgraph import PerdureSaver

PERDURE = [sys.executable, "-m", "perdure.cli"]
SCRIPT = [str(Path(sys.executable).with_name("perdure"))]
MODULE = """
from dataclasses import dataclass

@dataclass
class Note:
    text: str
"""
WRITER = """
import sys
from typing import TypedDict
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from myapp import Note

class State(TypedDict):
    note: Note

builder = StateGraph(State)
builder.add_node("write", lambda state: {"note": Note("hi")})
builder.add_edge(START, "write")
with SqliteSaver.from_conn_string("old.sqlite") as saver:
    builder.compile(checkpointer=saver).invoke({"note": Note("")}, {"configurable": {"thread_id": "noted"}})
"""


def run(where: Path, *arguments: str, command: list[str] = PERDURE) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "PERDURE_STORE", "COLUMNS")}
    return subprocess.run(
        [*command, "import-langgraph", *arguments], cwd=where, env=kept, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def where(tmp_path: Path) -> Path:
    with stock(str(tmp_path / "old.sqlite")) as saver:
        for thread in ("alice", "bob"):
            talking(saver).invoke({"messages": [human("hello " * 50)]}, at(thread))
    return tmp_path


def test_imports_and_says_so(where: Path) -> None:
    done = run(where, "old.sqlite", "--store", "new.db")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "imported 6 checkpoints of 2 threads, with 6 pending writes"
    assert " KB -> " in lines[1]
    assert lines[2] == "verified: every checkpoint reads back as it is in the source"
    with PerdureSaver(str(where / "new.db")) as mine, stock(str(where / "old.sqlite")) as theirs:
        assert_equal(mine, theirs)
    again = run(where, "old.sqlite", "--store", "new.db", "--no-verify")
    assert again.returncode == 0
    assert again.stdout.splitlines()[0].endswith("0 pending writes; 6 checkpoints already there")
    assert "verified" not in again.stdout


def test_json(where: Path) -> None:
    done = run(where, "old.sqlite", "--store", "new.db", "--json", "--thread", "bob", "--tenant", "acme")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said.pop("source_bytes") > said.pop("store_bytes") - 1_000_000
    assert said == {"threads": 1, "checkpoints": 3, "writes": 3, "skipped": 0, "verified": True, "differences": []}
    with PerdureSaver(str(where / "new.db"), tenant="acme") as mine:
        assert {key[0] for key in everything(mine)} == {"bob"}


def test_into_postgresql(where: Path, postgres_url: str) -> None:
    done = run(where, f"sqlite:///{where / 'old.sqlite'}", "--store", postgres_url)
    assert done.returncode == 0, done.stderr
    with PerdureSaver(postgres_url) as mine, stock(str(where / "old.sqlite")) as theirs:
        assert_equal(mine, theirs)


@pytest.mark.parametrize("command", [PERDURE, SCRIPT])
def test_classes_of_ones_own_are_found_in_the_current_directory(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "myapp.py").write_text(MODULE)
    subprocess.run([sys.executable, "-c", WRITER], cwd=tmp_path, check=True, capture_output=True)
    refused = run(tmp_path, "old.sqlite", "--store", "new.db", command=command)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "types that are neither trusted nor registered: myapp.Note" in refused.stderr
    assert "give --trust myapp. " in refused.stderr
    assert "Traceback" not in refused.stderr
    done = run(tmp_path, "old.sqlite", "--store", "new.db", "--trust", "myapp.", command=command)
    assert done.returncode == 0, done.stderr


def test_differences_are_shown_and_the_exit_code_is_1(where: Path) -> None:
    run(where, "old.sqlite", "--store", "new.db")
    with sqlite3.connect(where / "old.sqlite") as connection:
        connection.execute("UPDATE checkpoints SET metadata = '{}' WHERE rowid = 1")
    done = run(where, "old.sqlite", "--store", "new.db")
    assert done.returncode == 1
    assert "thread 'alice', checkpoint " in done.stdout
    assert "its metadata differs" in done.stdout
    assert "not all is as in the source" in done.stderr
    assert len(json.loads(run(where, "old.sqlite", "--store", "new.db", "--json").stdout)["differences"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no.sqlite", "--store", "x.db"], 4, "there is no file no.sqlite to import"),
        (["old.sqlite"], 2, "which store? Give --store URL"),
        (["old.sqlite", "--store", "old.sqlite"], 2, "the same file"),
        (["old.sqlite", "--store", "x.db", "--thread", "carol"], 3, "the source has no thread 'carol'"),
        (["old.sqlite", "--store", "x.db", "--trust", "not a module"], 2, "trust takes module prefixes"),
        (["--store", "x.db"], 2, "SOURCE"),
    ],
)
def test_mistakes_are_one_line(where: Path, arguments: list[str], code: int, said: str) -> None:
    done = run(where, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_sees_progress(where: Path) -> None:
    main_side, process_side = pty.openpty()
    process = subprocess.Popen(
        [*PERDURE, "import-langgraph", "old.sqlite", "--store", "new.db"],
        cwd=where,
        env={**os.environ, "TERM": "dumb"},
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
    )
    os.close(process_side)
    shown = b""
    try:
        while piece := os.read(main_side, 65_536):
            shown += piece
    except OSError:  # Linux: the other side is closed
        pass
    finally:
        os.close(main_side)
    assert process.wait(30) == 0, shown
    assert b"importing 12/12" in shown
