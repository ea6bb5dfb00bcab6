"""`thread.edit(path, value)`: one value of the newest state is replaced, without the classes of the others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import perdure


@dataclass
class Plan:
    title: str


def test_one_value_is_replaced_and_everything_else_stays_as_it_was(store: perdure.Store) -> None:
    thread = store.thread("alice")
    state: dict[str, Any] = {"pair": (1, 2), "tasks": [{"owner": "ann"}, {"owner": "bo"}], "odd": {"^": 1}}
    before = thread.save(state)
    after = thread.edit(["tasks", 1, "owner"], ("chen", 2.5), note="bo is away", expect=before, who="ann")
    assert (after.kind, after.note, after.parent, after.is_head) == ("update", "bo is away", before.id, True)
    [action] = store.ops.actions()
    assert (action.who, action.action, action.subject) == ("ann", "edit", "thread alice")
    state["tasks"][1]["owner"] = ("chen", 2.5)
    assert store.thread("alice").load().state == state
    asyncio.run(thread.aedit("pair", None))
    assert store.thread("alice").load().state == state | {"pair": None}
    assert store.ops.verify().ok


def test_a_state_of_unknown_classes_is_edited_without_them(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("t").save({"plan": perdure.register(Plan)("launch"), "n": 1})
    other = perdure.open(path)
    with other:
        other.thread("t").edit("n", 2)
        with pytest.raises(perdure.UsageError, match=r"state\['plan'\] is no dict or list"):
            other.thread("t").edit(["plan", "title"], "x")
    with perdure.open(path) as store:
        assert store.thread("t").load().state == {"plan": Plan("launch"), "n": 2}


def test_an_edit_is_refused_if_the_head_is_not_the_expected_one(store: perdure.Store) -> None:
    thread = store.thread("alice")
    seen = thread.save({"n": 1})
    store.thread("alice").update({"n": 2})
    with pytest.raises(perdure.Conflict, match="as expected"):
        thread.edit("n", 3, expect=seen)
    assert thread.edit("n", 4).state == {"n": 4}


@pytest.mark.parametrize(
    ("path", "why"), [([], "the whole state"), (["a", "b"], "is not there"), (["l", 5], "is not there"), (5, "no path")]
)
def test_a_path_that_leads_nowhere_is_refused(store: perdure.Store, path: Any, why: str) -> None:
    head = store.thread("alice").save({"a": {}, "l": [1]})
    with pytest.raises(perdure.UsageError, match=why):
        store.thread("alice").edit(path, 1)
    assert store.thread("alice").load() == head


def test_a_state_that_a_framework_keeps_is_refused(store: perdure.Store) -> None:
    store.thread("alice").save({"__line__": {"id": "x"}, "n": 1})
    with pytest.raises(perdure.UsageError, match="update_state"):
        store.thread("alice").edit("n", 2)
