"""`perdure team recover|move|diagram|explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import perdure
from perdure.cli import main
from perdure.teams import link


def fill(east: str, west: str) -> None:
    """A planner who sends to a writer in the same store, and a reader in another store."""
    with perdure.open(east) as one, perdure.open(west) as other:
        team = one.team("research")

        @team.agent
        def planner(state: dict[str, Any], message: Any) -> None:
            perdure.send("writer", message)

        @team.agent
        def writer(state: dict[str, Any], message: Any) -> None:
            state["last"] = message

        @other.team("research").agent
        def reader(state: dict[str, Any], message: Any) -> None: ...

        link({"east": team, "west": other.team("research")})
        for number in range(2):
            team.send("planner", number)
        team.work(until_idle=True)
        team.snapshot("cut")


def test_a_team_is_explained_drawn_and_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    east, west = str(tmp_path / "east.db"), str(tmp_path / "west.db")
    fill(east, west)

    def run(*command: str, code: int = 0) -> str:
        assert main(["--store", east, *command]) == code
        done = capsys.readouterr()
        return done.out if code == 0 else done.err

    assert run("team", "recover", "research", "planner", "--turn", "1").splitlines() == [
        "planner goes back from turn 2 to turn 1: you asked for it",
        "writer goes back from turn 2 to turn 1: its turn 2 took a message that planner sent in turn 2, "
        "which is undone",
    ]
    text = run("team", "explain", "research")
    assert text.startswith("Team research: 2 members in 2 stores, 4 turns, 4 messages, 0 of them waiting; 1 snapshot")
    assert "that of planner: it draws 1 other back, and 2 turns are undone" in text
    assert "\n2. Uncoordinated" in text, "a line is a line"
    drawn = run("team", "diagram", "research", "--at", "cut")
    assert "\\n" not in drawn
    picture = ElementTree.fromstring(drawn)
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) == 4
    run("team", "diagram", "research", "--output", str(tmp_path / "team.svg"))
    assert (tmp_path / "team.svg").read_text().startswith("<svg")
    assert run("team", "move", "research", "writer", "--to", west) == "writer continues in store west\n"
    with perdure.open(west) as store:
        assert [member.name for member in store.team("research").members()] == ["reader", "writer"]
        assert store.thread("run:research/writer").load().state == {"last": 1}
    assert "no member 'nobody'" in run("team", "move", "research", "nobody", "--to", west, code=3)
    assert "there is no snapshot 'none'" in run("team", "diagram", "research", "--at", "none", code=3)
