"""LangGraph's saver, and the port that it is built on, keep what every adapter must keep."""

from __future__ import annotations

from adapter_contract import AdapterContract


class TestSaver(AdapterContract):
    module = "saver_adapter"


class TestLine(AdapterContract):
    module = "line_adapter"
