"""Children of a fork server that has imported the client of Anthropic already: that takes two seconds."""

from __future__ import annotations

import os

import anthropic  # noqa: F401
from scripts import script

from perdure.testing.drill_stage import play
from perdure.testing.processes import Say

__all__ = ["play", "script_in"]


def script_in(say: Say, folder: str, environment: dict[str, str], path: str, *arguments: str) -> None:
    """Run a file as `python path arguments` does, in a folder. Its lines are said."""
    os.chdir(folder)
    os.environ.update(environment)
    script(say, path, *arguments)
