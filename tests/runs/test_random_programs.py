"""Random programs, killed anywhere and resumed, by the same code or by another version of it.

    unchanged   each effect happens as often as the program says, and the run is done; or it is stuck, where unrecorded
                time decides: which worker of a pool takes what, when a sync effect comes in an async run
    changed     no effect happens more often than a version of the code says: the run is done, or stuck and says why

PERDURE_SOAK=1: 400 programs of each kind, else 2.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_programs import ASYNC, LEAVES, SYNC, Programs, changed, effects_of
from soak import SOAK

from perdure.testing.processes import ForkServer

PROGRAMS = 400 if SOAK else 2
KILLS_MAX = 8 if SOAK else 4
POINT_MAX = 40


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("random_programs:live") as server:
        yield server


@pytest.mark.parametrize("changes", [False, True], ids=["unchanged", "changed"])
@pytest.mark.parametrize("mode", ["sync", "async", "mixed"])
def test_each_effect_happens_once_or_the_run_is_stuck(
    fork_server: ForkServer, tmp_path: Path, mode: str, changes: bool
) -> None:
    for number in range(PROGRAMS):
        folder = tmp_path / str(number)
        folder.mkdir()
        _try(fork_server, folder, mode, random.Random(f"{mode} {changes} {number}"), changes)


def _try(fork_server: ForkServer, folder: Path, mode: str, chance: random.Random, changes: bool) -> None:
    (folder / "ledger").touch()
    kinds = SYNC if mode == "sync" else ASYNC
    program = Programs(chance, kinds, (*LEAVES, "seff", "seff") if mode == "mixed" else LEAVES).draw()
    versions, wanted = [program], effects_of(program)
    for life in range(KILLS_MAX + 1):
        at = chance.randint(3, POINT_MAX) if life < KILLS_MAX else 0
        how = "sync" if mode == "sync" else "async"
        child = fork_server.start(str(folder), versions[-1], how, chance.getrandbits(32), life, at)
        said = list(child.lines())
        if said:
            break
        if changes and chance.random() < 0.6:
            versions.append(changed(versions[-1], chance, kinds))
            wanted |= effects_of(versions[-1])
    [end] = said
    done = Counter(line.split()[0] for line in (folder / "ledger").read_text().splitlines())
    assert not done - wanted, (done - wanted, end, versions)
    if end["status"] == "stuck" and (changes or mode == "mixed" or "'pool'" in str(program)):
        assert "diverged from its journal" in end["why"], (end, versions)
    elif changes:
        assert end["status"] == "done", (end, versions)
    else:
        assert (end["status"], done) == ("done", wanted), (end, wanted - done, versions)
