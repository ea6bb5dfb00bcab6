"""No label reaches into another namespace, whatever its characters are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_fixtures import BOTH, MemoryHarness

from perdure import UsageError
from perdure.memory.labels import above, below, check_key, labels_of, path_of, unescaped

LABEL = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\0\x01\x02\x03%_./"), min_size=1, max_size=6
)
HOSTILE = [
    ("acme",), ("acme-corp",), ("acme", "corp"), ("acme\0corp",), ("acme\x01\x01corp",), ("acme\x01",),
    ("acme\x01\x01",), ("acme\x02",), ("%",), ("_cme",), ("a.b",), ("a", "b"), ("a/b",), ("Acme",), ("\u0430cme",),
    ("acme ",), ("\u00e9",), ("e\u0301",), ("\U0010ffff",), ("\U0010ffff", "x"),
]  # fmt: skip


@given(st.lists(LABEL, max_size=4), st.lists(LABEL, max_size=4))
def test_a_path_begins_with_those_of_the_namespaces_above_it_alone(one: list[str], other: list[str]) -> None:
    path, found = path_of(one), path_of(other)
    assert labels_of(path) == tuple(one)
    assert (path <= found < below(path)) == (other[: len(one)] == one)
    assert [labels_of(each) for each in above(path)] == [tuple(one[:n]) for n in range(len(one), 0, -1)]
    assert "\0" not in path


@given(LABEL)
def test_a_key_comes_back(key: str) -> None:
    assert unescaped(check_key(key)) == key


@pytest.mark.parametrize("labels", [("",), (1,), ("\ud800",), ("x" * 3000,)])
def test_what_is_no_label_is_refused(labels: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        path_of(labels)


def test_labels_in_a_tuple_are_refused_with_what_to_write_instead() -> None:
    with pytest.raises(UsageError, match=r'give labels one by one, store.memory\("users", "alice"\)'):
        path_of([("users", "alice")])  # type: ignore[list-item]


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_hostile_labels_see_nothing_of_each_other(memory: MemoryHarness) -> None:
    for labels in HOSTILE:
        await memory.put(memory.store.memory(*labels), "k\0%", {"of": list(labels)})
    for labels in HOSTILE:
        here = memory.store.memory(*labels)
        inside = [other for other in HOSTILE if other[: len(labels)] == labels]
        assert (await memory.value(here, "k\0%")) == {"of": list(labels)}
        assert sorted(item.namespace for item in await memory.do(here, "list")) == sorted(inside)
        assert [found.labels for found in await memory.do(here, "namespaces")] == sorted(inside)
        assert (await memory.value(here, "k")) is None
    await memory.do(memory.store.memory("acme"), "delete", "k\0%")
    left = await memory.do(memory.store.memory(), "list")
    assert sorted(item.namespace for item in left) == sorted(one for one in HOSTILE if one != ("acme",))


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_tenants_see_nothing_of_each_other(memory: MemoryHarness) -> None:
    mine, theirs = memory.store.memory("users", "alice"), memory.tenant("globex").memory("users", "alice")
    await memory.put(mine, "theme", "dark")
    assert await memory.value(theirs, "theme") is None
    assert await memory.keys(theirs) == []
    await memory.put(theirs, "theme", "light")
    assert await memory.value(mine, "theme") == "dark"
    assert len(await memory.do(mine, "history", "theme")) == 1
