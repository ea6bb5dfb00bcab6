"""A run that moves continues in one place only: after kills, faults, and repeated or conflicting calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from databases import new_database
from lab import PLACES, Lab
from moving_kit import agent_of
from soak import SOAK

import perdure
from perdure.runs.journal.blobs import BLOB_MIN_BYTES
from perdure.testing.processes import ForkServer


@pytest.fixture(params=PLACES)
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Three places for stores."""
    if request.param == "sqlite":
        yield [str(tmp_path / f"{name}.db") for name in "abc"]
        return
    server = request.getfixturevalue("postgres_server")
    names = [new_database(server) for _ in range(3)]
    yield [server.url(name) for name in names]
    for name in names:
        server.drop_database(name)


def finish(store: perdure.Store, agent: Any) -> list[Any]:
    store.answer("trip", "NYC1")
    store.send("trip", 2, topic="news")
    found: list[Any] = store.run(agent, "NYC", id="trip").result()
    return found


def test_a_moved_run_continues_from_its_journal_with_its_keys_and_its_state(urls: list[str]) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as other:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")
        target = other.tenant(lab.store._context.tenant_name)
        assert lab.store.ops.transfer(urls[1], runs=["trip"], move=True).runs == 1
        assert (lab.store.get_run("trip").status, target.get_run("trip").status) == ("exported", "waiting")
        assert lab.store.questions() == []
        result = finish(target, agent)
        assert result == [
            "B-NYC1",
            "B-NYC1",
            BLOB_MIN_BYTES * 4,
            2,
            {"plan": ["NYC"], "flights": ["NYC1", "NYC2"], "done": True},
        ]
        assert [one for one in lab.ran if one in ("search", "large")] == ["search", "large"]
        assert target.ops.verify().ok
        assert lab.store.ops.verify().ok


def test_it_is_moved_once_and_may_come_back(urls: list[str]) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as other:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")
        target = other.tenant(lab.store._context.tenant_name)
        lab.store.ops.transfer(urls[1], runs=["trip"], move=True)
        assert lab.store.ops.transfer(urls[1], runs=["trip"], move=True).runs == 0  # the same call again: it is done
        with pytest.raises(perdure.UsageError, match="was moved already, to"):
            lab.store.ops.transfer(urls[2], runs=["trip"], move=True)
        assert target.ops.transfer(urls[0], runs=["trip"], move=True).runs == 1
        assert target.get_run("trip").status == "exported"
        assert finish(lab.store, agent)[1] == "B-NYC1"
        assert lab.store.ops.verify().ok


def test_what_cannot_be_moved_stays_as_it_is(urls: list[str]) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as other:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")
        with pytest.raises(perdure.UsageError, match="two places"):
            lab.store.ops.transfer(urls[1], runs=["trip"])
        target = other.tenant(lab.store._context.tenant_name)
        target.start(agent, "LON", id="trip")
        with pytest.raises(perdure.UsageError, match="there is a run 'trip' in the target already"):
            lab.store.ops.transfer(urls[1], runs=["trip"], move=True)
        assert lab.store.get_run("trip").status == "waiting"
        assert finish(lab.store, agent)[1] == "B-NYC1"
        done = lab.store.ops.transfer(urls[2], runs=["trip"])  # finished: a copy of it
        assert (done.runs, lab.store.get_run("trip").status) == (1, "done")


def test_an_answer_that_comes_in_between_is_not_lost(urls: list[str]) -> None:
    """Between the reading and the fencing."""
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as other:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")

        def answer(point: str) -> None:
            if point == "committed" and lab.store.questions():
                lab.store.answer("trip", "NYC1")

        lab.store.ops.transfer(urls[1], runs=["trip"], move=True, hook=answer)
        target = other.tenant(lab.store._context.tenant_name)
        target.send("trip", 2, topic="news")
        assert target.run(agent, "NYC", id="trip").result()[1] == "B-NYC1"


@pytest.mark.parametrize("side", ["source", "target"])
def test_sigkill_at_any_step_leaves_the_run_in_one_place(urls: list[str], side: str) -> None:
    with perdure.open(urls[0]) as store:
        lab = Lab(store, "sync")
        agent = agent_of(lab)
        lab.run(agent, "NYC", id="trip")
        name = lab.store._context.tenant_name
    perdure.open(urls[1]).close()
    given = orjson.dumps({"runs": ["trip"], "move": True}).decode()
    with ForkServer("copy_kit:transfer_and_die") as nursery:
        for at in itertools.count(1, 1 if SOAK else 7):
            ended = list(nursery.start(urls[0], urls[1], name, given, side, at).lines()) == ["done"]
            places = []
            for url in urls[:2]:
                with perdure.open(url, tenant=name) as store:
                    assert store.ops.verify().ok
                    places += [info.status for info in store.runs() if info.status != "exported"]
            assert len(places) <= 1
            if ended:
                break
    assert places == ["waiting"]
    with perdure.open(urls[1], tenant=name) as there:
        assert finish(there, agent)[1] == "B-NYC1"
        assert there.ops.verify().ok
