"""The space-time diagram, and the words about checkpointing."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perdure.teams.diagram import diagram
from perdure.teams.explain import TeamFacts, explain
from perdure.teams.recovery import SentMessage

SVG = "{http://www.w3.org/2000/svg}"
TURNS = {"planner": 3, "writer": 2, "critic": 1}
MESSAGES = [
    SentMessage("planner", 1, "writer", 1),
    SentMessage("writer", 1, "critic", 1),
    SentMessage("planner", 3, "writer", None),
]


def test_turns_are_boxes_messages_arrows_and_each_arrow_points_to_the_right() -> None:
    image = ElementTree.fromstring(diagram(TURNS, MESSAGES))
    assert len(image.findall(f"{SVG}rect")) == sum(TURNS.values())
    arrows = [line for line in image.findall(f"{SVG}line") if line.get("marker-end")]
    assert len(arrows) == len(MESSAGES)
    assert all(float(arrow.attrib["x2"]) > float(arrow.attrib["x1"]) for arrow in arrows)


def test_a_cut_shows_what_is_in_flight_and_what_is_an_orphan() -> None:
    image = ElementTree.fromstring(diagram(TURNS, MESSAGES, {"planner": 3, "writer": 0, "critic": 1}))
    kinds = [line.get("class") for line in image.findall(f"{SVG}line") if line.get("marker-end")]
    assert kinds == ["flying", "orphan", "flying"]
    assert len(image.findall(f"{SVG}polyline")) == 1


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><image href="x"', "a\x00b\x1f", "\ud800", "名" * 5000]
)
def test_a_hostile_name_is_text(name: str) -> None:
    text = diagram({name: 2, "b": 1}, [SentMessage(name, 1, "b", 1)], title=name)
    assert len(text.encode()) < 20_000
    image = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in image.iter()} <= {
        "svg", "title", "defs", "marker", "path", "text", "line", "rect"
    }  # fmt: skip


def test_a_huge_team_is_drawn_in_part_and_the_picture_says_so() -> None:
    turns = {f"member {number}": 10_000 for number in range(300)}
    messages = [SentMessage(f"member {n % 300}", 9_990, f"member {(n + 1) % 300}", 9_995) for n in range(20_000)]
    text = diagram(turns, messages)
    assert len(text) < 2_000_000
    assert "Not shown: 260 members, 395,200 earlier turns, 18,500 messages" in text


def test_damaged_rows_in_a_circle_are_drawn_all_the_same() -> None:
    ElementTree.fromstring(diagram({"a": 1, "b": 1}, [SentMessage("a", 1, "b", 1), SentMessage("b", 1, "a", 1)]))


def test_the_three_ways_are_explained_with_the_figures_of_the_team() -> None:
    facts = TeamFacts("research", 1, 3, 1_204, 1, 0, 0)
    text = explain(facts)
    assert text.startswith(
        "Team research: 3 members in one store, 1,204 turns, 1 message, 0 of them waiting; 0 snapshots are kept.\n"
        "It has a checkpoint of each turn."
    )
    assert "In one store a cut is a snapshot" in text
    assert "No other member falls" in text
    several = explain(facts._replace(stores=2, snapshots=1, furthest_fall=("writer", 2, 5)))
    assert "in 2 stores" in several
    assert "coordinated cuts and a checkpoint of each turn" in several
    assert "that of writer: it draws 2 others back, and 5 turns are undone" in several


def test_the_picture_of_the_docs_is_what_its_script_draws() -> None:
    docs = Path(__file__).parents[2] / "docs"
    script = runpy.run_path(str(docs / "team_diagram.py"))
    assert (docs / "pictures" / "team-cut.svg").read_text() == script["draw"]()
