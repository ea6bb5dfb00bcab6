"""States of CrewAI's flows in a store. CrewAI has an environment of its own, which `make soak` installs: 850 MB."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import perdure

ROOT = Path(__file__).parents[2]
SHOP = Path(__file__).with_name("crewai_shop.py")
PYTHON = Path(sys.prefix) / "crewai" / "bin" / "python"


def ran(folder: Path, *arguments: str, code: int = 0) -> str:
    quiet = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "HOME": str(folder)}
    environment = {**os.environ, **quiet, "CREWAI_STORAGE_DIR": str(folder / "crewai")}
    done = subprocess.run(
        [PYTHON, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def said(folder: Path, part: str) -> Any:
    return json.loads(ran(folder, str(SHOP), part, str(folder / "store.db")).splitlines()[-1])


def test_three_processes_save_and_nothing_is_lost(tmp_path: Path) -> None:
    assert said(tmp_path, "append") == [0, 0, 0]
    with perdure.open(str(tmp_path / "store.db")) as store:
        texts = [saved.state["state"]["text"] for saved in store.thread("crewai/chat").history()][::-1]
    expected = [[f"{process}-{number}" for number in range(20)] for process in range(3)]
    assert [[text for text in texts if text[0] == str(process)] for process in range(3)] == expected


def test_a_flow_that_waits_for_a_person_is_saved_with_its_question(tmp_path: Path) -> None:
    booked, notes = said(tmp_path, "feedback")
    assert booked == "Pension Sol: yes"
    assert "propose" in notes


def test_a_flow_that_was_killed_goes_on(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "crewai_flow.py")
    assert "searching" in ran(tmp_path, example, code=-signal.SIGKILL)
    told = ran(tmp_path, example)
    assert "searching" not in told
    assert told.endswith("Pension Sol in Lisbon is booked\n['book', 'search', 'search']\n")
