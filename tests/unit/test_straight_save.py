"""A save with a cached base is a straight line: few Python calls, one append of the driver, and no program."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.storage import metrics
from perdure.storage.program import Transaction

CALLS_MAX = 50


def state(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "the same words again " * 12}] * 4, "number": number}


def test_a_warm_save_makes_at_most_50_python_calls(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread = store.thread("a")
        for number in range(5):
            thread.save(state(number))
        calls: list[str] = []

        def count(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            thread.save(state(5))
        finally:
            sys.setprofile(before)
        assert len(calls) <= CALLS_MAX + 1, calls  # the last one is the call that ends the counting


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_warm_save_runs_no_program_and_stores_what_the_general_way_stores(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "a.db") if kind == "sqlite" else str(request.getfixturevalue("postgres_url"))
    with perdure.open(url) as store:
        thread = store.thread("a")
        thread.save(state(0))
        with monkeypatch.context() as patched:
            patched.setattr(Transaction, "perform", None)
            for number in range(1, 30):
                assert thread.save(state(number), note=f"note {number}").is_head
        thread.save(state(30), metadata={"general": True})
        history = list(store.thread("a").history())
        assert [checkpoint.state["number"] for checkpoint in history] == list(range(30, -1, -1))
        assert [checkpoint.step for checkpoint in history] == list(range(30, -1, -1))
        assert store.ops.verify().ok


def test_another_writer_makes_it_a_branch_as_the_general_way_does(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store, perdure.open(str(tmp_path / "a.db")) as other:
        thread = store.thread("a")
        thread.save(state(0))
        thread.save(state(1))
        other.thread("a").save(state(2))
        assert not thread.save(state(3)).is_head
        assert not thread.save(state(4)).is_head
        assert {checkpoint.state["number"] for checkpoint in store.thread("a").branches()} == {2, 4}
        assert store.ops.verify().ok


class Counts:
    """A sink that counts measured operations."""

    traces = False

    def __init__(self) -> None:
        self.operations = 0

    def record(self, what: metrics.Instrument, value: float, *labels: str) -> None:
        self.operations += what is metrics.OPERATION

    def begin(
        self, name: str, attributes: dict[str, str], ids: dict[str, str], links: Mapping[str, str] = metrics.NO_LINKS
    ) -> None:
        pass

    def end(self, token: Any, attributes: Mapping[str, str | int], error: BaseException | None) -> None:
        pass

    def span_of(self, token: Any) -> str:
        return ""


def test_metrics_measure_the_warm_route_and_do_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Counts()
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread, line = store.thread("a"), store.thread("b").line()
        thread.save(state(0))
        line.save(state(0), id="0")
        metrics.install(sink)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(Transaction, "perform", None)
                thread.save(state(1))
                line.save(state(1), id="1", parent="0")
        finally:
            metrics.remove(sink)
        assert sink.operations == 2
        assert store.thread("a").load().state["number"] == 1
        assert store.ops.verify().ok


def test_a_line_begins_its_second_thread_with_one_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes numbers for those to come, in its own transaction. No number is used twice."""
    with perdure.open(str(tmp_path / "a.db")) as store, perdure.open(str(tmp_path / "a.db")) as other:
        store.thread("first").line().save(state(0), id="0")
        other.thread("between").line().save(state(0), id="0")
        with monkeypatch.context() as patched:
            patched.setattr(Transaction, "perform", None)
            store.thread("second", metadata={"user": "ann"}).line().save(state(1), id="0")
            other.thread("third").line().save(state(1), id="0")
        store.thread("third").line().save(state(2), id="1")  # the name is taken: it follows what is there
        assert {info.name for info in store.threads()} == {"first", "between", "second", "third"}
        assert [info.name for info in store.threads(where={"user": "ann"})] == ["second"]
        assert [one.id for one in store.thread("third").line().history()] == ["1", "0"]
        assert store.ops.verify().ok
