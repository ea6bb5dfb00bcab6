"""Snapshots: the whole store at one instant, to read, compare, export and restore."""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
