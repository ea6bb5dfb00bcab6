"""Values that merge: the laws of a join, and against an oracle that knows every change."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import ExtraMissing, Undecodable, UnknownType, Unstorable, UsageError
from perdure.values.codec import decode, encode
from perdure.values.crdts import GCounter, LWWRegister, Mergeable, MVRegister, ORSet, PNCounter, SharedText
from perdure.values.registry import Codec

STORES = 3
# What a store does: change its value by an argument, or merge the value of another store.
ACTS = st.lists(
    st.tuples(st.integers(0, STORES - 1), st.one_of(st.integers(0, STORES - 1), st.sampled_from("abcABC"))), max_size=25
)
CHANGES: dict[type[Mergeable], Callable[[Any, str], Any]] = {
    GCounter: lambda value, letter: value.add(ord(letter)),
    PNCounter: lambda value, letter: value.add(ord(letter) - 90),
    ORSet: lambda value, letter: value.add(letter.lower()) if letter.islower() else value.remove(letter.lower()),
    MVRegister: lambda value, letter: value.set(letter),
    LWWRegister: lambda value, letter: value.set({"letter": letter}),
}


class World:
    """Stores with a copy each, and for each change: who made it, and which changes it had seen."""

    def __init__(self, kind: type[Mergeable], acts: list[tuple[int, int | str]]) -> None:
        self.copies: list[Any] = [kind() for _ in range(STORES)]
        self.seen: list[set[int]] = [set() for _ in range(STORES)]  # by store: numbers of changes
        self.changes: list[tuple[str, frozenset[int], int]] = []  # argument, what it had seen, when
        for at, (store, act) in enumerate(acts, 1):
            if isinstance(act, int):
                self.copies[store] = self.copies[store].merge(self.copies[act])
                self.seen[store] |= self.seen[act]
            else:
                changed = CHANGES[kind](self.copies[store], act)
                self.copies[store] = changed._stamped(f"store{store}", at, 7 - at)  # a clock that runs backwards
                self.changes.append((act, frozenset(self.seen[store]), at))
                self.seen[store].add(len(self.changes) - 1)

    def merged(self) -> Any:
        first, *others = self.copies
        for other in others:
            first = first.merge(other)
        return first

    def unseen(self) -> list[str]:
        """The arguments of the changes that no other change had seen."""
        seen = set().union(*(seen for _, seen, _ in self.changes)) if self.changes else set()
        return [letter for number, (letter, _, _) in enumerate(self.changes) if number not in seen]


@pytest.mark.parametrize("kind", CHANGES)
@given(acts=ACTS, order=st.permutations(range(STORES)))
@settings(max_examples=60, deadline=None)
def test_merging_is_a_join_and_copies_converge(kind: type[Mergeable], acts: Any, order: list[int]) -> None:
    world, codec = World(kind, acts), Codec()
    a, b, c = world.copies
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a == a.merge(kind())
    assert a.merge(b).merge(b) == a.merge(b)
    x, y, z = (world.copies[place] for place in order)
    assert z.merge(x).merge(y).merge(x) == world.merged()
    assert world.merged().compare(a) in ("after", "equal")
    for copy in world.copies:
        assert decode(encode(copy, codec), codec) == copy


@given(acts=ACTS)
@settings(max_examples=60, deadline=None)
def test_no_add_is_lost_and_none_counts_twice(acts: Any) -> None:
    for kind, base in ((GCounter, 0), (PNCounter, 90)):
        world = World(kind, acts)
        assert world.merged().value == sum(ord(letter) - base for letter, _, _ in world.changes)
    world = World(ORSet, acts)
    removed = {
        number
        for letter, seen, _ in world.changes
        if letter.isupper()
        for number in seen
        if world.changes[number][0] == letter.lower()
    }
    adds = {number: letter for number, (letter, _, _) in enumerate(world.changes) if letter.islower()}
    assert world.merged().value == {letter for number, letter in adds.items() if number not in removed}


@given(acts=ACTS)
@settings(max_examples=60, deadline=None)
def test_registers_keep_what_was_set_without_knowledge_of_each_other(acts: Any) -> None:
    world = World(MVRegister, acts)
    assert world.merged().value == sorted(set(world.unseen()))
    world = World(LWWRegister, acts)  # whatever the clocks say, a value never loses to one that it has seen
    expected: list[Any] = [{"letter": letter} for letter in world.unseen()]
    assert world.merged().value in (expected or [None])


def test_texts_converge_with_every_letter_that_nobody_deleted() -> None:
    dice = random.Random(3)
    base = SharedText().insert(0, "größer 😀 als")
    copies = [base, base, base]
    for round in range(60):
        at, other = dice.randrange(3), dice.randrange(3)
        text = copies[at]
        if round % 3 == 0 and len(text.value) > 20:
            copies[at] = text.delete(*sorted((dice.randrange(5), dice.randrange(5))))
        else:
            copies[at] = text.insert(dice.randrange(len(text.value) + 1), f"<{round}é>")
        copies[other] = copies[other].merge(copies[at])
    a, b, c = copies
    assert str(a.merge(b).merge(c)) == str(c.merge(b.merge(a))) == str(b.merge(c).merge(a).merge(a))
    assert base.insert(6, "1").merge(base.insert(6, "2").delete(0, 4)).value in ("er12 😀 als", "er21 😀 als")
    codec = Codec()
    assert decode(encode(a, codec), codec) == a


def test_a_text_needs_its_extra_and_is_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, text = Codec(), SharedText().insert(0, "tide")
    stored = encode(text, codec)
    monkeypatch.setitem(sys.modules, "pycrdt", None)
    assert str(decode(stored, codec)) == "tide"
    with pytest.raises(ExtraMissing, match="crdt"):
        text.insert(0, "high ")


def test_values_that_cannot_merge_are_refused() -> None:
    with pytest.raises(UsageError, match="merges with another one"):
        PNCounter().merge(GCounter())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="put each of them"):
        GCounter().add(1).merge(GCounter().add(1))
    with pytest.raises(UsageError, match="not negative"):
        GCounter().add(-1)
    for wrong in (True, 1.5, None, ("a",)):
        with pytest.raises(UsageError, match="a str or an int"):
            ORSet().add(wrong)  # type: ignore[arg-type]
    with pytest.raises(Unstorable, match="plain data"):
        MVRegister().set({1, 2})
    with pytest.raises(UsageError, match="index from 0"):
        SharedText().insert(1, "a")


def test_stored_text_of_another_shape_is_an_error_and_nothing_else() -> None:
    codec, dice = Codec(), random.Random(5)
    values = [
        PNCounter().add(1)._stamped("a", 1, 1),
        ORSet().add("x", 2)._stamped("a", 1, 1),
        MVRegister().set({"a": [1]})._stamped("a", 1, 1).set(2),
        LWWRegister().set("x")._stamped("a", 1, 1),
    ]
    junk: list[Any] = [
        None,
        -1,
        "",
        [],
        {},
        {"a": -1},
        [["a"]],
        [[1, {}]],
        {"^int": hex(2**70)},
        {"^obj": ["perdure.crdt.ORSet", 1, {}]},
    ]
    refused = 0
    for _ in range(400):
        parsed = orjson.loads(encode(dice.choice(values), codec))
        body = parsed["^obj"][2]
        body[dice.choice([*body])] = dice.choice(junk)
        try:
            value = decode(orjson.dumps(parsed), codec)
        except (Undecodable, UnknownType):
            refused += 1
        else:
            assert decode(encode(value, codec), codec) == value
            assert value.merge(type(value)()) == value
    assert refused > 200
