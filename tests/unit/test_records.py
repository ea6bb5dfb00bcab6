"""Records: ids that grow, hashes that cover every word of meaning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import NotFound
from perdure.log.ids import ID_MAX, ROOM, new_id, parse_id, show_id
from perdure.log.records import COLUMNS, NO_HASH, Record, chain_hash, record_of

MEANING: dict[str, Any] = {
    "parent_hash": NO_HASH,
    "record": 7,
    "kind": "state",
    "at": 1_700_000_000_000_000,
    "step": 3,
    "note": "a note",
    "metadata": '{"a":1}',
    "content": b"c" * 32,
}
RECORD = Record(
    tree=1,
    id=7,
    thread=2,
    parent=5,
    base=6,
    keyframe=0,
    key=4,
    kind="state",
    at=1_700_000_000_000_000,
    step=3,
    note=None,
    metadata=None,
    size=100,
    cost=2_000,
    hash=b"h" * 32,
    skip=None,
    body=11,
)


def test_a_record_has_the_columns_that_are_read() -> None:
    assert [column.strip() for column in COLUMNS.split(",")] == list(Record._fields)
    assert record_of(tuple(RECORD)) == RECORD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parent_hash", b"p" * 32),
        ("record", 8),
        ("kind", "update"),
        ("at", 1_700_000_000_000_001),
        ("step", 4),
        ("note", "a note."),
        ("note", None),
        ("note", ""),
        ("metadata", None),
        ("metadata", '{"a":2}'),
        ("content", b"d" * 32),
    ],
)
def test_the_hash_covers_every_part_of_the_meaning(field: str, value: Any) -> None:
    assert chain_hash(**MEANING) == chain_hash(**MEANING)
    assert chain_hash(**{**MEANING, field: value}) != chain_hash(**MEANING)


def test_parts_cannot_be_shifted_into_each_other() -> None:
    one = chain_hash(**{**MEANING, "note": "ab", "metadata": "c"})
    assert one != chain_hash(**{**MEANING, "note": "a", "metadata": "bc"})


@given(st.integers(1, ID_MAX))
def test_ids_are_shown_in_13_characters_and_in_their_order(value: int) -> None:
    assert len(show_id(value)) == 13
    assert parse_id(show_id(value)) == parse_id(show_id(value).upper()) == value
    assert (show_id(value) > show_id(value - 1)) or value == 0


@pytest.mark.parametrize(
    "text",
    ["", "0", "0" * 13, "0" * 12, "0" * 14, "u" * 13, "z" * 13, "8" + "0" * 12, "../../etc/pas", "0d3k9qx2m7w1é"],
)
def test_what_is_no_id_is_not_found(text: str) -> None:
    with pytest.raises(NotFound):
        parse_id(text)


@given(
    now=st.integers(0, 2**52),
    chance=st.integers(0, 2**32 - 1),
    after=st.integers(0, ID_MAX - ROOM),  # a greater one is refused as damaged
)
def test_ids_grow_along_a_line_whatever_the_clock_does(now: int, chance: int, after: int) -> None:
    assert after < new_id(now, chance, after) <= ID_MAX


def test_ids_follow_the_clock() -> None:
    now = 1_700_000_000_000_000
    assert new_id(now + 1_000, 0, 0) > new_id(now, 2**32 - 1, 0)
