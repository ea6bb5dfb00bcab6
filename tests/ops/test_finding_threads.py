"""Lists and counts of threads: what is found is what a search through all threads would find."""

from __future__ import annotations

from typing import Any

import pytest

import perdure
from perdure import ThreadInfo
from perdure.log import thread_listing


def fill(store: perdure.Store) -> list[ThreadInfo]:
    for number in range(24):
        metadata = {"user": f"u{number % 3}", "even": number % 2 == 0}
        store.thread(f"{'a' if number % 4 else 'b'}-{number}", metadata=metadata).save({"n": number})
    return store.threads(limit=None)


def selected(info: ThreadInfo, where: dict[str, Any]) -> bool:
    tests: dict[str, Any] = {
        "where": lambda items: all(info.metadata.get(key) == value for key, value in items.items()),
        "since": lambda time: info.updated_at >= time,
        "until": lambda time: info.updated_at < time,
        "name_prefix": info.name.startswith,
    }
    return all(tests[name](value) for name, value in where.items())


@pytest.mark.parametrize("rare_max", [5_000, 9, 3])
def test_any_combination_of_conditions_finds_what_a_search_through_all_finds(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch, rare_max: int
) -> None:
    """With 9 and 3, conditions count as common and are looked up thread by thread."""
    monkeypatch.setattr(thread_listing, "_RARE_MAX", rare_max)
    known = fill(store)
    assert len(known) == 24
    choices: dict[str, list[Any]] = {
        "where": [{"user": "u1"}, {"user": "u2", "even": True}, {"user": "nobody"}],
        "name_prefix": ["b-", "a-1", "c"],
        "since": [known[15].updated_at],
        "until": [known[4].updated_at],
    }
    conditions: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        conditions += [{**before, name: value} for before in conditions for value in values]
    for where in conditions:
        names = [info.name for info in known if selected(info, where)]
        assert [info.name for info in store.threads(**where, limit=None)] == names, where
        assert store.count_threads(**where, limit=None) == len(names), where


def test_pages_continue_after_a_cursor_whatever_is_saved_meanwhile(store: perdure.Store) -> None:
    known, names, before = fill(store), list[str](), None
    while page := store.threads(before=before, limit=7):
        names += [info.name for info in page]
        before = page[-1].cursor
        store.thread(f"new-{len(names)}").save({})
    assert names == [info.name for info in known]


async def test_a_count_stops_at_its_limit(store: perdure.Store) -> None:
    assert store.count_threads() == 0
    fill(store)
    assert store.count_threads(name_prefix="a", limit=5) == await store.acount_threads(name_prefix="a", limit=5) == 5
    assert store.count_threads(limit=0) == 0
    assert store.count_runs(tags={"a": "b"}, limit=0) == {}
