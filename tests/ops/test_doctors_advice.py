"""What the doctor advises makes its complaint go away. What `compact` and `prune` say is what they do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_kit import raw

import perdure
from perdure.cli.app import main


@perdure.durable(name="advice.unstorable")
def unstorable() -> object:
    return object()


def stick(store: perdure.Store) -> None:
    assert store.run(unstorable, id="r").status == "stuck"


def backed_up(store: perdure.Store, path: Path) -> None:
    store.thread("a").save({})
    store.ops.backup(str(path / "b.db"))


# A check: what makes it complain, and the command that it advises.
ADVICE: dict[str, tuple[Callable[[perdure.Store, Path], object], list[str]]] = {
    "backups": (lambda store, _: store.thread("a").save({}), ["store", "backup", "{folder}/b.db"]),
    "restore": (backed_up, ["store", "restore", "{folder}/b.db", "--test"]),
    "retention": (lambda store, _: store.thread("a").save({}), ["retention", "checkpoints=5"]),
    "runs": (lambda store, _: stick(store), ["run", "resume", "r"]),
}


@pytest.mark.parametrize("check", ADVICE)
def test_following_the_advice_clears_the_complaint(
    check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.db")
    make, command = ADVICE[check]
    with perdure.open(path) as store:
        make(store, tmp_path)
        [complaint] = [finding for finding in store.ops.doctor() if finding.check == check and finding.level != "ok"]
    assert command[0] in complaint.hint
    assert main([*(part.format(folder=tmp_path) for part in command), "--store", path]) == 0, capsys.readouterr()
    with perdure.open(path) as store:
        assert {finding.level for finding in store.ops.doctor() if finding.check == check} <= {"ok"}


@pytest.mark.parametrize("seed", range(6))
def test_a_dry_run_says_what_compact_does_also_with_damage(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with perdure.open(str(tmp_path / "a.db"), durability="normal") as store:
        store.ops.retention(checkpoints=2)
        for number in range(4):
            thread = store.thread(f"t{number}")
            for turn in range(chance.randint(1, 8)):
                thread.save({"turn": turn, "text": "y" * 200})
            if chance.random() < 0.5:
                thread.fork(chance.choice(list(thread.history())), name=f"f{number}").save({"fork": number})
        raw(store, "UPDATE body SET diff = :x, full_text = NULL WHERE id % 5 = :n", x=b"\0", n=seed % 5)
        foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
    for name in ("threads", "checkpoints", "runs", "held", "expired", "damaged"):
        assert getattr(foreseen, name) == getattr(done, name), name
