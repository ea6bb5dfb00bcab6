"""`Declined`: the error of an effect in a LangGraph node that a person did not approve."""

from __future__ import annotations

from langgraph.prebuilt.tool_node import ToolInvocationError

from perdure.errors import NotApproved


class Declined(NotApproved, ToolInvocationError):
    """A `NotApproved` that `ToolNode`, by its default, answers the model with: it does so for ToolInvocationError."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)  # the other base wants the error of a validation
        self.message = text
