"""Make the diagram of the page about channels: `python docs/team_diagram.py` writes docs/pictures/team-cut.svg."""

from __future__ import annotations

from pathlib import Path

from perdure.teams.diagram import diagram
from perdure.teams.recovery import SentMessage

PICTURE = Path(__file__).parent / "pictures" / "team-cut.svg"
TURNS = {"planner": 5, "researcher": 5, "writer": 5, "critic": 4}
CUT = {"planner": 3, "researcher": 3, "writer": 2, "critic": 2}
MESSAGES = [
    SentMessage("planner", 1, "researcher", 1),
    SentMessage("planner", 2, "writer", 1),
    SentMessage("researcher", 1, "writer", 2),
    SentMessage("writer", 1, "critic", 1),
    SentMessage("critic", 1, "planner", 3),
    SentMessage("writer", 2, "critic", 2),
    SentMessage("researcher", 3, "writer", 3),
    SentMessage("planner", 3, "researcher", 4),
    SentMessage("critic", 2, "writer", 4),
    SentMessage("writer", 4, "critic", 3),
    SentMessage("researcher", 4, "planner", 4),
    SentMessage("critic", 3, "planner", 5),
    SentMessage("researcher", 5, "writer", 5),
    SentMessage("planner", 5, "critic", 4),
]


def draw() -> str:
    """Return the picture. It has a ground of its own, because a page embeds it as an image."""
    picture = diagram(TURNS, MESSAGES, CUT, title="A team of four, and a cut through it")
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return picture.replace("</defs>", f"</defs>{ground}", 1) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
