"""The doctor's lines about context: states too large for a model, what finished runs leave, long-term memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_kit import DAY_US, now_us, raw, said, text_of, worst

import perdure
from perdure.ops.doctor import context


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    url = str(tmp_path / "d.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url, embedder=lambda texts: [[1.0, 2.0] for _ in texts]) as opened:
        yield opened


def test_states_larger_than_a_context_window_are_named(store: perdure.Store) -> None:
    store.thread("small").save({"n": 1})
    assert worst(said(store)["context"]) == "ok"
    store.thread("chatty").save({"messages": ["word " * 200_000]})
    [found] = said(store)["context"]
    assert (found.level, "1 thread with a state" in found.message, "chatty" in found.message) == ("note", True, True)
    assert "mask old observations" in found.hint


def test_finished_runs_whose_states_stay_for_ever_are_counted(store: perdure.Store) -> None:
    @perdure.durable(name="leaves")
    def leaves() -> int:
        perdure.state()["scratch"] = 1
        return 1

    store.run(leaves, id="one").result()
    assert worst(said(store)["context"]) == "ok"
    [found] = said(store, clock_us=lambda: now_us() + 40 * DAY_US)["context"]
    assert "journals and states of 1 run that finished over 30 days ago" in found.message
    assert "perdure retention runs" in found.hint


def test_memory_without_a_bound_and_at_its_caps(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_GROWING_ITEMS", 10)
    assert "no long-term memory" in said(store)["memory"][0].message
    users = store.memory("users", "a/b")
    users.put_many({f"k{n}": n for n in range(10)})
    [found] = said(store)["memory"]
    assert (found.level, "1 large namespace without a cap or an expiry" in found.message) == ("note", True)
    users.put_many({f"k{n}": n for n in range(10)}, ttl_s=3600)
    assert worst(said(store)["memory"]) == "ok"
    store.memory("users").policy(max_items=10)
    [found] = said(store)["memory"]
    assert (found.level, "within 10 % of the cap" in found.message) == ("note", True)
    users.policy(max_items=1000)  # its own policy, not the one above
    assert worst(said(store)["memory"]) == "ok"


def test_items_that_no_vector_finds(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    users = store.memory("users")
    users.put_many({f"k{n}": "text" for n in range(3)})
    assert worst(said(store)["memory"]) == "ok"
    raw(store, "UPDATE memory_vector SET model = 'old' WHERE id = (SELECT min(id) FROM memory_vector)")
    raw(store, "DELETE FROM memory_vector WHERE id = (SELECT max(id) FROM memory_vector)")
    findings = said(store)["memory"]
    assert [finding.level for finding in findings] == ["warning", "warning"]
    assert "1 of the newest 3 items have no vector" in text_of(findings)
    assert "vectors of 2 models" in text_of(findings)
    users.reembed()
    assert worst(said(store)["memory"]) == "ok"
    monkeypatch.setattr(context, "LARGE_ITEMS", 2)
    [found] = said(store)["memory"]
    assert "each process that searches" in found.message
