"""`thread.autosave`: what counts as a change, when it is saved, what happens at the end; blocking and async alike."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import perdure
from perdure.threads.autosave import AutoState


class Broken(Exception):
    """What a body raises."""


def break_off(state: AutoState, key: str, value: Any) -> None:
    state[key] = value
    raise Broken


def spoil(state: AutoState) -> None:
    """Two changes that are due, and then one that cannot be stored."""
    state["n"] = 1
    state["n"] = 2
    state["f"] = print


class Ticks:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticks(store: perdure.Store) -> Ticks:
    store._context.ticks = ticks = Ticks()
    return ticks


def saved(store: perdure.Store, name: str = "a") -> list[Any]:
    """The states of a thread, oldest first, as another handle sees them."""
    thread = store.thread(name)
    return [] if thread.get_head() is None else [checkpoint.state for checkpoint in thread.history()][::-1]


# --- changes


def test_iterating_gives_the_keys_of_one_moment_though_another_thread_adds_some(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(100), initial={"a": 1, "b": 2}) as state:
        keys = iter(state)
        other = threading.Thread(target=state.update, args=({"c": 3},))
        other.start()
        other.join()
        assert [*keys] == ["a", "b"]
        assert [*state] == ["a", "b", "c"]


def test_every_n_saves_at_the_nth_change_and_at_the_end(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(3)) as state:
        for number in range(7):
            state["n"] = number
            assert [each["n"] for each in saved(store)] == [n for n in (2, 5) if n <= number]
    assert [each["n"] for each in saved(store)] == [2, 5, 6]


def test_changes_inside_of_values_are_noticed_and_are_in_the_save(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(2), initial={"log": [], "plan": {"steps": [1]}}) as state:
        state["log"].append("a")
        state["log"].append("b")
        assert saved(store) == []  # the second change is made after the list was handed out …
        state["plan"]["steps"].append(2)  # … and so counts from the next use on
        assert saved(store) == [{"log": ["a", "b"], "plan": {"steps": [1]}}]
    assert saved(store)[-1] == {"log": ["a", "b"], "plan": {"steps": [1, 2]}}


def test_a_change_through_a_name_of_ones_own_is_never_lost_and_can_be_announced(store: perdure.Store) -> None:
    log: list[str] = []
    with store.thread("a").autosave(perdure.autosave.every(2)) as state:
        state["log"] = log
        log.append("a")
        state.changed()
        assert saved(store) == [{"log": ["a"]}]
        log.append("b")
    assert saved(store)[-1] == {"log": ["a", "b"]}
    assert state["log"] is log


def test_reading_alone_writes_nothing(store: perdure.Store) -> None:
    thread = store.thread("a")
    thread.save({"log": [1, 2], "n": 1})
    with store.thread("a").autosave(perdure.autosave.every(1)) as state:
        assert [sum(state["log"]) for _ in range(5)] == [3] * 5
        assert dict(state) == {"log": [1, 2], "n": 1}
        assert (len(state), "n" in state, [*state]) == (2, True, ["log", "n"])
    assert len(saved(store)) == 1


def test_all_that_a_mapping_can_do_counts(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(100), initial={"a": 1, "b": 2, "c": 3}) as state:
        del state["a"]
        assert (state.pop("b"), state.pop("b", "none")) == (2, "none")
        state.update(x=1, y=2)
        state |= {"z": 3}
        assert state.setdefault("new", []) == []
        state["new"].append(1)
        # Two deletions, two updates, what setdefault put in, and the list, which was handed out twice.
        assert state.unsaved.changes == 7
        assert [*state.values()] == [3, 1, 2, 3, [1]]
        assert [*state.items()][-1] == ("new", [1])
        with pytest.raises(KeyError):
            state.pop("b")
        with pytest.raises(KeyError):
            del state["b"]
    assert saved(store) == [{"c": 3, "x": 1, "y": 2, "z": 3, "new": [1]}]
    with store.thread("a").autosave(perdure.autosave.every(100)) as state:
        state.clear()
    assert saved(store)[-1] == {}


def test_update_is_one_change_that_no_save_tears(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(1)) as state:
        for number in range(3):
            state.update(left=number, right=number)
    assert saved(store) == [{"left": number, "right": number} for number in range(3)]


def test_periodic_saves_at_the_first_change_after_its_time(store: perdure.Store, ticks: Ticks) -> None:
    with store.thread("a").autosave(perdure.autosave.periodic(10)) as state:
        state["n"] = 1
        ticks.now += 9
        state["n"] = 2
        assert saved(store) == []
        ticks.now += 1
        state["n"] = 3
        assert saved(store) == [{"n": 3}]
        ticks.now += 9
        state["n"] = 4
        assert len(saved(store)) == 1
    assert saved(store)[-1] == {"n": 4}


def test_save_saves_now_whatever_the_policy_says(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(100)) as state:
        state["n"] = 1
        state.save()
        assert (saved(store), state.unsaved.changes) == ([{"n": 1}], 0)


def test_what_a_crash_would_cost_is_known_at_any_time(store: perdure.Store, ticks: Ticks) -> None:
    with store.thread("a").autosave(perdure.autosave.every(3), initial={"log": []}) as state:
        assert state.unsaved == ("a", 0, 0.0)
        state["n"] = 1
        ticks.now += 5
        state["n"] = 2
        assert state.unsaved == ("a", 2, 5.0)
        state["n"] = 3
        assert state.unsaved == ("a", 0, 0.0)
        state["log"].append(1)
        ticks.now += 2
        assert state.unsaved == ("a", 1, 2.0)


# --- beginning and end


def test_it_goes_on_from_the_newest_state_and_initial_is_for_a_new_thread(store: perdure.Store) -> None:
    initial: dict[str, Any] = {"log": []}
    for number in range(3):
        with store.thread("a").autosave(perdure.autosave.every(10), initial=initial) as state:
            state["log"].append(number)
    assert saved(store)[-1] == {"log": [0, 1, 2]}
    assert initial == {"log": []}


def test_where_nothing_was_done_nothing_is_written(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(1)):
        pass
    assert saved(store) == []
    with store.thread("a").autosave(perdure.autosave.every(1), initial={"log": []}):
        pass
    assert saved(store) == [{"log": []}]


def test_the_handle_stands_on_what_was_saved(store: perdure.Store) -> None:
    thread = store.thread("a")
    with thread.autosave(perdure.autosave.every(1), note="by itself") as state:
        state["n"] = 1
    assert thread.save({"n": 2}).is_head
    assert [checkpoint.note for checkpoint in thread.history()] == [None, "by itself"]


def test_the_state_is_saved_also_when_the_body_raises_and_its_error_is_not_hidden(store: perdure.Store) -> None:
    with pytest.raises(Broken), store.thread("a").autosave(perdure.autosave.every(100)) as state:
        break_off(state, "n", 1)
    assert saved(store) == [{"n": 1}]


def test_if_the_last_save_fails_too_the_error_of_the_body_is_raised_and_tells_of_it(store: perdure.Store) -> None:
    with pytest.raises(Broken) as caught, store.thread("a").autosave(perdure.autosave.every(100)) as state:
        break_off(state, "plan", {"callback": print})
    [note] = caught.value.__notes__
    assert note.startswith("and the last autosave of thread 'a' failed: ")
    assert "callback" in note
    assert saved(store) == []


def test_a_value_that_cannot_be_stored_is_named_at_the_change_that_is_due_and_may_be_mended(
    store: perdure.Store,
) -> None:
    with store.thread("a").autosave(perdure.autosave.every(1)) as state:
        with pytest.raises(perdure.Unstorable, match=r'state\["f"\]'):
            state["f"] = print
        state["f"] = "print"
    assert saved(store) == [{"f": "print"}]


def test_a_last_save_that_fails_is_an_error(store: perdure.Store) -> None:
    with pytest.raises(perdure.Unstorable), store.thread("a").autosave(perdure.autosave.every(100)) as state:
        state["f"] = print


def test_after_the_end_the_state_can_be_read_but_not_changed(store: perdure.Store) -> None:
    autosave = store.thread("a").autosave(perdure.autosave.every(1))
    with autosave as state:
        state["log"] = [1]
    assert state["log"] == [1]
    for change in (lambda: state.update(n=1), lambda: state.pop("log"), state.changed, state.save, state.clear):
        with pytest.raises(perdure.UsageError, match="has ended"):
            change()
    with pytest.raises(perdure.UsageError, match="for one use"), autosave:
        pass


def test_what_cannot_be_right_is_refused(store: perdure.Store) -> None:
    thread = store.thread("a")
    policy = perdure.autosave.every(1)
    with thread.autosave(policy):
        with pytest.raises(perdure.UsageError, match="in an autosave already"), thread.autosave(policy):
            pass
        with store.thread("a").autosave(policy):
            pass  # another handle: at worst it becomes a branch
    with thread.autosave(policy):
        pass
    with pytest.raises(perdure.UsageError, match=r"perdure\.autosave\.every"):
        thread.autosave(5)  # type: ignore[arg-type]
    with pytest.raises(perdure.UsageError, match="takes a mapping"):
        thread.autosave(perdure.autosave.every(5), initial=[1])  # type: ignore[arg-type]
    thread.save([1, 2])
    with pytest.raises(perdure.UsageError, match="keeps a mapping"), thread.autosave(perdure.autosave.every(5)):
        pass


def test_somebody_else_saves_meanwhile_and_nothing_is_lost(
    store: perdure.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.thread("a").save({"n": 0})
    with store.thread("a").autosave(perdure.autosave.every(1)) as state:
        store.thread("a").save({"n": "theirs"})
        state["n"] = "ours"
        state["n"] = "ours again"
    assert [checkpoint.state["n"] for checkpoint in store.thread("a").branches()] == ["ours again", "theirs"]
    assert len([record for record in caplog.records if "a branch" in record.message]) == 1


def test_in_a_durable_function_it_is_refused_and_in_a_step_it_works(store: perdure.Store) -> None:
    def keep(number: int) -> None:
        with store.thread("a").autosave(perdure.autosave.every(1)) as state:
            state["n"] = number

    @perdure.step(name="autosave.in_step")
    def in_step() -> None:
        keep(1)

    @perdure.durable(name="autosave.durable")
    def agent() -> str:
        in_step()
        with pytest.raises(perdure.UsageError, match=r"perdure\.state\(\)"):
            keep(2)
        return "done"

    assert store.run(agent, id="r").result() == "done"
    assert saved(store) == [{"n": 1}]


# --- async


async def test_async_with_is_the_same_and_awaits_what_is_written(url: str) -> None:
    async with perdure.open(url) as store:
        thread = store.thread("a")
        async with thread.autosave(perdure.autosave.every(2), initial={"log": []}) as state:
            for number in range(5):
                state["n"] = number
            state["log"].append(1)
            await state.asave()
            assert (await store.thread("a").aload()).state == {"log": [1], "n": 4}
            assert state.unsaved.changes == 0
            state["n"] = 9
        assert (await thread.aload()).state == {"log": [1], "n": 9}
        async with store.thread("a").autosave(perdure.autosave.every(1)) as state:
            assert state["n"] == 9


async def test_async_saves_in_order_while_the_body_awaits(url: str) -> None:
    async with perdure.open(url) as store:
        async with store.thread("a").autosave(perdure.autosave.every(1)) as state:
            for number in range(10):
                state["n"] = number
                if number % 2:
                    await state.asave()
        numbers = [(await store.thread("a").aload(each)).state["n"] async for each in store.thread("a").ahistory()]
    assert numbers == sorted(numbers, reverse=True)
    assert {1, 3, 5, 7, 9} <= {*numbers}


async def test_async_errors_and_cancelling_leave_what_was_there(url: str) -> None:
    async with perdure.open(url) as store:
        with pytest.raises(Broken):
            async with store.thread("a").autosave(perdure.autosave.every(100)) as state:
                break_off(state, "n", 1)
        assert (await store.thread("a").aload()).state == {"n": 1}

        async def work(started: asyncio.Event) -> None:
            async with store.thread("b").autosave(perdure.autosave.every(100)) as state:
                state["n"] = 2
                started.set()
                await asyncio.Event().wait()

        started = asyncio.Event()
        task = asyncio.create_task(work(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await store.thread("b").aload()).state == {"n": 2}


async def test_async_changes_may_come_from_a_thread(url: str) -> None:
    async with perdure.open(url) as store, store.thread("a").autosave(perdure.autosave.every(1)) as state:
        await asyncio.to_thread(state.update, n=1, m=1)
        await state.asave()
        assert (await store.thread("a").aload()).state == {"n": 1, "m": 1}


async def test_async_a_last_save_that_fails_is_an_error_and_what_was_due_before_is_kept(url: str) -> None:
    async with perdure.open(url) as store:
        with pytest.raises(perdure.Unstorable):
            async with store.thread("a").autosave(perdure.autosave.every(2), initial={"n": 0}) as state:
                spoil(state)
        assert (await store.thread("a").aload()).state == {"n": 2}


def test_a_state_is_a_mapping_to_the_type_checker(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(1)) as state:
        shown: AutoState = state
        assert repr(shown) == "AutoState({})"
