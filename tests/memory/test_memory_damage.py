"""A changed byte of memory is an error and no value; `verify` finds it, and words and counters that do not fit."""

from __future__ import annotations

import pytest
from sealed_kit import Raw

import perdure
from perdure.errors import Damaged

COVERED = {
    "key": "'other'",
    "version": "7",
    "kind": "'x'",
    "pinned": "1",
    "created_at": "5",
    "at": "6",
    "valid_to": "9",
}
COVERED |= {"body": "words"}


def fill(url: str) -> Raw:
    with perdure.open(url) as store:
        store.memory("a").put("k", {"fact": "hiking in May"})
        store.memory("a").put("k", {"fact": "sailing in June"})
        store.memory("a", "b").put("k", {"fact": "chess"})
        assert store.ops.verify().ok
    return Raw(url)


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("column", COVERED)
def test_a_version_that_was_changed_is_never_believed(url: str, column: str) -> None:
    raw = fill(url)
    raw(f"UPDATE memory_item SET {column} = {COVERED[column]} WHERE version = 2")
    with perdure.open(url) as store:
        with pytest.raises(Damaged):
            store.memory("a").list()
        assert any("(memory a)" in str(problem) for problem in store.ops.verify().problems)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE memory_item SET words = NULL WHERE version = 2",
        "UPDATE memory_item SET ended_at = NULL",
        "DELETE FROM memory_item WHERE version = 2",
        "UPDATE memory_space SET items = items + 1",
        "UPDATE memory_space SET bytes = bytes - 1",
        "UPDATE memory_space SET last = 0",
        "DELETE FROM memory_space",
        "INSERT INTO memory_vector (id, tenant, model, vec) SELECT 77, tenant, 'm', 'x' FROM tenant",
    ],
)
def test_verify_recounts_what_is_derived(url: str, change: str) -> None:
    raw = fill(url)
    raw(change)
    with perdure.open(url) as store:
        assert not store.ops.verify().ok
