"""`Declined`: the error of an effect in a LangGraph node that a person did not approve.

It is in a module of its own because LangGraph's tools take long to import; `nodes.py` imports it when it is raised.
"""

from __future__ import annotations

from langgraph.prebuilt.tool_node import ToolInvocationError

from perdure.errors import NotApproved


class Declined(NotApproved, ToolInvocationError):
    """A `NotApproved` that `ToolNode` turns into a message for the model, as it does with every ToolInvocationError."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)  # ToolInvocationError expects a validation error
        self.message = text
