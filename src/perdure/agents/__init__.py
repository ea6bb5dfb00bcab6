"""Helpers for agents on top of durable functions: tools for models, and progress records."""

from perdure.agents.progress_file import Progress as Progress
from perdure.agents.tools import Tools as Tools

__all__ = ["Progress", "Tools"]
