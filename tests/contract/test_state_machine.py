"""Random work against a plain model: whatever is done in whatever order, the store holds what a dict would hold.

The model knows threads, trees, and each record's parent, author and state. It predicts where a save goes, what a prune
keeps, and what a late write is told. PERDURE_SOAK=1 runs fifty times as many examples, chosen at random.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import perdure

SOAK = bool(os.environ.get("PERDURE_SOAK"))
NAMES = ("a", "b", "c", "d", "e")
Opener = Callable[[int], perdure.Store]


@dataclass
class ModelRecord:
    parent: str | None
    author: int
    state: Any


@dataclass(eq=False)
class ModelThread:
    """A thread; those of one tree share `records`, which holds what is live."""

    number: int
    name: str
    records: dict[str, ModelRecord]
    tree: list[ModelThread]
    head: str = ""

    def line(self, at: str | None = None) -> list[str]:
        found: list[str] = []
        next_: str | None = at or self.head
        while next_ is not None and next_ in self.records:
            found.append(next_)
            next_ = self.records[next_].parent
        return found

    def known(self) -> list[str]:
        """What it has itself: its lines and branches, and what these share with other threads."""
        own = [key for key, record in self.records.items() if record.author == self.number]
        reached = {key for tip in (self.head, *own) for key in self.line(tip)}
        return [key for key in self.records if key in reached]  # in an order that does not depend on the ids

    def others_need(self) -> set[str]:
        """What the other threads of the tree can reach: their lines, and their branches'."""
        needed: set[str] = set()
        others = [thread for thread in self.tree if thread is not self]
        for thread in others:
            needed.update(thread.line())
        authors = {thread.number for thread in others}
        for key, record in self.records.items():
            if record.author in authors:
                needed.update(self.line(key))
        return needed

    def keep_only(self, keys: set[str]) -> None:
        for key in set(self.records) - keys:
            del self.records[key]


@dataclass(eq=False)
class Handle:
    """A real handle, and where the model believes it stands."""

    real: perdure.Thread
    thread: ModelThread
    cursor: str | None = None
    own: set[str] = field(default_factory=set)
    deleted: bool = False

    def parent(self) -> str:
        head = self.thread.head
        if self.cursor is None or self.cursor == head or head in self.own:
            return head
        return self.cursor


class Machine(RuleBasedStateMachine):
    """One example: two store objects on one database, and a dozen handles."""

    opener: Opener
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.example = next(Machine.numbers)
        self.stores = [self.opener(self.example), self.opener(self.example)]
        self.threads: dict[str, ModelThread] = {}
        self.handles: list[Handle] = []
        self.thread_numbers = itertools.count()

    # --- helpers

    def pick(self, chance: random.Random) -> Handle:
        return chance.choice([handle for handle in self.handles if not handle.deleted])

    def add_handle(self, thread: ModelThread, real: perdure.Thread, cursor: str | None = None) -> Handle:
        handle = Handle(real, thread, cursor)
        self.handles.append(handle)
        if len(self.handles) > 12:
            self.handles.pop(0)
        if not any(known.thread is thread for known in self.handles):
            self.handles.append(handle)
        return handle

    def wrote(self, handle: Handle, made: perdure.Checkpoint, parent: str | None, state: Any) -> None:
        thread = handle.thread
        on_head = parent is None or parent == thread.head
        assert made.is_head == on_head
        assert made.parent == parent
        thread.records[made.id] = ModelRecord(parent, thread.number, copy.deepcopy(state))
        if on_head:
            thread.head = made.id
        handle.cursor = made.id
        if not on_head:  # from here on it follows its branch
            handle.own.clear()
        handle.own.add(made.id)

    def next_state(self, chance: random.Random, state: Any) -> Any:
        state = copy.deepcopy(state)
        entries = state.setdefault("entries", [])
        match chance.randrange(8):
            case 0 | 1 | 2:
                entries.append("".join(chance.choices("abc def", k=chance.choice((20, 200, 3_000)))))
            case 3:
                del entries[: chance.randrange(len(entries) + 1)]
            case 4:
                state["mode"] = "big " * 3_000 if len(state.get("mode", "")) < 99 else "small"
            case 5:
                state.setdefault("deep", {}).setdefault("er", {})[str(chance.randrange(5))] = chance.random()
            case 6:
                state = {"entries": [], "n": chance.randrange(100)}
            case _:
                pass  # unchanged
        return state

    # --- rules

    @initialize()
    def first(self) -> None:
        self.new_thread(NAMES[0], random.Random(0))

    @precondition(lambda self: len(self.threads) < len(NAMES))
    @rule(name=st.sampled_from(NAMES), chance=st.randoms(use_true_random=True))
    def new_thread(self, name: str, chance: random.Random) -> None:
        if name in self.threads:
            return
        thread = ModelThread(next(self.thread_numbers), name, {}, [])
        thread.tree.append(thread)
        self.threads[name] = thread
        handle = self.add_handle(thread, chance.choice(self.stores).thread(name))
        state = self.next_state(chance, {})
        made = handle.real.save(state)
        thread.head = made.id
        self.wrote(handle, made, None, state)

    @rule(chance=st.randoms(use_true_random=True), load_first=st.booleans())
    def another_handle(self, chance: random.Random, load_first: bool) -> None:
        thread = chance.choice(list(self.threads.values()))
        handle = self.add_handle(thread, chance.choice(self.stores).thread(thread.name))
        if load_first:
            assert handle.real.load().id == thread.head
            handle.cursor = thread.head

    @rule(chance=st.randoms(use_true_random=True), times=st.integers(1, 4))
    def save(self, chance: random.Random, times: int) -> None:
        handle = self.pick(chance)
        for _ in range(times):
            parent = handle.parent()
            base = handle.thread.records.get(parent)
            state = self.next_state(chance, base.state if base else {})
            if base is None:
                with pytest.raises(perdure.NotFound):
                    handle.real.save(state)
                handle.real.load()
                handle.cursor = handle.thread.head
                return
            self.wrote(handle, handle.real.save(state), parent, state)

    @rule(chance=st.randoms(use_true_random=True))
    def save_on_an_older_parent(self, chance: random.Random) -> None:
        handle = self.pick(chance)
        parent = chance.choice(handle.thread.known())
        state = self.next_state(chance, handle.thread.records[parent].state)
        self.wrote(handle, handle.real.save(state, parent=parent), parent, state)

    @rule(chance=st.randoms(use_true_random=True))
    def load(self, chance: random.Random) -> None:
        handle = self.pick(chance)
        key = chance.choice(list(handle.thread.records))
        assert handle.real.load(key, strict=True).state == handle.thread.records[key].state
        head = handle.real.load(strict=True)
        assert (head.id, head.state) == (handle.thread.head, handle.thread.records[handle.thread.head].state)
        handle.cursor = handle.thread.head
        assert [one.id for one in handle.real.history()] == handle.thread.line()

    @rule(chance=st.randoms(use_true_random=True))
    def update(self, chance: random.Random) -> None:
        handle = self.pick(chance)
        head = handle.thread.head
        state = copy.deepcopy(handle.thread.records[head].state)
        number = chance.randrange(5)
        state.setdefault("deep", {}).setdefault("up", {})[str(number)] = number
        made = handle.real.update({"deep": {"up": {str(number): number}}})
        self.wrote(handle, made, head, state)

    @rule(chance=st.randoms(use_true_random=True))
    def rollback(self, chance: random.Random) -> None:
        handle = self.pick(chance)
        key, head = chance.choice(handle.thread.known()), handle.thread.head
        self.wrote(handle, handle.real.rollback(key), head, handle.thread.records[key].state)

    @rule(chance=st.randoms(use_true_random=True), name=st.sampled_from(NAMES))
    def fork(self, chance: random.Random, name: str) -> None:
        handle = self.pick(chance)
        key = chance.choice(handle.thread.known())
        if name in self.threads:
            with pytest.raises(perdure.UsageError):
                handle.real.fork(key, name=name)
            return
        real = handle.real.fork(key, name=name)
        source = handle.thread
        thread = ModelThread(next(self.thread_numbers), name, source.records, source.tree, key)
        source.tree.append(thread)
        self.threads[name] = thread
        self.add_handle(thread, real, key)

    @rule(chance=st.randoms(use_true_random=True), keep=st.integers(1, 6))
    def prune(self, chance: random.Random, keep: int) -> None:
        handle = self.pick(chance)
        thread = handle.thread
        kept = thread.line()[:keep]
        recent = {k for k, r in thread.records.items() if r.author == thread.number and k > kept[-1]}
        before = len(thread.records)
        thread.keep_only({*kept, *recent, *thread.others_need()})
        assert handle.real.prune(keep=keep).removed >= before - len(thread.records)

    @precondition(lambda self: len(self.threads) > 1)
    @rule(chance=st.randoms(use_true_random=True))
    def delete(self, chance: random.Random) -> None:
        thread = self.pick(chance).thread
        chance.choice(self.stores).delete_thread(thread.name)
        thread.keep_only(thread.others_need())
        thread.tree.remove(thread)
        del self.threads[thread.name]
        for handle in self.handles:
            handle.deleted = handle.deleted or handle.thread is thread
        if all(handle.deleted for handle in self.handles):
            other = next(iter(self.threads.values()))
            self.add_handle(other, self.stores[0].thread(other.name))

    @precondition(lambda self: any(handle.deleted for handle in self.handles))
    @rule()
    def write_late(self) -> None:
        for handle in [handle for handle in self.handles if handle.deleted]:
            self.handles.remove(handle)
            if handle.cursor is not None:  # else it has never met the thread that is gone
                with pytest.raises(perdure.errors.ThreadDeleted):
                    handle.real.save({"late": True})

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.opener(self.example)
        self.handles = [Handle(self.stores[which].thread(t.name), t) for t in self.threads.values()]

    # --- what must hold

    @invariant()
    def heads_are_equal(self) -> None:
        for store in self.stores:
            found = {info.name: info.head for info in store.threads()}
            assert found == {name: thread.head for name, thread in self.threads.items()}

    def teardown(self) -> None:
        try:
            reader = self.stores[1]
            for thread in self.threads.values():
                real = reader.thread(thread.name)
                assert [one.id for one in real.history()] == thread.line()
                for key, record in thread.records.items():
                    assert real.load(key, strict=True).state == record.state
            report = reader.ops.verify()
            assert report.ok, [str(problem) for problem in report.problems]
            trees = {id(thread.records): thread.records for thread in self.threads.values()}
            assert reader.ops.stats().checkpoints == sum(map(len, trees.values()))
        finally:
            for store in self.stores:
                store.close()


def run(opener: Opener, *, examples: int, steps: int) -> None:
    machine = type("StoreMachine", (Machine,), {"opener": staticmethod(opener)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * (50 if SOAK else 1),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not SOAK,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,) if not SOAK else tuple(Phase),
        ),
    )


@pytest.mark.timeout(0 if SOAK else 300)
def test_random_work_on_sqlite_matches_the_model(tmp_path: Path) -> None:
    run(
        lambda example: perdure.open(str(tmp_path / f"{example}.db"), durability="normal"),
        examples=30,
        steps=50,
    )


@pytest.mark.timeout(0 if SOAK else 300)
def test_random_work_on_postgres_matches_the_model(postgres_url: str) -> None:
    run(lambda example: perdure.open(postgres_url, tenant=f"example {example}"), examples=6, steps=40)
