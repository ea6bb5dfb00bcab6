"""Chandy and Lamport's markers on queues that keep nothing, simulated."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from soak import SOAK

from perdure.teams.markers import Marker, Recorder

SEEDS, CONTROL_SEEDS = (10_000, 1_000) if SOAK else (500, 100)


class Coins(NamedTuple):
    coins: frozenset[str]
    clock: dict[str, int]


State = tuple[frozenset[str], dict[str, int]]


class Queues:
    """Agents with coins, and a queue for each pair of them."""

    def __init__(self, seed: int, *, fifo: bool = True) -> None:
        self.rng, self.fifo = random.Random(seed), fifo
        self.names = [f"a{number}" for number in range(self.rng.randint(2, 6))]
        self.held = {name: {f"{name}.{coin}" for coin in range(6)} for name in self.names}
        self.coins = Counter(coin for held in self.held.values() for coin in held)
        self.clock = {name: Counter[str]() for name in self.names}
        self.recorder = {name: Recorder[State, Coins](self.others(name), self.others(name)) for name in self.names}
        self.wire: dict[tuple[str, str], list[Coins | Marker]] = {
            (source, target): [] for source in self.names for target in self.others(source)
        }
        self.snapshots = 0

    def others(self, name: str) -> set[str]:
        return set(self.names) - {name}

    def state(self, name: str) -> State:
        return frozenset(self.held[name]), dict(self.clock[name])

    def send(self, name: str) -> None:
        if held := sorted(self.held[name]):
            coins = frozenset(self.rng.sample(held, self.rng.randint(1, min(2, len(held)))))
            self.held[name] -= coins
            self.clock[name][name] += 1
            self.wire[name, self.rng.choice(sorted(self.others(name)))].append(Coins(coins, dict(self.clock[name])))

    def begin(self, name: str) -> None:
        self.snapshots += 1
        for target, marker in self.recorder[name].begin(self.snapshots, lambda: self.state(name)):
            self.wire[name, target].append(marker)

    def deliver(self) -> bool:
        busy = [channel for channel, queue in self.wire.items() if queue]
        if not busy:
            return False
        source, target = self.rng.choice(busy)
        queue = self.wire[source, target]
        message = queue.pop(0 if self.fifo else self.rng.randrange(len(queue)))
        for other, marker in self.recorder[target].receive(source, message, lambda: self.state(target)):
            self.wire[target, other].append(marker)
        if isinstance(message, Coins):
            self.held[target] |= message.coins
            self.clock[target] |= Counter(message.clock)
            self.clock[target][target] += 1
        return True

    def run(self) -> None:
        for _ in range(200):
            kind, name = self.rng.random(), self.rng.choice(self.names)
            if kind < 0.03:
                self.begin(name)
            elif kind < 0.5:
                self.send(name)
            else:
                self.deliver()
        while self.deliver():
            pass

    def is_consistent(self, snapshot: int) -> bool:
        parts = {name: self.recorder[name].take(snapshot) for name in self.names}
        coins = Counter(coin for part in parts.values() for coin in part.state[0])
        coins.update(
            coin for part in parts.values() for queue in part.channels.values() for some in queue for coin in some.coins
        )
        clocks = {name: part.state[1] for name, part in parts.items()}
        orphans = any(clocks[one].get(one, 0) < clocks[other].get(one, 0) for one in clocks for other in clocks)
        return coins == self.coins and not orphans


def inconsistent(seed: int, *, fifo: bool = True) -> tuple[int, int]:
    queues = Queues(seed, fifo=fifo)
    queues.run()
    bad = sum(not queues.is_consistent(snapshot) for snapshot in range(1, queues.snapshots + 1))
    return queues.snapshots, bad


def test_markers_record_exactly_what_is_in_flight() -> None:
    results = [inconsistent(seed) for seed in range(SEEDS)]
    assert sum(bad for _, bad in results) == 0
    assert sum(count for count, _ in results) > SEEDS


def test_without_fifo_channels_markers_fail() -> None:
    failed = sum(inconsistent(seed, fifo=False)[1] > 0 for seed in range(CONTROL_SEEDS))
    assert failed > 0.9 * CONTROL_SEEDS


def test_a_channel_whose_sender_is_gone_does_not_hold_a_snapshot_open() -> None:
    recorder = Recorder[str, str]({"a", "b"}, {"a"})
    assert recorder.begin(1, lambda: "state") == [("a", Marker(1))]
    recorder.receive("a", "in flight", lambda: "later")
    recorder.receive("a", Marker(1), lambda: "later")
    recorder.close("b")
    assert recorder.take(1).channels == {"a": ["in flight"], "b": []}
