"""What agents need beside durable functions: tools for models, and a record of how far they have come."""

from perdure.agents.progress_file import Progress as Progress
from perdure.agents.tools import Tools as Tools

__all__ = ["Progress", "Tools"]
