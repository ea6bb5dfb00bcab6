"""Stored values as people read them: readable values, chat messages, LangGraph's checkpoints as plain data.

The command line and programs that show a store use the same functions. Nothing here imports a framework or needs your
classes: load states with `raw=True`.
"""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
