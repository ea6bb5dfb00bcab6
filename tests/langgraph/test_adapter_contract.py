"""LangGraph's saver, and the port that it is built on, keep what every adapter must keep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from adapter_contract import AdapterContract

from perdure.testing.processes import ForkServer


@pytest.fixture(scope="class")
def fork_server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    with ForkServer(f"{request.cls.module}:child") as started:
        yield started


class TestSaver(AdapterContract):
    module = "saver_adapter"


class TestLine(AdapterContract):
    module = "line_adapter"
