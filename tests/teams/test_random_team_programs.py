"""Random programs over a team: whatever is killed, rewound, restored, given up and sent again, all is conserved."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from soak import SOAK
from team_kit import due_now, query, states
from team_program import HOPS, LEDGER, NAMES, check_program, child, expected, program_team

import perdure
from perdure.errors import AnswerRefused, Conflict, NotFound
from perdure.teams.members import roster_of
from perdure.teams.team import _TeamAgent


class RandomProgram:
    """A team, what was sent to it, and its snapshots with what had been sent then."""

    attempts: int | None = None  # of each message

    def __init__(self, store: perdure.Store, folder: Path, seed: int) -> None:
        self.store, self.chance = store, Random(seed)
        self.team = program_team(store, folder, self.attempts)
        self.team.members()
        self.sent: dict[str, str] = {}
        self.notes: set[str] = set()
        self.cuts: list[tuple[Any, dict[str, str], set[str]]] = []
        self.broken: set[str] = set()  # ever
        self.went_back = False
        self.log: list[str] = []
        self.count = 0

    def step(self) -> None:
        kinds = {
            self.send: 6, self.note: 2, self.work: 6, self.rewind: 3, self.cut: 2, self.restore: 2, self.resend: 2,
            self.break_some: 2, self.answer: 2, self.leave: 1, self.come_back: 2, self.due: 2,
        }  # fmt: skip
        [kind] = self.chance.choices(list(kinds), list(kinds.values()))
        self.log.append(kind.__name__)
        kind()

    def send(self) -> None:
        self.count += 1
        new = {f"t{self.count}": self.chance.choice(NAMES)}
        for token, to in [*new.items(), *self.chance.sample(list(self.sent.items()), min(1, len(self.sent)))]:
            self.team.send(to, {"token": token, "hops": HOPS}, key=token)  # one of them is there already
        self.sent |= new
        self.log.append(str(new))

    def note(self) -> None:
        self.count += 1
        with suppress(NotFound):
            self.store.send(f"program/{self.chance.choice(NAMES)}", f"n{self.count}", topic="notes")
            self.notes.add(f"n{self.count}")

    def work(self) -> None:
        names = self.chance.sample(NAMES, self.chance.randint(1, 3))
        self.log.append(" ".join(names))
        declared = roster_of(self.team._context, "program").declared
        agents = [_TeamAgent(declared[name].spec) for name in names]
        also = [child] if self.chance.random() < 0.5 else []
        perdure.Worker(self.store, [*agents, *also], concurrency=2).run(until_idle=True)

    def rewind(self) -> None:
        member = self.chance.choice(self.team.members())
        turn = self.chance.randint(0, member.turn)
        self.log.append(f"{member.name} to {turn} of {member.turn}")
        self.team.rewind(member.name, turn=turn, keys="same")
        self.went_back = True

    def cut(self) -> None:
        self.count += 1
        snap = self.team.snapshot(f"{self.store._context.tenant_name} {self.count}")
        self.cuts.append((snap, dict(self.sent), set(self.notes)))
        self.log.append(str(self.count))

    def restore(self) -> None:
        if self.cuts:
            number = self.chance.randrange(len(self.cuts))
            snap, sent, notes = self.cuts[number]
            self.log.append(snap.name)
            self.team.restore(snap, keys="same")
            self.went_back = True
            self.sent, self.notes = dict(sent), set(notes)

    def resend(self) -> None:
        for letter in self.team.dead():
            if self.chance.random() < 0.7:
                with suppress(NotFound):
                    letter.resend()
                    self.log.append(str(letter.message))

    def break_some(self) -> None:
        tokens = [token for token, _ in expected(self.sent)]
        broken = set(self.chance.sample(tokens, min(len(tokens), 3)))
        LEDGER.break_messages(broken)
        self.broken |= broken
        self.log.append(str(broken))

    def answer(self) -> None:
        for question in self.store.questions():
            with suppress(NotFound, AnswerRefused):
                self.store.answer(question.run, "yes")

    def leave(self) -> None:
        with suppress(Conflict):
            self.team.leave(self.chance.choice(NAMES))

    def come_back(self) -> None:
        for member in self.team.members():
            if member.has_left:
                declared = roster_of(self.team._context, "program").declared[member.name]
                self.team.spawn(declared.spec.fn, member.name)

    def due(self) -> None:
        due_now(self.store)

    def end(self) -> None:
        """Let everything come to its end: mended, answered, sent again."""
        LEDGER.break_messages(set())
        give_up = time.monotonic() + 60  # turns of killed workers are due when their leases have ended
        while time.monotonic() < give_up:
            self.come_back()
            for letter in self.team.dead():
                letter.resend()
            due_now(self.store)
            self.team.work(until_idle=True)
            perdure.Worker(self.store, [child]).run(until_idle=True)
            self.answer()
            if self.is_idle():
                return
        raise AssertionError(
            [(one.name, one.status, one.waiting, one.dead, one.waiting_for) for one in self.team.members()]
        )

    def is_idle(self) -> bool:
        waiting = "SELECT 1 FROM mail WHERE tenant = :tenant AND topic = '' AND state IN (0, 2)"
        busy = "SELECT 1 FROM run WHERE tenant = :tenant AND turn IS NOT NULL AND (entries > 0 OR status <> 'waiting')"
        return not query(self.store, waiting) and not query(self.store, busy) and not self.store.questions()

    def check(self) -> None:
        spoilt = self.broken | LEDGER.refused() if self.went_back else set[str]()
        check_program(states(self.team), self.notes_waiting(), self.sent, self.notes, spoilt)
        assert self.store.ops.verify().ok

    def notes_waiting(self) -> list[str]:
        snap = self.team.snapshot(f"{self.store._context.tenant_name} end")
        return [one.message for one in snap.in_flight()]


def run_program(program: RandomProgram, steps: int) -> None:
    """Run a program to its end and check it. What it did is printed if it fails."""
    try:
        for _ in range(steps):
            program.step()
        program.end()
        program.check()
    except BaseException:
        print("\n".join(program.log))
        raise


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member in the middle of a turn does not leave, at once."""
    monkeypatch.setattr("perdure.teams.letters._PATIENCE", 1)
    monkeypatch.setattr("perdure.teams.letters._PAUSE_S", 0)


@pytest.mark.parametrize("seed", range(500) if SOAK else [72])
@pytest.mark.usefixtures("impatient")
def test_a_random_program_conserves_messages_effects_and_notes(store: perdure.Store, tmp_path: Path, seed: int) -> None:
    run_program(RandomProgram(store, tmp_path, seed), 50)


class KillingProgram(RandomProgram):
    """A program beside workers that are processes of their own, of which one is killed now and then."""

    attempts = 1000

    def __init__(self, store: perdure.Store, folder: Path, seed: int) -> None:
        super().__init__(store, folder, seed)
        driver: Any = store._context.driver
        url = driver.capabilities.path or driver._target.conninfo
        program = Path(__file__).parent / "program_worker.py"
        self.command = [sys.executable, str(program), url, store._context.tenant_name, str(folder)]
        self.workers: list[subprocess.Popen[bytes]] = []

    def work(self) -> None:
        while len(self.workers) < 2:
            self.workers.append(subprocess.Popen(self.command))
        until, give_up = self.turns() + self.chance.randint(1, 10), time.monotonic() + 2
        while self.turns() < until and time.monotonic() < give_up:  # there may be less to do
            pass
        self.kill(self.workers.pop(self.chance.randrange(2)))

    def turns(self) -> int:
        return sum(one.turn for one in self.team.members())

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        worker.wait()

    def end(self) -> None:
        while self.workers:
            self.kill(self.workers.pop())
        super().end()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("impatient")
def test_a_random_program_beside_killed_workers_conserves_them_too(
    store: perdure.Store, tmp_path: Path, seed: int
) -> None:
    program = KillingProgram(store, tmp_path, seed)
    try:
        run_program(program, 30)
    finally:
        for worker in program.workers:
            program.kill(worker)
