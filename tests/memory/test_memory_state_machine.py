"""Memory against a dict: whatever is done in whatever order, every read says what the dict says."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_fixtures import Clock

import perdure
from perdure import Conflict
from perdure.threads.models import moment

KEYS = st.sampled_from(["a", "b\0", "acme", "acme-corp"])
PLACES = st.sampled_from([("x",), ("x", "y"), ("x-y",), ("x\x01\x01",)])
WORDS = ["hiking", "sailing", "chess"]
Known = dict[tuple[tuple[str, ...], str], tuple[Any, int | None]]  # value, and when it expires


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.open()
        self.known: Known = {}
        self.past: list[tuple[int, Known]] = []

    def open(self) -> None:
        self.store = perdure.open(self.folder / "a.db", durability="normal")
        self.store._context.clock_us = self.clock

    def teardown(self) -> None:
        assert self.store.ops.verify().ok
        self.store.close()
        shutil.rmtree(self.folder)

    def there(self) -> Known:
        now = self.clock.us
        return {key: found for key, found in self.known.items() if found[1] is None or found[1] > now}

    def tick(self) -> None:
        self.past.append((self.clock.us, dict(self.there())))
        self.clock.us += 1000

    @rule(
        place=PLACES, key=KEYS, words=st.lists(st.sampled_from(WORDS), max_size=2), ttl=st.sampled_from([None, 1, 60])
    )
    def put(self, place: tuple[str, ...], key: str, words: list[str], ttl: float | None) -> None:
        self.tick()
        self.store.memory(*place).put(key, {"fact": " ".join(words)}, ttl_s=ttl)
        expires = None if ttl is None else self.clock.us + int(ttl * 1e6)
        self.known[place, key] = ({"fact": " ".join(words)}, expires)

    @rule(place=PLACES, key=KEYS)
    def put_new(self, place: tuple[str, ...], key: str) -> None:
        self.tick()
        there = (place, key) in self.there()
        try:
            self.store.memory(*place).put(key, {"fact": "new"}, expect=0)
        except Conflict:
            assert there
        else:
            assert not there
            self.known[place, key] = ({"fact": "new"}, None)

    @rule(place=PLACES, key=KEYS)
    def delete(self, place: tuple[str, ...], key: str) -> None:
        self.tick()
        assert self.store.memory(*place).delete(key) == ((place, key) in self.there())
        self.known.pop((place, key), None)

    @rule(place=PLACES, word=st.sampled_from(WORDS))
    def forget(self, place: tuple[str, ...], word: str) -> None:
        self.tick()
        gone = [at for at, (value, _) in self.there().items() if at[0][: len(place)] == place and word in value["fact"]]
        assert self.store.memory(*place).forget({"fact": {"contains": word}}) == len(gone)
        for at in gone:
            del self.known[at]

    @rule(seconds=st.sampled_from([1, 59, 60]))
    def wait(self, seconds: int) -> None:
        self.tick()
        self.clock.pass_s(seconds)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def compact(self) -> None:
        self.store.ops.compact()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        at, known = data.draw(st.sampled_from(self.past))
        found = self.store.memory().as_of(moment(at)).list(limit=None)
        assert {(item.namespace, item.key): item.value for item in found} == {key: one[0] for key, one in known.items()}

    @invariant()
    def the_same_is_read_and_found(self) -> None:
        there = self.there()
        for place in (("x",), ("x", "y"), ()):
            inside = {at: found[0] for at, found in there.items() if at[0][: len(place)] == place}
            memory = self.store.memory(*place)
            assert {(item.namespace, item.key): item.value for item in memory.list(limit=None)} == inside
            for word in WORDS:
                found = {(item.namespace, item.key) for item in memory.search(word, limit=100)}
                assert found == {at for at, value in inside.items() if word in value["fact"]}


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
