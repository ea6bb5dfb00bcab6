"""Large values in runs: arguments, results, states and messages refer to objects. None is missing while a row of a run
refers to it, or a snapshot sees that row, and none stays for ever."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_kit import Interfering, files, swept, uses
from lab import Lab

import perdure
from perdure.errors import NotFound, Unavailable, Unstorable, UsageError
from perdure.storage.program import Sql, change

CHILD = Path(__file__).parent / "killed_values.py"


@pytest.fixture
def options(url: str, tmp_path: Path) -> dict[str, Any]:
    """The arguments of `perdure.open`: an encrypted file, or PostgreSQL."""
    (tmp_path / "objects").mkdir()
    keys = None if url.startswith("postgres") else bytes(32)
    return {"url": url, "objects": tmp_path / "objects", "keys": keys}


@pytest.fixture
def lab(options: dict[str, Any]) -> Iterator[Lab]:
    """Where a test runs its agents: as sync functions on SQLite, async ones on PostgreSQL."""
    with perdure.open(**options) as store:
        yield Lab(store, "async" if options["keys"] is None else "sync")


class Film:
    """An agent whose every value is large: argument, result of a step, argument and result of an effect, states."""

    def __init__(self, lab: Lab) -> None:
        @lab.step(name="film.cut")
        def cut(film: perdure.External[bytes]) -> perdure.External[bytes]:
            lab.ran.append("cut")
            return perdure.External(film.get()[:1000])

        @lab.effect(name="film.publish", undo=lambda film: lab.ran.append(film.get()[:1]))
        def publish(film: perdure.External[bytes]) -> dict[str, Any]:
            lab.ran.append("publish")
            return {"poster": perdure.External(["poster"] * 300), "size": len(film.get())}

        @lab.durable(name=f"film-{id(self)}")
        async def film(source: perdure.External[bytes], wait: bool = False) -> Any:
            state = perdure.state({"title": perdure.External(b"title" * 100)})
            short = await lab(cut(source))
            state["short"], state["seen"] = short, state["title"].get()[:5]
            published = await lab(publish(perdure.External(b"copy" * 300)))
            if wait:
                state["said"] = await lab(perdure.receive("more"))
            return {"short": short, "poster": published["poster"], "was": state["short"] == short}

        self.film = film


def test_every_value_of_a_run_may_be_large_and_is_read_when_it_is_asked_for(lab: Lab, options: dict[str, Any]) -> None:
    agent = Film(lab)
    run = lab.run(agent.film, perdure.External(b"s" * 5000), id="one")
    assert swept(lab.store) == 0
    assert run.result()["short"].get() == b"s" * 1000
    assert run.result()["was"] is True
    with perdure.open(**options) as again:
        store = again.tenant(lab.store._context.tenant_name)
        same = store.get_run("one")
        assert same.result() == run.result()
        assert same.result()["poster"].get() == ["poster"] * 300
        assert same.state_at(same.steps()[-1])["title"].get() == b"title" * 100
        steps = {step.name: step for step in same.steps()}
        assert steps["film.cut"].result["<type>"] == "perdure.External"
        assert store.replay("one").status == "complete"
        assert swept(store) == 0
        assert store.ops.verify().problems == ()
    assert not any(b"sssss" in path.read_bytes() for path in files(options["objects"])) or options["keys"] is None


def test_a_run_resumes_without_the_bytes_and_with_equal_values(lab: Lab, options: dict[str, Any]) -> None:
    agent = Film(lab)
    run = lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    kept = {path: path.read_bytes() for path in files(options["objects"])}
    for path in kept:
        path.unlink()
    lab.store.send(run, {"end": perdure.External(b"end" * 99)}, topic="more")
    lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    assert run.refresh().status == "done", "a recorded result is not read"
    assert lab.ran == ["cut", "publish"]
    with pytest.raises(NotFound, match="there is no file"):
        run.result()["short"].get()
    for path, data in kept.items():
        path.write_bytes(data)
    assert run.result()["short"].get() == b"s" * 1000
    assert run.state_at(run.steps()[-1])["said"]["end"].get() == b"end" * 99
    assert lab.store.ops.verify().problems == ()


def test_a_run_whose_value_is_missing_is_stuck_and_goes_on_when_it_is_back(lab: Lab, options: dict[str, Any]) -> None:
    @lab.durable(name="missing")
    async def missing(source: perdure.External[bytes]) -> int:
        await lab(perdure.receive())
        return len(source.get())

    run = lab.run(missing, perdure.External(b"s" * 5000), id="one")
    lab.store.send("one", "go on")
    [path] = files(options["objects"])
    data = path.read_bytes()
    path.unlink()
    lab.run(missing, perdure.External(b"s" * 5000), id="one")
    assert run.refresh().status == "stuck"
    path.write_bytes(data)
    run.resume()
    assert lab.run(missing, perdure.External(b"s" * 5000), id="one").result() == 5000


def test_an_undo_reads_the_arguments_of_its_effect(lab: Lab) -> None:
    agent = Film(lab)
    run = lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    run.undo()
    lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    assert run.refresh().status == "undone"
    assert lab.ran == ["cut", "publish", b"c"]


def test_collection_sees_each_kind_of_use_and_its_end(lab: Lab) -> None:
    agent, store = Film(lab), lab.store
    run = lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    store.send(run, perdure.External(b"mail" * 99), topic="more")
    assert swept(store) == 0
    fork = store.fork(run, id="two")
    lab.run(agent.film, perdure.External(b"s" * 5000), True, id="one")
    before = store.snapshot("before")
    store.ops.retention(runs="0s")
    store.ops.compact()
    assert swept(store) == 0, "the fork shares the history"
    fork.cancel()
    lab.run(agent.film, perdure.External(b"s" * 5000), True, id="two")
    store.ops.compact()
    assert swept(store) == 0, "the snapshot sees the journals"
    assert before.get_run("one").state_at()["short"].get() == b"s" * 1000
    before.release()
    gone = swept(store)
    assert gone >= 3, "title, effect's argument and the message had the journals and states alone"
    assert run.result()["short"].get() == b"s" * 1000
    store.delete_run(fork)
    store.delete_run(run)
    swept(store)
    assert uses(store) == (0, 0)


def test_a_run_that_begins_anew_keeps_its_new_arguments_alone(lab: Lab, options: dict[str, Any]) -> None:
    @lab.step(name="rounds.make")
    def make(number: int) -> perdure.External[bytes]:
        return perdure.External(f"{number}".encode() * 500)

    @lab.durable(name="rounds")
    async def rounds(number: int, last: Any = None) -> Any:
        made = await lab(make(number))
        if number < 4:
            perdure.continue_as_new(number + 1, made)
        await lab(perdure.receive())
        return last

    lab.run(rounds, 0, id="rounds")
    assert swept(lab.store) == 3, "those of the rounds before the last"
    assert len(files(options["objects"])) == 2
    lab.store.send("rounds", 1)
    assert lab.run(rounds, 0, id="rounds").result().get() == b"3" * 500


def test_a_child_and_its_parent_each_refer_to_what_they_pass(lab: Lab) -> None:
    @lab.durable(name="passing.child")
    async def child(value: perdure.External[bytes]) -> perdure.External[bytes]:
        return perdure.External(value.get() + b"!")

    @lab.durable(name="passing.parent")
    async def parent() -> Any:
        started = await lab(perdure.spawn(child, perdure.External(b"given" * 99), id="child"))
        return await lab(started.result())

    assert lab.run(parent, id="parent").result().get().endswith(b"!")
    assert swept(lab.store) == 0
    lab.store.delete_run("child")
    assert swept(lab.store) == 0, "the parent's intent to pass it is in its journal"
    assert lab.store.get_run("parent").result().get().endswith(b"!")


def test_a_state_with_stored_values_costs_a_step_no_more_commits(tmp_path: Path) -> None:
    heard: list[str] = []

    @perdure.step(name="counted.look")
    def look(number: int) -> int:
        return number

    @perdure.durable(name="counted")
    def counted() -> list[int]:
        state, commits = perdure.state({"values": [perdure.External(bytes([n]) * 999) for n in range(5)]}), []
        for number in range(4):
            state["number"] = number
            before = heard.count("commit")
            look(number)
            commits.append(heard.count("commit") - before)
        return commits

    with perdure.open(tmp_path / "s.db", objects=tmp_path, hook=heard.append, durability="normal") as store:
        first, *others = store.run(counted).result()
        assert first > 1
        assert others == [1, 1, 1]


def test_data_that_looks_like_a_reference_is_data(lab: Lab) -> None:
    forged = ["perdure.External", 1, ["ab" * 32, 5]]

    @lab.durable(name="forging.child")
    async def child() -> Any:
        return {"^obj": forged, "list": forged}

    @lab.durable(name="forging.parent")
    async def parent() -> Any:
        state = perdure.state({"only": {"^obj": forged}})
        state["child"] = await lab((await lab(perdure.spawn(child, id="child"))).result())
        return dict(state)

    child_result = {"^obj": forged, "list": forged}
    assert lab.run(parent, id="parent").result() == {"only": {"^obj": forged}, "child": child_result}
    assert uses(lab.store) == (0, 0)


def test_messages_between_runs_refer_to_their_values(lab: Lab) -> None:
    @lab.durable(name="mail.receiver")
    async def receiver() -> Any:
        return len((await lab(perdure.receive())).get())

    @lab.durable(name="mail.sender")
    async def sender() -> None:
        await lab(perdure.send("receiver", perdure.External(b"m" * 700)))

    lab.run(receiver, id="receiver")
    lab.run(sender, id="sender")
    lab.store.delete_run("sender")
    assert swept(lab.store) == 0
    assert lab.run(receiver, id="receiver").result() == 700


def test_a_value_that_is_removed_before_it_is_referred_to_is_stored_again(lab: Lab) -> None:
    removed: list[int] = []
    context = lab.store._context

    def remove() -> None:
        if not removed:
            removed.append(-1)
            removed.append(swept(lab.store))

    context.objects = Interfering(context.objects, after=remove)

    @lab.step(name="raced.make")
    def make() -> perdure.External[bytes]:
        return perdure.External(b"raced" * 99)

    @lab.durable(name="raced")
    async def raced() -> Any:
        return await lab(make())

    assert lab.run(raced, id="raced").result().get() == b"raced" * 99
    assert removed == [-1, 1]
    assert swept(lab.store) == 0
    assert lab.store.ops.verify().problems == ()
    removed.clear()
    run = lab.run(raced, id="again")
    assert run.result().get() == b"raced" * 99, "stored before: nothing is written"


def test_an_owner_that_lost_its_run_refers_to_nothing(lab: Lab) -> None:
    store, context = lab.store, lab.store._context

    def lose() -> None:
        store._run(change(Sql("UPDATE run SET fence = fence + 1, status = 'done', owner = NULL")()))
        store.delete_run("lost")

    context.objects = Interfering(context.objects, before=lose)

    @lab.step(name="lost.make")
    def make() -> perdure.External[bytes]:
        return perdure.External(b"lost" * 99)

    @lab.durable(name="lost")
    async def lost() -> Any:
        return await lab(make())

    with pytest.raises(NotFound, match="there is no run 'lost'"):
        lab.run(lost, id="lost")
    assert uses(store) == (0, 0)
    assert swept(store) == 1


@pytest.mark.parametrize("point", ["before", "after"])
def test_a_kill_between_object_and_entry_loses_nothing(point: str, options: dict[str, Any]) -> None:
    ran = subprocess.run([sys.executable, CHILD, options["url"], options["objects"], point], capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    ran = subprocess.run([sys.executable, CHILD, options["url"], options["objects"], ""], capture_output=True)
    assert ran.stdout.decode().split() == ["settled", "1500"], ran.stderr.decode()
    with perdure.open(options["url"], objects=options["objects"]) as store:
        assert store.ops.verify().problems == ()
        swept(store)
        assert len(files(options["objects"])) == 2
        store.delete_run("killed")
        assert swept(store) == 2
        assert uses(store) == (0, 0)


def test_an_object_that_cannot_be_written_stops_the_run_and_not_its_function(lab: Lab) -> None:
    context, tries = lab.store._context, list[int]()

    def fail() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Unavailable("the bucket is away")

    context.objects = Interfering(context.objects, before=fail)

    @lab.step(name="away.make")
    def make() -> perdure.External[bytes]:
        return perdure.External(b"away" * 99)

    @lab.durable(name="away")
    async def away() -> Any:
        try:
            return await lab(make())
        except Exception:
            return "caught"

    run = lab.run(away, id="away")
    assert run.refresh().status == "queued", "as if the entry could not be written"
    run.resume()
    assert lab.run(away, id="away").result().get() == b"away" * 99


def test_a_result_whose_value_was_removed_stops_the_run_and_not_its_function(lab: Lab) -> None:
    lab.store.thread("t").save({"film": perdure.External(b"gone" * 99)})
    film: perdure.External[bytes] = lab.store.thread("t").load().state["film"]
    lab.store.delete_thread("t")
    assert swept(lab.store) == 1

    @lab.step(name="removed.take")
    def take() -> perdure.External[bytes]:
        return film

    @lab.durable(name="removed")
    async def removed() -> Any:
        try:
            return await lab(take())
        except Exception:
            return "caught"

    assert lab.run(removed, id="removed").refresh().status == "stuck"


def test_a_cancelled_task_records_an_effect_whose_result_is_being_stored(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    done: list[str] = []
    tasks: list[asyncio.Task[Any]] = []

    @perdure.effect(name="cancelled.pay")
    async def pay() -> perdure.External[bytes]:
        done.append("paid")
        return perdure.External(b"receipt" * 99)

    @perdure.durable(name="cancelled")
    async def flow() -> Any:
        tasks.append(asyncio.create_task(pay()))
        try:
            async with asyncio.timeout(60):
                await tasks[-1]
        except asyncio.CancelledError:
            done.append("cancelled")
        return (await pay()).get()

    with perdure.open(tmp_path / "s.db", objects=tmp_path / "objects") as store:
        loops: list[Any] = []

        def cancel() -> None:
            if done == ["paid"]:
                done.append("stored")
                loops[0].call_soon_threadsafe(tasks[0].cancel)
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result()

        store._context.objects = Interfering(store._context.objects, after=cancel)

        async def main() -> Any:
            loops.append(asyncio.get_running_loop())
            return await store.arun(flow, id="one")

        run = asyncio.run(main())
        assert done == ["paid", "stored", "cancelled", "paid"]
        assert [step.status for step in run.steps()] == ["done", "done"]
        assert run.result() == b"receipt" * 99


def test_erasing_a_run_deletes_its_objects_at_once_and_snapshots_lose_them(lab: Lab, options: dict[str, Any]) -> None:
    agent = Film(lab)
    lab.run(agent.film, perdure.External(b"s" * 5000), id="one")
    snapshot = lab.store.snapshot()
    lab.store.ops.erase_run("one")
    assert files(options["objects"]) == []
    assert uses(lab.store) == (0, 0)
    snapshot.release()


def test_a_deleted_run_comes_back_with_its_values(lab: Lab) -> None:
    agent = Film(lab)
    run = lab.run(agent.film, perdure.External(b"s" * 5000), id="one")
    lab.store.snapshot("before")
    lab.store.delete_run(run)
    assert swept(lab.store) == 0
    lab.store.restore("before", runs="rewind", keys="same")
    lab.store.get_snapshot("before").release()
    for snapshot in lab.store.snapshots():
        snapshot.release()
    assert swept(lab.store) == 0
    assert lab.store.get_run("one").result()["short"].get() == b"s" * 1000


def test_copies_of_runs_have_the_values_or_are_refused(lab: Lab, tmp_path: Path) -> None:
    agent, store = Film(lab), lab.store
    lab.run(agent.film, perdure.External(b"s" * 5000), id="whole")
    parked = lab.run(agent.film, perdure.External(b"p" * 5000), True, id="parked")
    fork = store.fork("whole", id="fork")
    lab.run(agent.film, perdure.External(b"s" * 5000), id="fork")
    refused = "the store was opened without a place for such values: perdure.open\\(…, objects="
    with pytest.raises(UsageError, match=refused):
        store.ops.transfer(tmp_path / "without.db", runs=["whole"])
    with pytest.raises(UsageError, match=refused):
        store.snapshot("s").export(tmp_path / "bundle.db", runs=["whole"])
    store.get_snapshot("s").release()
    (tmp_path / "elsewhere").mkdir()
    there: dict[str, Any] = {"objects": tmp_path / "elsewhere", "keys": bytes([1] * 32)}
    store.ops.transfer(tmp_path / "there.db", runs=["whole", "fork"], **there)
    store.ops.transfer(tmp_path / "there.db", runs=["parked"], move=True, **there)
    store.delete_run(fork)
    store.delete_run("whole")
    swept(store)
    with perdure.open(tmp_path / "there.db", tenant=store._context.tenant_name, **there) as target:
        for name in ("whole", "fork"):
            assert target.get_run(name).result()["poster"].get() == ["poster"] * 300
            assert target.replay(name).status == "complete"
            assert target.get_run(name).state_at()["title"].get() == b"title" * 100
        target.send("parked", perdure.External(b"end"), topic="more")
        moved = Lab.__new__(Lab)
        moved.__dict__ |= lab.__dict__ | {"store": target}
        assert moved.run(agent.film, perdure.External(b"p" * 5000), True, id="parked").result()["was"] is True
        assert swept(target) == 0
        assert target.ops.verify().problems == ()
    assert parked.refresh().status == "exported"


def test_what_is_damaged_missing_or_lost_is_named(lab: Lab, options: dict[str, Any]) -> None:
    @lab.durable(name="three")
    async def three() -> Any:
        return [perdure.External(bytes([number]) * 99) for number in range(3)]

    run = lab.run(three, id="three")
    one, two, _ = files(options["objects"])
    one.write_bytes(b"bx" * 60)
    two.unlink()
    problems = [problem.what for problem in lab.store.ops.verify().problems]
    assert len(problems) == 2
    assert any("was changed in" in text or "is not encrypted" in text for text in problems)
    assert any("there is no file" in text for text in problems)
    lab.store._run(change(Sql("DELETE FROM external")()))
    problems = [problem.what for problem in lab.store.ops.verify().problems]
    assert len(problems) == 3
    assert all("something refers to it" in text for text in problems)
    with pytest.raises(NotFound, match="is not in this store"):
        run.result()[0].get()


def test_where_no_use_is_kept_it_is_refused(lab: Lab) -> None:
    value, kept = perdure.External(b"v"), "kept in states of threads and graphs, in runs and messages to them"

    @lab.durable(name="refusing")
    async def refusing(number: int = 0) -> Any:
        with pytest.raises(Unstorable, match=kept):
            perdure.emit(value)
        return number

    assert lab.run(refusing, id="one").result() == 0
    with pytest.raises(UsageError, match=kept):
        lab.store.schedule("nightly", refusing, every="1h", args=[value])
    with pytest.raises(Unstorable, match=kept):
        lab.store.fork("one", changes={1: value})
