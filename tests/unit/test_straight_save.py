"""A save with a cached base is a straight line: few Python calls, one append of the driver, and no program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import perdure
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
