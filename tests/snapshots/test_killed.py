"""A process that is killed while it takes or releases snapshots: what is listed is whole, and can be released."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from snapshot_child import digest
from snapshot_kit import fill
from soak import SOAK

import perdure
from perdure.testing.processes import ForkServer

KILLS = 40 if SOAK else 4


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_is_listed_is_whole(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = str(tmp_path / "store.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    chance = random.Random(7)
    with perdure.open(url) as store:
        fill(store)
    said: list[list[str]] = []
    with ForkServer("snapshot_child:work") as fork_server:
        for kill in range(KILLS):
            child = fork_server.start(url, kill * 1000)
            said += itertools.islice(child.lines(), chance.randint(2, 9))
            said += child.kill()
    facts = {name: shown for word, name, *rest in said if word == "taken" for shown in rest}
    releases = {name for word, name, *_ in said if word == "releases"}
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
