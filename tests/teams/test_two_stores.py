"""A team in two real stores: messages, calls, cuts, restores, moves, hostile batches, old backups."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from soak import SOAK

import perdure
from perdure.errors import BatchRefused, Busy, NotFound, UsageError
from perdure.storage.program import drive
from perdure.teams.linked import LinkedSnapshot, LinkedTeam, alink, link
from perdure.teams.parcels import BATCH_BYTES_MAX, PARCEL_BYTES_MAX, Letter, encode_batch, encode_parcel
from perdure.teams.post import Post
from perdure.teams.protocol import CutHere, PeerBatch, PeerFrame
from perdure.values.compress import zstd

BOMB = zstd.compress(bytes(PARCEL_BYTES_MAX + 1))  # a few bytes that claim to be many


class Pair(NamedTuple):
    east: perdure.Store
    west: perdure.Store
    urls: tuple[str, str]

    def state(self, name: str) -> Any:
        is_here = any(member.name == name for member in self.east.team("team").members())
        store = self.east if is_here else self.west
        return store.thread(f"run:team/{name}").load().state


# What is the same on both databases: the other tests run on both.
ABOVE_SQL = pytest.mark.parametrize("pair", ["sqlite", "postgres"] if SOAK else ["sqlite"], indirect=True)


@pytest.fixture(params=["sqlite", "postgres"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two stores: two files, or a file and PostgreSQL."""
    east = str(tmp_path / "east.db")
    west = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "west.db")
    with perdure.open(east) as one, perdure.open(west, keys=None) as other:
        yield Pair(one, other, (east, west))


def two_agents(pair: Pair) -> LinkedTeam:
    """A researcher in the east who sends to a writer in the west, and asks it."""
    east, west = pair.east.team("team"), pair.west.team("team")

    @east.agent(state={"answers": []})
    def researcher(state: dict[str, Any], message: Any) -> None:
        perdure.send("writer", message)
        if message == "ask":
            state["answers"].append(perdure.call("writer", "question", timeout_s=60))

    @west.agent(state={"seen": []})
    def writer(state: dict[str, Any], message: Any) -> int:
        state["seen"].append(message)
        return len(state["seen"])

    return link({"east": east, "west": west})


def settle(pair: Pair, linked: LinkedTeam, rounds: int = 4) -> None:
    for _ in range(rounds):
        for store in (pair.east, pair.west):
            store.team("team").work(until_idle=True)
        linked.run(until_idle=True)


def test_a_call_of_a_member_that_left_in_the_other_store_gets_an_error(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.west.team("team").leave("writer")
    pair.east.team("team").send("researcher", "ask")
    settle(pair, linked, 2)
    assert "its receiver left the team" in str(pair.east.get_run("team/researcher").refresh().waiting_for)


def test_messages_and_calls_reach_members_in_the_other_store_once_and_in_order(pair: Pair) -> None:
    linked = two_agents(pair)
    for message in [1, 2, "ask", 3]:
        pair.east.team("team").send("researcher", message)
    pair.west.team("team").send("researcher", 4)  # from outside, in the store where it does not live
    settle(pair, linked)
    assert pair.state("writer")["seen"] == [1, 2, "question", "ask", 3, 4]
    assert pair.state("researcher")["answers"] == [3]
    assert linked.carry() == 0
    assert pair.east.ops.verify().ok
    assert pair.west.ops.verify().ok


def test_an_encrypted_store_has_neither_messages_nor_secrets_in_the_clear(tmp_path: Path) -> None:
    urls = str(tmp_path / "east.db"), str(tmp_path / "west.db")
    with perdure.open(urls[0], keys=bytes(32)) as east, perdure.open(urls[1]) as west:
        pair = Pair(east, west, urls)
        linked = two_agents(pair)
        east.team("team").send("researcher", "a-plain-word")
        east.team("team").work(until_idle=True)
        secret = drive(east._context.driver, Post(east.team("team")).secret_with("west"))
        Post(east.team("team")).outgoing("west")  # packed: it is in the outbox
        stored = b"".join(file.read_bytes() for file in tmp_path.glob("east.db*"))
        assert b"a-plain-word" not in stored
        assert secret not in stored
        linked.snapshot("cut")
        settle(pair, linked)
        linked.move("writer", "east")
        assert east.thread("run:team/writer").load().state == {"seen": ["a-plain-word"]}
        linked.restore("cut")
        settle(pair, linked)
        assert pair.state("writer") == {"seen": ["a-plain-word"]}


def test_a_cut_has_what_is_in_flight_and_a_restore_goes_back_to_it_in_both_stores(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", "early")
    settle(pair, linked)
    for message in ("boxed", "packed"):
        pair.east.team("team").send("researcher", message)
    pair.east.team("team").work(until_idle=True)
    drive(pair.east._context.driver, Post.outgoing.__wrapped__(Post(pair.east.team("team")), "west"))  # type: ignore[attr-defined]
    cut = linked.snapshot("before")
    assert [flying.message for flying in cut.in_flight()] == ["boxed", "packed"]
    assert cut.state("writer") == {"seen": ["early"]}
    pair.east.team("team").send("researcher", "late")
    settle(pair, linked)
    assert pair.state("writer")["seen"] == ["early", "boxed", "packed", "late"]
    manifests = [dict(store.get_snapshot("before").manifest) for store in (pair.east, pair.west)]
    assert manifests[0]["stores"] == manifests[1]["stores"]
    assert len(manifests[0]["stores"]) == 2
    assert all(store.get_snapshot("before").keep_until is None for store in (pair.east, pair.west))
    assert set(linked.restore("before")) == {"east", "west"}
    settle(pair, linked)
    assert pair.state("writer")["seen"] == ["early", "boxed", "packed"], "once, and nothing of the other time"
    linked.snapshot("after")


@ABOVE_SQL
def test_a_restore_that_was_interrupted_stops_the_channels_until_the_same_call_ends_it(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", "kept")
    settle(pair, linked)
    linked.snapshot("start")
    pair.east.team("team").send("researcher", "undone")
    settle(pair, linked)
    drive(pair.east._context.driver, _begun(linked, linked.get_snapshot("start")))
    with pytest.raises(UsageError, match="`restore` of the same cut ends it"):
        linked.carry()
    with pytest.raises(Busy, match="in the middle of a restore"):
        Post(pair.east.team("team")).outgoing("west")
    assert set(linked.restore("start")) == {"east", "west"}
    settle(pair, linked)
    assert pair.state("writer")["seen"] == ["kept"]
    assert drive(pair.east._context.driver, linked._register.read()).era == 1


def _begun(linked: LinkedTeam, cut: LinkedSnapshot) -> Any:
    """What a process has done that dies after it has stopped the channels of the first store."""
    view = yield from linked._begin_restore(cut)
    yield from linked._on("east", linked._posts["east"].begin_restore(view))


@ABOVE_SQL
def test_a_batch_of_the_time_before_a_restore_is_not_taken(pair: Pair) -> None:
    linked = two_agents(pair)
    linked.snapshot("start")
    pair.east.team("team").send("researcher", "undone")
    pair.east.team("team").work(until_idle=True)
    old = Post(pair.east.team("team")).outgoing("west")
    linked.restore("start")
    Post(pair.west.team("team")).accept(old)
    settle(pair, linked)
    assert pair.state("writer") == {"seen": []}


def test_a_member_moves_while_it_gets_mail_and_goes_on_in_the_other_store(pair: Pair) -> None:
    linked = two_agents(pair)
    for message in range(3):
        pair.east.team("team").send("researcher", message)
    settle(pair, linked)
    pair.east.team("team").send("researcher", 3)
    pair.east.team("team").work(until_idle=True)
    pair.west.team("team").send("writer", "waits in the old place")
    linked.move("writer", "east")
    pair.west.team("team").send("writer", "sent to the old place")

    @pair.east.team("team").agent
    def writer(state: dict[str, Any], message: Any) -> None:
        state["seen"].append(message)

    settle(pair, linked)
    seen = pair.east.thread("run:team/writer").load().state["seen"]
    assert sorted(map(str, seen)) == sorted(["0", "1", "2", "3", "waits in the old place", "sent to the old place"])
    assert [member.name for member in pair.west.team("team").members()] == []
    linked.move("writer", "west")
    assert [member.name for member in pair.west.team("team").members()] == ["writer"]
    assert pair.west.thread("run:team/writer").load().state["seen"] == seen


@ABOVE_SQL
def test_what_cannot_be_moved_or_linked_is_refused(pair: Pair) -> None:
    linked = two_agents(pair)
    with pytest.raises(UsageError, match="there is no store 'north'"):
        linked.move("writer", "north")
    with pytest.raises(UsageError, match="lives in store 'west' already"):
        linked.move("writer", "west")
    with pytest.raises(NotFound, match="no member 'nobody'"):
        linked.move("nobody", "west")
    with pytest.raises(UsageError, match="two or more stores"):
        link({"east": pair.east.team("team")})
    with pytest.raises(UsageError, match="this store is 'east'"):
        link({"north": pair.east.team("team"), "west": pair.west.team("team")})


@ABOVE_SQL
def test_one_store_alone_does_not_go_back_over_what_it_has_sent_away(pair: Pair) -> None:
    linked = two_agents(pair)
    linked.snapshot("start")
    pair.east.team("team").send("researcher", "away")
    pair.east.team("team").work(until_idle=True)
    assert pair.east.team("team").rewind("researcher", turn=0, dry_run=True).withdrawn == 1, "it waits here"
    settle(pair, linked)
    with pytest.raises(UsageError, match="a message that has left cannot be withdrawn"):
        pair.east.team("team").rewind("researcher", turn=0)
    with pytest.raises(UsageError, match="take all of them back together"):
        pair.east.team("team").restore("start")
    name = pair.east.snapshots()[0].name
    with pytest.raises(UsageError, match="take all of its stores back together"):
        pair.east.restore(name, runs="rewind")
    assert pair.state("writer")["seen"] == ["away"]


@ABOVE_SQL
def test_pausing_all_members_leaves_nothing_between_the_stores_and_lets_them_go_on(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", 1)
    pair.east.team("team").work(until_idle=True)
    cut = linked.snapshot("paused", mode="pause")
    assert [(flying.receiver, flying.message) for flying in cut.in_flight()] == [("writer", 1)], "in its box"
    settle(pair, linked)
    assert pair.state("writer")["seen"] == [1]


def signed(pair: Pair, frames: list[PeerFrame], secret: bytes | None = None, **changed: Any) -> bytes:
    """A batch as the east would send it, with changes, signed with its secret or another one."""
    secrets = drive(pair.east._context.driver, Post(pair.east.team("team")).secret_with("west"))
    batch = PeerBatch("team", "east", "west", 0, 0, 0, tuple(frames), 0, b"")._replace(**changed)
    return encode_batch(batch, secret or secrets)


def frame(parcel: Any, seq: int = 1) -> PeerFrame:
    body = encode_parcel(parcel)
    return PeerFrame(seq, body, PeerFrame.link_of(b"", seq, body))


@ABOVE_SQL
def test_hostile_batches_are_refused_and_nothing_of_others_is_lost(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", "honest")
    pair.east.team("team").work(until_idle=True)
    west = Post(pair.west.team("team"))
    letter = Letter("team/writer", "k", "team/researcher", 1, "", None, b"")
    for data, why in (
        (signed(pair, [frame(letter)], secret=bytes(32)), "not signed by store 'east'"),
        (signed(pair, [frame(letter)], source="north"), "'north' is not linked"),
        (signed(pair, [frame(letter)], team="other"), "of team 'other'"),
        (signed(pair, [frame(letter)], target="south"), "for store 'south'"),
        (bytes(BATCH_BYTES_MAX + 1), "at most"),
        (b"\x00" * 40, "no batch"),
        (b"", "no batch"),
        (signed(pair, [frame(Letter("team/writer", "k", "team/writer", 1, "", None, b""))]), "in the name of"),
        (signed(pair, [frame(letter)._replace(body=b"\xc1")]), "do not continue|cannot be read"),
        (signed(pair, [], ack=7), "old backup"),
        (signed(pair, [frame(Letter("team/writer", "k", None, None, "", None, BOMB))]), "are allowed"),
    ):
        with pytest.raises(BatchRefused, match=why):
            west.accept(data)
    settle(pair, linked)
    assert pair.state("writer")["seen"] == ["honest"]


def test_a_cut_spreads_with_a_batch_and_a_part_that_nobody_completes_is_released_in_time(pair: Pair) -> None:
    two_agents(pair)
    east, west = Post(pair.east.team("team")), Post(pair.west.team("team"))
    drive(pair.east._context.driver, east.cut(CutHere(0, 1, 1)))
    west.accept(east.outgoing("west"))
    for store in (pair.east, pair.west):
        [part] = store.snapshots()
        assert part.manifest["team"]["cut"] == 1
        assert part.keep_until is not None


@ABOVE_SQL
def test_a_batch_that_is_sent_again_is_taken_once(pair: Pair) -> None:
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", "once")
    pair.east.team("team").work(until_idle=True)
    data = Post(pair.east.team("team")).outgoing("west")
    for _ in range(3):
        Post(pair.west.team("team")).accept(data)
    settle(pair, linked)
    Post(pair.west.team("team")).accept(data)
    settle(pair, linked)
    assert pair.state("writer")["seen"] == ["once"]


@ABOVE_SQL
def test_a_message_to_a_member_that_nobody_has_becomes_a_dead_letter(pair: Pair) -> None:
    two_agents(pair)
    letter = Letter("team/nobody", "k", None, None, "", None, b"")
    Post(pair.west.team("team")).accept(signed(pair, [frame(letter)]))
    rows = drive(pair.west._context.driver, _dead(pair.west))
    assert rows == [(2,)]


def _dead(store: perdure.Store) -> Any:
    from perdure.storage.program import Sql, fetch

    return fetch(Sql("SELECT state FROM mail WHERE key = 'east>k'"))


def test_a_store_from_an_old_backup_is_noticed_and_a_cut_of_both_brings_it_back(tmp_path: Path) -> None:
    paths = [str(tmp_path / "east.db"), str(tmp_path / "west.db")]

    def opened() -> Pair:
        return Pair(perdure.open(paths[0]), perdure.open(paths[1]), (paths[0], paths[1]))

    pair = opened()
    linked = two_agents(pair)
    linked.snapshot("both")
    pair.east.ops.backup(str(tmp_path / "old.db"))
    for message in ("one", "two"):
        pair.east.team("team").send("researcher", message)
    settle(pair, linked)
    pair.east.close()
    for file in tmp_path.glob("east.db*"):
        file.unlink()
    shutil.copy(tmp_path / "old.db", paths[0])
    pair = Pair(perdure.open(paths[0]), pair.west, pair.urls)
    linked = two_agents(pair)
    pair.east.team("team").send("researcher", "three")
    pair.east.team("team").work(until_idle=True)
    with pytest.raises(BatchRefused, match="old backup"):
        linked.run(until_idle=True)
    assert pair.state("writer")["seen"] == ["one", "two"], "nothing was taken for what it is not"
    linked.restore("both")
    settle(pair, linked)
    assert pair.state("writer")["seen"] == []
    for store in (pair.east, pair.west):
        store.close()


async def test_all_of_it_works_on_an_event_loop(pair: Pair) -> None:
    east, west = pair.east.team("team"), pair.west.team("team")

    @east.agent
    async def first(state: dict[str, Any], message: Any) -> None:
        perdure.send("second", message)

    @west.agent(state={"seen": []})
    async def second(state: dict[str, Any], message: Any) -> None:
        state["seen"].append(message)

    linked = await alink({"east": east, "west": west})
    await east.asend("first", "hello")
    await east.awork(until_idle=True)
    cut = await linked.asnapshot("cut")
    assert [flying.message for flying in await cut.ain_flight()] == ["hello"]
    await linked.arun(until_idle=True)
    await west.awork(until_idle=True)
    await linked.amove("second", "east")
    assert (await pair.east.thread("run:team/second").aload()).state == {"seen": ["hello"]}
    assert set(await linked.arestore(await linked.aget_snapshot("cut"))) == {"east", "west"}
