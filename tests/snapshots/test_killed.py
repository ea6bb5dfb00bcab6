"""A process that is killed while it takes or releases snapshots: what is listed is whole, and can be released."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from snapshot_child import digest
from snapshot_kit import fill
from soak import SOAK

import perdure

KILLS = 40 if SOAK else 4
CHILD = Path(__file__).parents[1] / "support" / "snapshot_child.py"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_is_listed_is_whole(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = str(tmp_path / "store.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    chance = random.Random(7)
    with perdure.open(url) as store:
        fill(store)
    facts: dict[str, str] = {}
    releases: set[str] = set()
    for kill in range(KILLS):
        command = [sys.executable, str(CHILD), url, str(kill * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as child:
            assert child.stdout is not None
            for _ in range(chance.randint(2, 9)):
                _note(child.stdout.readline(), facts, releases)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                _note(line, facts, releases)
    with perdure.open(url) as store:
        listed = {snapshot.name: snapshot for snapshot in store.snapshots()}
        assert set(facts) - releases <= set(listed)
        for name, snapshot in listed.items():
            if name in facts:
                assert digest(snapshot) == facts[name], name
        assert len(facts) > KILLS
        for snapshot in listed.values():
            assert snapshot.verify().problems == ()
            snapshot.release()
        assert store.snapshot("last").held_bytes() == 0
        assert store.ops.verify().problems == ()


def _note(line: str, facts: dict[str, str], releases: set[str]) -> None:
    words = line.split()
    if line.endswith("\n") and words[0] == "taken":
        facts[words[1]] = words[2]
    elif line.endswith("\n") and words[0] == "releases":
        releases.add(words[1])


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
