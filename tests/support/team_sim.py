"""A deterministic simulation of the cut protocol: one seeded chooser of what happens next, unique coins, and checkers.

A store has coins that its agents hold, a mailbox, perhaps a turn with a message in hand. It runs the product's
`Member`: a call of that is one transaction. A crash loses what a transaction wanted to send, never what it committed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from team_leaving import SimView, may_leave

from perdure.teams.protocol import (
    Accept,
    Acknowledged,
    Command,
    CutHere,
    GoBack,
    Member,
    Parted,
    PeerBatch,
    PeerFrame,
    ReadRegister,
    Saved,
    contradiction,
    in_flight,
)
from perdure.teams.views import Started

TEAM = "sim"
SCENARIOS = ("all", "churn", "restore", "quiet", "snapshots")


class Violation(Exception):
    """The protocol has broken a promise."""


class NoChain(Member):
    """Trusts numbers alone."""

    def _parted(self, batch: PeerBatch, acked_link: bytes | None) -> Parted | None:
        return None


@dataclass
class Body:
    """What a frame stands for. The clock is a ghost: only checkers read it."""

    id: int
    coins: frozenset[int]
    clock: dict[str, int]


@dataclass
class Frozen:
    """A store's snapshot: what the product's would have, and ghosts."""

    cut: CutHere
    saved: Saved
    held: frozenset[int]
    mailbox: tuple[Body, ...]
    clock: dict[str, int]
    sent: dict[str, frozenset[int]]
    got: dict[str, frozenset[int]]


@dataclass
class SimStore:
    """One store: what is committed, and the snapshots."""

    member: Member
    view: SimView
    held: set[int] = field(default_factory=set)
    mailbox: list[Body] = field(default_factory=list)
    outbox: dict[str, list[PeerFrame]] = field(default_factory=dict)
    in_hand: bool = False
    down: bool = False
    clock: Counter[str] = field(default_factory=Counter)
    sent: dict[str, set[int]] = field(default_factory=dict)
    got: dict[str, set[int]] = field(default_factory=dict)
    frozen: list[Frozen] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def others(self) -> list[str]:
        return [name for name in self.view.members if name != self.name]

    def freeze(self, cut: CutHere) -> Frozen:
        marks = {peer: copy(marks) for peer, marks in self.member.marks.items()}
        outbox = {target: tuple(frames) for target, frames in self.outbox.items()}
        return Frozen(
            cut,
            Saved(marks, outbox, self.view.revision),
            frozenset(self.held),
            tuple(self.mailbox),
            dict(self.clock),
            {target: frozenset(ids) for target, ids in self.sent.items()},
            {source: frozenset(ids) for source, ids in self.got.items()},
        )

    def thaw(self, frozen: Frozen | None, *, keep_marks: bool = False) -> None:
        """Become what a snapshot shows; None: the store was not there yet."""
        frozen = frozen or Frozen(CutHere(0, 0, 0), Saved({}, {}), frozenset(), (), {}, {}, {})
        if not keep_marks:
            self.member.marks = {peer: copy(marks) for peer, marks in frozen.saved.marks.items()}
        self.outbox = {target: list(frames) for target, frames in frozen.saved.outbox.items()}
        self.held, self.mailbox, self.in_hand = set(frozen.held), list(frozen.mailbox), False
        self.clock = Counter(frozen.clock)
        self.sent = {target: set(ids) for target, ids in frozen.sent.items()}
        self.got = {source: set(ids) for source, ids in frozen.got.items()}

    def at(self, era: int, cut: int) -> Frozen | None:
        for frozen in reversed(self.frozen):
            if frozen.cut.era == era and frozen.cut.first <= cut <= frozen.cut.cut:
                return frozen
        return None

    def link_at(self, target: str, seq: int) -> bytes | None:
        return next((frame.link for frame in self.outbox.get(target, ()) if frame.seq == seq), None)


class Sim:
    """One run of the protocol, decided by its seed."""

    def __init__(
        self,
        seed: int,
        scenario: str = "",
        *,
        member: type[Member] = Member,
        induced: bool = False,
        leave_early: bool = False,
        marks_outside: bool = False,
        steps: int = 200,
    ) -> None:
        self.rng = random.Random(seed)
        self.scenario = scenario or SCENARIOS[seed % len(SCENARIOS)]
        self.member, self.induced, self.steps = member, induced, steps
        self.leave_early, self.marks_outside = leave_early, marks_outside
        names = tuple(f"s{number}" for number in range(self.rng.randint(2, 5)))
        self.view = SimView(members=names)
        self.stores: dict[str, SimStore] = {}
        for name in names:
            self.add(name)
        self.coins = frozenset(range(8 * len(names)))
        for coin in self.coins:
            self.stores[names[coin % len(names)]].held.add(coin)
        self.bodies: list[Body] = []
        self.wire: list[PeerBatch] = []
        self.partitions: set[frozenset[str]] = set()
        self.left: set[str] = set()
        self.checked: set[tuple[int, int]] = set()
        self.parted: set[str] = set()
        self.backup: tuple[str, Frozen, int] | None = None
        self.counts: Counter[str] = Counter()
        self.loss, self.doubles = self.rng.choice((0.0, 0.05, 0.2)), self.rng.choice((0.0, 0.1, 0.3))

    def add(self, name: str) -> None:
        self.stores[name] = SimStore(self.member(TEAM, name, self.view.era, self.view.cut), self.view)

    # What happens to a store

    def carry_out(self, store: SimStore, commands: Iterable[Command]) -> None:
        """Do what the protocol says, in its order."""
        for command in commands:
            match command:
                case CutHere():
                    store.frozen.append(store.freeze(command))
                case Acknowledged(target, upto):
                    store.outbox[target] = [frame for frame in store.outbox.get(target, []) if frame.seq > upto]
                case Accept(source, frame):
                    body = self.bodies[int(frame.body)]
                    store.mailbox.append(body)
                    store.clock |= Counter(body.clock)
                    store.clock[store.name] += 1
                    store.got.setdefault(source, set()).add(body.id)
                case ReadRegister():
                    self.read_register(store)
                case GoBack(era, cut):
                    store.thaw(store.at(era, cut), keep_marks=self.marks_outside)
                    store.member.resume(self.view)
                case Parted(peer):
                    self.parted.add(peer)

    def transaction(self, store: SimStore, commands: Sequence[Command]) -> bool:
        """Carry out commands. Return whether the store has cut: it then tells all others."""
        self.carry_out(store, commands)
        if not any(isinstance(command, CutHere) for command in commands):
            return False
        for target in store.others:
            if self.rng.random() < 0.8:  # else a crash after the commit, before the send
                self.flush(store, target)
        return True

    def read_register(self, store: SimStore) -> None:
        while store.member.era < self.view.era:
            self.carry_out(store, store.member.learn(self.view))
        commands = store.member.learn(self.view)
        store.view = self.view
        for gone in [target for target in store.outbox if target not in self.view.members]:
            del store.outbox[gone]
        self.transaction(store, commands)

    def flush(self, store: SimStore, target: str) -> None:
        self.put(store.member.batch(target, store.outbox.get(target, ())))

    def put(self, batch: PeerBatch) -> None:
        if frozenset((batch.source, batch.target)) in self.partitions:
            return
        parts = [batch]
        if len(batch.frames) > 1 and self.rng.random() < 0.7:  # each part arrives when it likes
            parts = [batch._replace(frames=(frame,)) for frame in batch.frames]
        for part in parts:
            if self.rng.random() >= self.loss:
                self.wire += [part] * (2 if self.rng.random() < self.doubles else 1)

    def deliver(self) -> None:
        if not self.wire:
            return
        at = self.rng.randrange(len(self.wire))
        self.wire[at], self.wire[-1] = self.wire[-1], self.wire[at]
        batch = self.wire.pop()
        store = self.stores[batch.target]
        if store.down or batch.target in self.left:
            return
        if self.receive(store, batch) and self.rng.random() < 0.8:  # else a crash between the two: it is sent again
            self.receive(store, batch)
        if batch.frames and self.rng.random() < 0.7:
            self.put(store.member.batch(batch.source))  # acknowledges

    def receive(self, store: SimStore, batch: PeerBatch) -> bool:
        return self.transaction(store, store.member.receive(batch, store.link_at(batch.source, batch.ack)))

    def turn(self, store: SimStore) -> None:
        """Begin a turn, or commit one: consume, change state, send."""
        if store.mailbox and not store.in_hand:
            store.in_hand = True
            return
        if store.in_hand:
            store.held |= store.mailbox.pop(0).coins
            store.in_hand = False
        targets = [name for name in store.others if name not in store.view.leaving]
        leaving = store.name in store.view.leaving
        store.clock[store.name] += 1
        if targets and store.held and (leaving or self.rng.random() < 0.7):
            held = sorted(store.held)
            coins = held if leaving else self.rng.sample(held, self.rng.randint(1, min(3, len(held))))
            target, body = self.rng.choice(targets), Body(len(self.bodies), frozenset(coins), dict(store.clock))
            self.bodies.append(body)
            store.held -= body.coins
            store.outbox.setdefault(target, []).append(store.member.send(target, str(body.id).encode()))
            store.sent.setdefault(target, set()).add(body.id)
            if self.rng.random() < 0.6:
                self.flush(store, target)

    # What happens to the team

    def start(self) -> None:
        if self.induced:  # any store cuts when it likes; its batches make the others follow
            store = self.rng.choice(self.live())
            if store.member.era == self.view.era:
                self.transaction(store, store.member.begin(store.member.cut + 1))
            return
        self.view = self.view.start()
        for store in self.live():
            if self.rng.random() < 0.25:  # the coordinator died: the register spreads the cut
                return
            if store.member.era == self.view.era and self.rng.random() < 0.5:
                self.transaction(store, store.member.begin(self.view.cut))

    def join(self) -> None:
        if self.scenario == "join":  # the worst moment: a cut was started and nobody knows
            self.view = self.view.start()
        if len(self.view.members) < (14 if self.scenario == "join" else 7):
            name = f"s{len(self.stores)}"
            self.view = self.view.join(name)
            self.add(name)
            self.counts["joins"] += 1
            if self.scenario == "join":
                store = self.rng.choice(self.live())
                self.read_register(store)
                for _ in range(4):
                    self.turn(store)

    def drain(self) -> None:
        able = [name for name in self.view.members if name not in self.view.leaving]
        if len(able) > 2:
            self.view = self.view.drain(self.rng.choice(able))

    def leave(self) -> None:
        for name, since in sorted(self.view.leaving.items()):
            store = self.stores[name]
            ready = not store.held and not store.mailbox if self.leave_early else self.is_empty(name, since)
            # It leaves by its own transaction, and has reached each cut that was started with it.
            current = store.member.cut == self.view.cut and store.member.era == self.view.era
            if ready and current and not store.down:
                self.view = self.view.leave(name)
                self.left.add(name)
                self.counts["leaves"] += 1

    def is_empty(self, name: str, since: int) -> bool:
        for cut in sorted(self.view.started)[-3:]:
            frozen = self.complete(cut)
            if frozen and name in frozen and self.view.started[cut].era == self.view.era:
                empty = not frozen[name].held and not frozen[name].mailbox
                if empty and may_leave(name, {store: one.saved for store, one in frozen.items()}, since):
                    return True
        return False

    def restore(self) -> None:
        if done := [cut for cut in self.view.started if self.complete(cut)]:
            newest = max(store.member.cut for store in self.stores.values())
            self.view = self.view.restore(self.rng.choice(done), newest)
            self.left = set(self.stores) - set(self.view.members)
            self.counts["restores"] += 1

    def keep_backup(self) -> None:
        store = self.rng.choice(self.live())
        self.backup = (store.name, store.freeze(CutHere(0, 0, 0)), store.member.cut)

    def put_backup_back(self) -> None:
        """Put one store back to what it was, behind the team's back, once others have taken what it sent since."""
        name, frozen, cut = self.backup or (self.view.members[0], None, 0)
        store, peers = self.stores[name], [self.stores[peer] for peer in self.view.members]
        if frozen and any(peer.got.get(name, set()) - frozen.sent.get(peer.name, frozenset()) for peer in peers):
            store.thaw(frozen)
            store.member.cut = cut
            self.counts["backups"] += 1

    # The run

    def live(self) -> list[SimStore]:
        return [store for name, store in self.stores.items() if not store.down and name not in self.left]

    def acts(self) -> list[str]:
        acts = ["deliver"] * 40 + ["turn"] * 28 + ["flush"] * 12 + ["check"] * 2 + ["leave"] * 2
        acts += ["start"] * {"quiet": 1, "snapshots": 6, "join": 6}.get(self.scenario, 2)
        acts += ["register"] * {"quiet": 1, "churn": 6, "join": 9}.get(self.scenario, 3)
        if self.scenario in ("all", "churn"):
            acts += ["crash"] * 2 + ["up"] * 6 + ["part"] + ["heal"] * 2
        return acts

    def run(self) -> Counter[str]:
        """Let it all happen, then come to rest. Raises Violation."""
        rare = {
            "join": ["join"], "churn": ["join", "drain", "drain"], "restore": ["restore"],
            "all": ["join", "drain", "restore"],
        }.get(self.scenario, [])  # fmt: skip
        acts, steps = self.acts(), self.steps * (2 if self.scenario == "churn" else 1)
        for number in range(steps):
            if self.scenario == "backup" and number == steps // 5:
                self.keep_backup()
            if self.scenario == "backup" and number > steps // 2 and not self.counts["backups"]:
                self.put_backup_back()
            if self.parted:
                return self.counts  # refused, and said so: an operator restores a cut
            self.step(self.rng.choice(rare if rare and self.rng.random() < 0.02 else acts))
        self.quiesce()
        return self.counts

    def step(self, act: str) -> None:
        live = self.live()
        if act == "up":
            for store in self.stores.values():
                store.down = store.down and self.rng.random() < 0.5
        elif act == "part":
            self.partitions.add(frozenset(self.rng.choices(list(self.stores), k=2)))
        elif act == "heal":
            self.partitions.clear()
        elif act == "check":
            self.check_all()
        elif not live:
            return
        elif act in ("turn", "flush", "register", "crash"):
            store = self.rng.choice(live)
            if act == "turn":
                self.turn(store)
            elif act == "register":
                self.read_register(store)
            elif act == "crash":
                store.down, store.in_hand = True, False
            elif store.others:
                self.flush(store, self.rng.choice(store.others))
        else:
            getattr(self, act)()

    def quiesce(self) -> None:
        """Heal everything. Then nothing is lost, and each cut of this era completes."""
        self.loss = self.doubles = 0.0
        self.partitions.clear()
        for store in self.stores.values():
            store.down = False
        for _ in range(60):
            for store in self.live():
                self.read_register(store)
                while store.mailbox:
                    store.held |= store.mailbox.pop(0).coins
                store.in_hand = False
                for target in store.others:
                    self.flush(store, target)
            while self.wire and not self.parted:
                self.deliver()
            if self.parted:
                return
            if not any(store.mailbox or any(store.outbox.values()) for store in self.live()):
                break
        else:
            raise Violation("never comes to rest")
        self.compare(Counter(coin for store in self.live() for coin in store.held), "at rest")
        for cut, (era, _) in self.view.started.items():
            if era == self.view.era and not self.complete(cut):
                raise Violation(f"cut {cut} never completes")
        self.check_all()
        if self.counts["backups"] and not self.parted:
            raise Violation("an old backup was not noticed")

    # Checkers

    def complete(self, cut: int) -> dict[str, Frozen] | None:
        era, members = self.view.started[cut]
        parts = {name: self.stores[name].at(era, cut) for name in members}
        whole = {name: frozen for name, frozen in parts.items() if frozen is not None}
        return whole if len(whole) == len(parts) else None

    def check_all(self) -> None:
        if self.induced:
            members = [self.stores[name].member for name in self.view.members]
            upto = min(member.cut if member.era == self.view.era else 0 for member in members)
            low = self.view.restored.resumes if self.view.restored else 0
            for cut in range(low + 1, upto + 1):
                self.view.started.setdefault(cut, Started(self.view.era, self.view.members))
        for cut, (era, _) in self.view.started.items():
            if (era, cut) not in self.checked and (frozen := self.complete(cut)):
                self.check(cut, frozen)
                self.checked.add((era, cut))
                self.counts["cuts"] += 1

    def check(self, cut: int, frozen: dict[str, Frozen]) -> None:
        """Conservation, no orphan by vector clocks, and channels that have exactly what was in flight."""
        saved = {name: one.saved for name, one in frozen.items()}
        if self.counts["backups"] and self.member is not NoChain and contradiction(saved):
            self.parted.add("a store of a cut")
            return
        channels = in_flight(saved)
        ids = {channel: {int(frame.body) for frame in frames} for channel, frames in channels.items()}
        coins = Counter(coin for one in frozen.values() for coin in one.held)
        coins.update(coin for one in frozen.values() for body in one.mailbox for coin in body.coins)
        coins.update(coin for some in ids.values() for id in some for coin in self.bodies[id].coins)
        self.compare(coins, f"in cut {cut}")
        for source, one in frozen.items():
            for target, other in frozen.items():
                if one.clock.get(source, 0) < other.clock.get(source, 0):
                    raise Violation(f"cut {cut}: an orphan of {source} at {target}")
                flying = one.sent.get(target, frozenset()) - other.got.get(source, frozenset())
                if flying != ids.get((source, target), set()):
                    raise Violation(f"cut {cut}: the channel from {source} to {target} is not what was in flight")
                self.counts["in flight"] += len(flying)

    def compare(self, coins: Counter[int], where: str) -> None:
        if coins != Counter(self.coins):
            lost = len(self.coins - coins.keys())
            raise Violation(f"{lost} coins lost, {coins.total() - len(coins)} doubled {where}")


def violations(seeds: Iterable[int], scenario: str = "", **options: object) -> tuple[list[str], Counter[str]]:
    """Run seeds. Return what went wrong, with the seed, and what happened in all of them."""
    wrong, counts = list[str](), Counter[str]()
    for seed in seeds:
        sim = Sim(seed, scenario, **options)  # type: ignore[arg-type]
        try:
            sim.run()
        except Violation as violation:
            wrong.append(f"seed {seed}: {violation}")
        counts += sim.counts
        counts["parted"] += bool(sim.parted)
    return wrong, counts
