"""The recovery line: who falls with a rewind, how far, and why."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import SOAK

from perdure.errors import UsageError
from perdure.teams.recovery import SentMessage, induced_save, recovery_line


class History:
    """A random run of members that send, take, and (where turns are not saved one by one) save now and then."""

    def __init__(self, seed: int, members: int, steps: int, *, save: float = 1.0, induced: bool = False) -> None:
        rng = random.Random(seed)
        self.names = [f"m{number}" for number in range(members)]
        self.turns = dict.fromkeys(self.names, 0)
        self.saves: dict[str, list[int]] = {name: [] for name in self.names}
        self.indexes: dict[str, dict[int, int]] = {name: {} for name in self.names}  # a save's number to its turn
        self.messages: list[SentMessage] = []
        index = dict.fromkeys(self.names, 0)
        flying: list[tuple[str, int, str, int]] = []
        for _ in range(steps):
            name = rng.choice(self.names)
            mine = [message for message in flying if message[2] == name]
            taken = rng.choice(mine) if mine and rng.random() < 0.8 else None
            if taken and induced and (forced := induced_save(index[name], taken[3])) is not None:
                self._save(name, index, forced)
            self.turns[name] += 1
            if taken:
                flying.remove(taken)
                self.messages.append(SentMessage(*taken[:3], self.turns[name]))
            if rng.random() < 0.8:
                target = rng.choice([other for other in self.names if other != name])
                flying.append((name, self.turns[name], target, index[name]))
            if rng.random() < save:
                self._save(name, index, index[name] + 1)
        self.messages += [SentMessage(*message[:3], None) for message in flying]

    def _save(self, name: str, index: dict[str, int], number: int) -> None:
        for between in range(index[name] + 1, number + 1):
            self.indexes[name][between] = self.turns[name]
        index[name] = number
        self.saves[name].append(self.turns[name])

    @property
    def newest_saves(self) -> dict[str, int]:
        return {name: (self.saves[name] or [0])[-1] for name in self.names}


def orphans(line: Mapping[str, int], messages: Sequence[SentMessage]) -> bool:
    return any(
        message.sent_turn > line[message.member]
        and message.taken_turn is not None
        and message.taken_turn <= line[message.receiver]
        for message in messages
    )


def by_brute_force(
    history: History, limits: Mapping[str, int], saves: Mapping[str, Sequence[int]] | None
) -> dict[str, int]:
    """The greatest of all lines without orphans: they form a lattice, so it is one of them."""
    places = [
        [
            turn
            for turn in range(limits[name] + 1)
            if saves is None or turn in (0, *saves[name]) or turn == history.turns[name]
        ]
        for name in history.names
    ]
    lines = [
        line
        for line in itertools.product(*places)
        if not orphans(dict(zip(history.names, line, strict=True)), history.messages)
    ]
    greatest = tuple(max(column) for column in zip(*lines, strict=True))
    assert greatest in lines
    return dict(zip(history.names, greatest, strict=True))


@settings(max_examples=1000 if SOAK else 60, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), members=st.integers(2, 4), steps=st.integers(1, 22), data=st.data())
def test_the_recovery_line_is_the_greatest_state_without_orphans(
    seed: int, members: int, steps: int, data: st.DataObject
) -> None:
    rarely = data.draw(st.booleans())
    history = History(seed, members, steps, save=0.3 if rarely else 1.0)
    saves = history.saves if rarely else None
    name = data.draw(st.sampled_from(history.names))
    turn = data.draw(st.sampled_from([0, *history.saves[name]]) if rarely else st.integers(0, history.turns[name]))
    line = recovery_line(history.turns, history.messages, {name: turn}, saves=saves)
    assert line.turns == by_brute_force(history, {**history.turns, name: turn}, saves)
    assert {fall.member for fall in line.falls} == {n for n in history.names if line.turns[n] < history.turns[n]}
    after = set(line.returned(history.messages)) | set(line.withdrawn(history.messages))
    undone = [m for m in history.messages if m.taken_turn and m.taken_turn > line.turns[m.receiver]]
    assert set(undone) <= after, "what an undone turn took waits again, or was never sent"


def test_each_fall_is_explained_in_words() -> None:
    messages = [
        SentMessage("writer", 5, "editor", 7),
        SentMessage("editor", 8, "critic", 2),
        SentMessage("person", 1, "writer", 5),
    ]
    line = recovery_line({"writer": 6, "editor": 9, "critic": 4}, messages, {"writer": 4})
    assert [str(fall) for fall in line.falls] == [
        "writer goes back from turn 6 to turn 4: you asked for it",
        "editor goes back from turn 9 to turn 6: its turn 7 took a message that writer sent in turn 5, which is undone",
        "critic goes back from turn 4 to turn 1: its turn 2 took a message that editor sent in turn 8, which is undone",
    ]
    assert line.waves == 2
    assert line.returned(messages) == [messages[2]]
    assert line.withdrawn(messages) == messages[:2]


def test_rare_saves_fall_like_dominoes_and_a_save_of_each_turn_does_not() -> None:
    """Two members answer each other. Each saves at every fourth turn, in the middle between the saves of the other."""
    messages = [
        message
        for turn in range(1, 20)
        for message in (SentMessage("a", turn, "b", turn), SentMessage("b", turn, "a", turn + 1))
    ]
    turns, rare = {"a": 20, "b": 20}, {"a": [4, 8, 12, 16, 20], "b": [2, 6, 10, 14, 18]}
    domino = recovery_line(turns, messages, {"a": 16}, saves=rare)
    assert domino.turns == {"a": 0, "b": 0}
    assert domino.waves == 9
    each = recovery_line(turns, messages, {"a": 16})
    assert each.turns == {"a": 16, "b": 16}


@pytest.mark.parametrize("seed", range(50 if SOAK else 8))
def test_induced_saves_of_one_number_are_consistent_and_stop_the_domino(seed: int) -> None:
    alone, induced = (History(seed, 5, 300, save=0.05, induced=way) for way in (False, True))
    for number in range(1, min(max(saves, default=0) for saves in induced.indexes.values()) + 1):
        line = {name: turns.get(number, 0) for name, turns in induced.indexes.items()}
        assert not orphans(line, induced.messages)
    fallen = [
        sum(history.turns.values())
        - sum(recovery_line(history.turns, history.messages, history.newest_saves, saves=history.saves).turns.values())
        for history in (alone, induced)
    ]
    assert fallen[1] < fallen[0]


def test_a_rewind_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="no member 'nobody'; it has a"):
        recovery_line({"a": 3}, [], {"nobody": 1})
    with pytest.raises(UsageError, match="turns 0 to 3: turn 4"):
        recovery_line({"a": 3}, [], {"a": 4})
