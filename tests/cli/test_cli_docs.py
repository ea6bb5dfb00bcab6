"""`docs/reference/cli.md` is what `docs/generate_cli.py` makes of the commands."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_generated_from_the_commands() -> None:
    generate = runpy.run_path(str(DOCS / "generate_cli.py"))
    page = (DOCS / "reference" / "cli.md").read_text()
    assert page == generate["page"](), "run `python docs/generate_cli.py`"
