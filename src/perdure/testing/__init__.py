"""Tools for tests of your own agents: a clock, the drill, a fake airline, processes that tests kill, PostgreSQL."""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
