"""Reads that name their consistency: a store that cannot keep it says so, and what is shown respects causes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest
from memory_fixtures import BOTH, MemoryHarness
from role_kit import Roles, roles_of
from standby_kit import standby_of

import perdure
from perdure import UsageError
from perdure.errors import Stale
from perdure.memory import GCounter, Memory
from perdure.regions import promote, replicate
from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ForkServer


def count(memory: Memory, key: str = "n") -> int:
    item = memory.get(key)
    return 0 if item is None else item.value.value


def test_a_standby_answers_what_it_holds_and_no_more(postgres_server: PostgresServer, postgres_url: str) -> None:
    with standby_of(postgres_server) as standby:
        perdure.open(postgres_url).close()
        standby.catch_up(postgres_url)
        place = standby.url(postgres_url.rsplit("/", 1)[1])
        with perdure.open(postgres_url) as store, perdure.open(place, read_only=True) as replica:
            here, there = store.memory("team"), replica.memory("team")
            here.put("n", GCounter().add(1))
            standby.catch_up(postgres_url)
            standby.pause()
            before = here.token()
            here.put("n", GCounter().add(1))
            token = here.token()
            assert count(there.reading("eventual")) == count(there.reading("causal", after=before)) == 1
            with pytest.raises(Stale, match="'team'"):
                count(there.reading("causal", after=token))
            with pytest.raises(Stale, match="replica"):
                there.reading("strong").list()
            assert count(here.reading("strong")) == count(here.reading("causal", after=token)) == 2
            standby.resume()
            standby.catch_up(postgres_url)
            assert count(there.reading("causal", after=token)) == 2


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_a_replica_of_another_region_answers_by_token(memory: MemoryHarness, tmp_path: Path) -> None:
    here = memory.store.memory("team")
    with perdure.open(tmp_path / "region.db") as region:
        there = region.memory("team")
        await memory.put(here, "n", GCounter().add(1))
        first = await memory.do(here, "token")
        replicate(memory.store, region)
        await memory.put(here, "n", GCounter().add(1))
        await memory.put(memory.store.memory("other"), "x", 1)
        both = await memory.do(memory.store.memory("other"), "token", after=await memory.do(here, "token"))
        assert count(there.reading("causal", after=first)) == 1
        assert there.token() == first
        for late in (there.reading("causal", after=both), region.memory("other").reading("causal", after=both)):
            with pytest.raises(Stale):
                late.list()
        with pytest.raises(Stale, match="replica"):
            there.reading("strong").get("n")
        replicate(memory.store, region)
        assert count(there.reading("causal", after=both)) == 2
        promote(region)  # another store from now on: what of the source it lacks is not known to it
        assert count(there.reading("strong")) == 2
        with pytest.raises(Stale):
            there.reading("causal", after=first).get("n")


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_a_store_that_has_merged_holds_what_its_sources_held(memory: MemoryHarness, tmp_path: Path) -> None:
    here = memory.store.memory("team")
    with perdure.open(tmp_path / "b.db") as second, perdure.open(tmp_path / "c.db") as third:
        b, c = second.memory("team"), third.memory("team")
        await memory.put(here, "n", GCounter().add(1))
        token = await memory.do(here, "token")
        b.put("n", GCounter().add(1))
        for late in (b, c):
            with pytest.raises(Stale):
                late.reading("causal", after=token).get("n")
        b.merge(here)
        c.merge(b)  # through another store
        assert count(b.reading("causal", after=token)) == count(c.reading("causal", after=token)) == 2
        assert count(c.reading("causal", after=b.token())) == 2
        await memory.do(here, "merge", c)
        assert (await memory.value(here.reading("causal", after=c.token()), "n")).value == 2


def test_reads_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        team = store.memory("team")
        item = team.put("n", 1)
        for wrong in ("", "?", "e30", "W10=", "eyJ4IjoxfQ==", "A" * 200_000):
            with pytest.raises(UsageError, match="no token"):
                team.reading("causal", after=wrong)
        with pytest.raises(UsageError, match='"strong", "causal" or "eventual"'):
            team.reading("weak")  # type: ignore[arg-type]
        for consistency, after in (("strong", team.token()), ("causal", None)):
            with pytest.raises(UsageError, match="with it alone"):
                team.reading(consistency, after=after)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="in the past"):
            team.as_of(item.at).reading("strong")
        with pytest.raises(UsageError, match="a snapshot shows"):
            store.snapshot("s").store.memory("team").reading("strong").get("n")
        with pytest.raises(Stale):
            store.tenant("another").memory("team").reading("causal", after=team.token()).get("n")


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    yield from roles_of(postgres_url)


def test_a_role_of_one_tenant_is_the_same_writer_as_the_owner(roles: Roles) -> None:
    roles.execute("INSERT INTO perdure.meta (key, value) VALUES ('era', '7')")
    with perdure.open(roles.owner, tenant="acme") as owner, perdure.open(roles.tenant("acme"), tenant="acme") as bound:
        owner.memory("team").put("n", GCounter().add(1))
        bound.memory("team").put("n", GCounter().add(1))
        assert bound.memory("team").token() == owner.memory("team").token()
        assert len(owner.memory("team").get("n").value.version) == 1  # type: ignore[union-attr]


# --- a checker of histories


class Observed(NamedTuple):
    """A read of a session after it has heard of the write `after`: first the effect, then its cause."""

    after: int
    effect: int
    cause: int


def violations(history: list[Observed]) -> list[str]:
    """What breaks causality: a write that the session knew of is missing, an effect shows without its cause, or a
    session sees time go back."""
    broken = [f"knew of {one.after}, saw {one}" for one in history if one.effect < one.after]
    broken += [f"effect without cause: {one}" for one in history if one.cause < one.effect]
    broken += [f"back in time: {late} after {early}" for early, late in pairwise(history) if late.effect < early.effect]
    return broken


def writes(say: Any, url: str, rounds: int) -> None:
    """Write a cause, then its effect, and say with which token a reader sees both."""
    with perdure.open(url) as store:
        team = store.memory("team")
        for number in range(1, rounds + 1):
            team.put("cause", GCounter().add(1))
            team.put("effect", GCounter().add(1))
            say([number, team.token()])


def follow(url: str, places: tuple[str, str], stop: Event) -> None:
    """Bring what is written to a replica of another region, and to a store that merges."""
    with perdure.open(url) as store, perdure.open(places[0]) as region, perdure.open(places[1]) as merging:
        while not stop.is_set():
            replicate(store, region)
            merging.memory("team").merge(store.memory("team"))


def observe(team: Memory, number: int) -> Observed:
    return Observed(number, effect=count(team, "effect"), cause=count(team, "cause"))


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_session_with_its_token_sees_causes_before_effects_and_one_without_does_not(url: str, tmp_path: Path) -> None:
    places, stop = (str(tmp_path / "region.db"), str(tmp_path / "merging.db")), Event()
    with perdure.open(url) as store, perdure.open(places[0]) as region:
        replicate(store, region)
    follower = Thread(target=follow, args=(url, places, stop))
    histories: dict[str, list[Observed]] = {place: [] for place in places}
    control: list[Observed] = []
    stores = {place: perdure.open(place) for place in places}
    with ForkServer("test_consistency:writes") as server:
        try:
            for number, token in server.start(url, 8).lines():
                control.append(observe(stores[places[0]].memory("team").reading("eventual"), number))
                if number == 1:  # the first control has seen nothing
                    follower.start()
                for place, store in stores.items():
                    team = store.memory("team").reading("causal", after=token)
                    while len(histories[place]) < number:
                        with suppress(Stale):
                            histories[place].append(observe(team, number))
        finally:
            stop.set()
            follower.join()
    for store in stores.values():
        store.close()
    assert [violations(history) for history in histories.values()] == [[], []]
    assert {history[-1].after for history in histories.values()} == {8}
    assert violations(control) != []
