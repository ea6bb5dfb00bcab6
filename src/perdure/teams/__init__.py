"""Teams: agents that send each other messages, saved together while they run."""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
