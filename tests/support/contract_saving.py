"""The contract, part one: saving, loading, updating, and what happens when several do so at once."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness, call

from perdure.errors import Conflict, NotFound, UsageError


class SavingContract:
    """One writer."""

    async def test_what_is_saved_is_loaded(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save(thread, {"messages": ["hi"], "n": 1})
        loaded = await harness.load(thread)
        assert loaded.state == {"messages": ["hi"], "n": 1}
        assert loaded == saved
        assert (loaded.id, loaded.step, loaded.parent, loaded.is_head) == (saved.id, 0, None, True)
        assert saved.is_head
        assert loaded.kind == "state"
        assert loaded.skipped == ()

    async def test_each_save_follows_the_one_before(self, harness: Harness) -> None:
        saved = await harness.save_all(harness.thread(), [{"n": n} for n in range(5)])
        assert [one.step for one in saved] == [0, 1, 2, 3, 4]
        assert [one.parent for one in saved] == [None, *(one.id for one in saved[:-1])]
        assert all(one.is_head for one in saved)
        assert [one.id for one in saved] == sorted(one.id for one in saved)

    async def test_any_checkpoint_can_be_loaded_again(self, harness: Harness) -> None:
        states = [{"log": list(range(n)), "phase": "ab"[n % 2]} for n in range(30)]
        thread = harness.thread()
        saved = await harness.save_all(thread, states)
        for checkpoint, state in zip(saved, states, strict=True):
            assert await harness.state(thread, checkpoint) == state
            assert await harness.state(thread, checkpoint.id) == state

    async def test_looking_at_an_old_checkpoint_does_not_move_the_handle(self, harness: Harness) -> None:
        thread = harness.thread()
        first, _, _ = await harness.save_all(thread, [{"n": n} for n in range(3)])
        assert await harness.state(thread, first) == {"n": 0}
        assert (await harness.save(thread, {"n": 3})).is_head

    async def test_a_thread_without_a_checkpoint_is_not_found(self, harness: Harness) -> None:
        thread = harness.thread("nobody")
        assert await harness.head(thread) is None
        for operation in ("load", "info", "branches"):
            with pytest.raises(NotFound):
                await harness.run(call(thread, operation))
        with pytest.raises(NotFound):
            await harness.update(thread, {"a": 1})
        await harness.save(harness.thread("somebody"), {})
        assert await harness.head(thread) is None
        with pytest.raises(NotFound, match="'nobody' has no checkpoint"):
            await harness.load(thread)
        with pytest.raises(NotFound):
            await harness.history(thread)

    async def test_a_checkpoint_of_another_thread_is_not_found(self, harness: Harness) -> None:
        thread, other = harness.thread("one"), harness.thread("two")
        await harness.save(thread, {"mine": 1})
        foreign = await harness.save(other, {"theirs": 1})
        for at in (foreign, foreign.id, "0000000000000", "not an id"):
            with pytest.raises(NotFound):
                await harness.load(thread, at)
            with pytest.raises(NotFound):
                await harness.save(thread, {}, parent=at)
            with pytest.raises(NotFound):
                await harness.rollback(thread, at)
            with pytest.raises(NotFound):
                await harness.history(thread, start=at)
        with pytest.raises(UsageError):
            await harness.load(thread, 7)  # type: ignore[arg-type]

    async def test_head_is_the_newest_without_its_state(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"n": 0})
        saved = await harness.save(thread, {"n": 1})
        head = await harness.head(thread)
        assert head == saved
        assert head is not None
        assert head.is_head
        assert head.state == {"n": 1}

    async def test_unchanged_states_are_checkpoints_too(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"same": "x" * 100}] * 50)
        assert len({one.id for one in saved}) == 50
        assert len(await harness.history(thread)) == 50
        assert await harness.state(thread, saved[20]) == {"same": "x" * 100}

    async def test_the_live_object_and_what_is_saved_are_independent(self, harness: Harness) -> None:
        thread = harness.thread()
        live: dict[str, Any] = {"plan": [{"step": 1}], "n": {"deep": [1]}}
        first = await harness.save(thread, live)
        live["plan"][0]["step"] = 99
        live["n"]["deep"].append(2)
        assert first.state == {"plan": [{"step": 1}], "n": {"deep": [1]}}
        second = await harness.save(thread, live)
        del live["plan"]
        assert await harness.state(thread, first) == {"plan": [{"step": 1}], "n": {"deep": [1]}}
        assert await harness.state(thread, second) == {"plan": [{"step": 99}], "n": {"deep": [1, 2]}}

    async def test_loads_are_independent_of_each_other(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save(thread, {"list": [1]})
        one, other = await harness.load(thread), await harness.load(thread, saved)
        one.state["list"].append(2)
        assert other.state == {"list": [1]}
        assert (await harness.save(thread, one.state)).state == {"list": [1, 2]}
        assert await harness.state(thread, saved) == {"list": [1]}

    async def test_notes_and_metadata_are_kept(self, harness: Harness) -> None:
        thread = harness.thread()
        metadata = {"cost": 0.25, "tags": ["a", {"b": None}], "ok": True, "名": "\x00"}
        saved = await harness.save(thread, {}, note="a note\nwith 汉字", metadata=metadata)
        plain = await harness.save(thread, {})
        for checkpoint in (saved, await harness.load(thread, saved), (await harness.history(thread))[1]):
            assert checkpoint.note == "a note\nwith 汉字"
            assert checkpoint.metadata == metadata
        assert (plain.note, plain.metadata) == (None, {})

    async def test_update_merges_deeply_and_replaces_all_else(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"a": {"b": {"c": 1, "d": 2}}, "list": [1, 2], "x": 1})
        made = await harness.update(thread, {"a": {"b": {"c": 9}, "new": 1}, "list": [3], "x": {"y": 1}})
        expected = {"a": {"b": {"c": 9, "d": 2}, "new": 1}, "list": [3], "x": {"y": 1}}
        assert await harness.state(thread) == expected
        assert made.is_head
        assert made.kind == "update"

    async def test_update_removes_paths(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"a": {"b": 1, "c": 2}, "list": [1, 2, 3], "gone": 1})
        await harness.update(thread, {"new": 1}, remove=["gone", ("a", "b"), ("list", 1)], note="less")
        assert await harness.state(thread) == {"a": {"c": 2}, "list": [1, 3], "new": 1}
        assert (await harness.load(thread)).note == "less"
        for path in ("nowhere", ("a", "b", "c"), ()):
            with pytest.raises(UsageError):
                await harness.update(thread, {}, remove=[path])
        assert len(await harness.history(thread)) == 2

    async def test_update_goes_on_from_the_newest_state_whoever_saved_it(self, harness: Harness) -> None:
        mine, theirs = harness.thread(), harness.thread()
        await harness.save(mine, {"a": 1})
        await harness.load(theirs)
        await harness.save(theirs, {"a": 1, "b": 2})
        assert (await harness.update(mine, {"c": 3})).is_head
        assert await harness.state(mine) == {"a": 1, "b": 2, "c": 3}

    async def test_rollback_is_a_new_head_that_equals_the_old_checkpoint(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n, "log": ["x" * 50] * n} for n in range(10)])
        made = await harness.rollback(thread, saved[3])
        assert made.is_head
        assert made.kind == "rollback"
        assert made.note is not None
        assert saved[3].id in made.note
        assert made.parent == saved[-1].id
        assert await harness.state(thread) == saved[3].state
        assert len(await harness.history(thread)) == 11
        again = await harness.rollback(thread, saved[8].id, note="no, that one")
        assert again.note == "no, that one"
        assert await harness.state(thread) == saved[8].state

    async def test_rollback_through_a_handle_that_is_behind_still_makes_the_head(self, harness: Harness) -> None:
        mine, theirs = harness.thread(), harness.thread()
        first = await harness.save(mine, {"n": 0})
        await harness.load(theirs)
        newest = await harness.save(theirs, {"n": 1})
        made = await harness.rollback(mine, first)
        assert made.is_head
        assert made.parent == newest.id
        assert (await harness.load(theirs)).id == made.id


class RacingContract:
    """Several writers."""

    async def test_the_loser_of_a_race_becomes_a_branch(self, harness: Harness) -> None:
        one, other = harness.thread(), harness.thread()
        first = await harness.save(one, {"n": 0})
        await harness.load(other)
        winner = await harness.save(one, {"n": 1})
        loser = await harness.save(other, {"n": 2})
        assert (winner.is_head, loser.is_head) == (True, False)
        assert (winner.parent, loser.parent) == (first.id, first.id)
        assert await harness.state(one, loser) == {"n": 2}
        assert {tip.id: tip.is_head for tip in await harness.branches(one)} == {winner.id: True, loser.id: False}
        assert (await harness.load(other)).id == winner.id

    async def test_a_branch_goes_on_as_a_branch(self, harness: Harness) -> None:
        one, other = harness.thread(), harness.thread()
        await harness.save(one, {"n": 0})
        await harness.load(other)
        head = await harness.save(one, {"n": 1})
        branch = await harness.save_all(other, [{"b": 0}, {"b": 1}])
        assert [checkpoint.is_head for checkpoint in branch] == [False, False]
        assert branch[1].parent == branch[0].id
        assert (await harness.load(one)).id == head.id
        assert len(await harness.history(one, start=branch[1])) == 3

    async def test_many_racing_handles_lose_nothing(self, harness: Harness) -> None:
        store = harness.open()
        first = await harness.save(harness.thread(), {"n": -1})
        handles = [(harness.store if n % 2 else store).thread("t") for n in range(8)]
        for handle in handles:
            await harness.load(handle)
        made = await harness.together(call(handle, "save", {"n": n}) for n, handle in enumerate(handles))
        assert sum(one.is_head for one in made) == 1
        assert {one.parent for one in made} == {first.id}
        thread = harness.thread()
        assert sorted([(await harness.state(thread, one))["n"] for one in made]) == list(range(8))
        assert len(await harness.branches(thread)) == 8

    async def test_expect_false_lets_one_of_two_first_writers_in(self, harness: Harness) -> None:
        one, other = harness.thread(), harness.thread()
        first = await harness.save(one, {"by": "one"}, expect=False)
        with pytest.raises(Conflict, match="a thread without checkpoints as expected") as refused:
            await harness.save(other, {"by": "other"}, expect=False)
        assert (refused.value.expected, refused.value.actual) == (None, first.id)
        assert (await harness.save(one, {"by": "one", "n": 1}, expect=first)).is_head

    async def test_expect_refuses_with_a_conflict_that_names_both_heads(self, harness: Harness) -> None:
        one, other = harness.thread(), harness.thread()
        first = await harness.save(one, {"n": 0})
        second = await harness.save(one, {"n": 1}, expect=first)
        assert second.is_head
        await harness.load(other)
        with pytest.raises(Conflict, match=second.id) as refused:
            await harness.save(other, {"n": 2}, expect=first.id)
        assert (refused.value.expected, refused.value.actual) == (first.id, second.id)
        assert len(await harness.history(one)) == 2
        assert (await harness.save(other, {"n": 2}, expect=second)).is_head

    async def test_expect_on_a_thread_that_is_not_there_is_a_conflict(self, harness: Harness) -> None:
        foreign = await harness.save(harness.thread("other"), {})
        with pytest.raises(Conflict) as refused:
            await harness.save(harness.thread(), {"n": 0}, expect=foreign)
        assert (refused.value.expected, refused.value.actual) == (foreign.id, None)
        assert await harness.names() == ["other"]

    async def test_expecting_the_head_moves_it_also_from_a_handle_that_is_behind(self, harness: Harness) -> None:
        one, other = harness.thread(), harness.thread()
        await harness.save(one, {"n": 0})
        await harness.load(other)
        head = await harness.save(one, {"n": 1})
        for store in (harness.store, harness.open()):
            behind = store.thread("t", metadata={"by": "expect"})
            await harness.load(behind, head.parent)
            made = await harness.save(behind, {"n": 2}, expect=head)
            assert (made.is_head, made.parent) == (True, head.id)
            head = made
        assert (await harness.save(other, {"n": 3}, expect=head)).is_head

    async def test_of_many_that_expect_the_same_head_one_wins(self, harness: Harness) -> None:
        first = await harness.save(harness.thread(), {"n": 0})
        calls = [call(harness.thread(), "save", {"n": n}, expect=first) for n in range(6)]
        made = await harness.together(calls, errors=True)
        assert sum(isinstance(one, Conflict) for one in made) == 5
        assert len(await harness.history(harness.thread())) == 2

    async def test_a_save_on_an_older_parent_makes_a_branch(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(4)])
        branch = await harness.save(thread, {"branch": True}, parent=saved[1])
        assert (branch.is_head, branch.parent, branch.step) == (False, saved[1].id, 2)
        on_head = await harness.save(harness.thread(), {"n": 4}, parent=saved[3].id)
        assert on_head.is_head
        assert [one.id for one in await harness.history(thread, start=branch)] == [
            branch.id,
            saved[1].id,
            saved[0].id,
        ]

    async def test_concurrent_saves_through_one_handle_make_one_line(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"n": -1})
        made = await harness.together(call(thread, "save", {"n": n}) for n in range(20))
        assert all(one.is_head for one in made)
        line = await harness.history(thread)
        assert len(line) == 21
        assert len({one.parent for one in line}) == 21
        assert [one.step for one in line] == list(range(20, -1, -1))
        states = [(await harness.state(thread, one))["n"] for one in line]
        assert sorted(states) == list(range(-1, 20))
        assert (await harness.verify(thread)).ok

    async def test_concurrent_first_saves_make_one_thread(self, harness: Harness) -> None:
        calls = [call(harness.thread("new"), "save", {"n": n}) for n in range(6)]
        made = await harness.together(calls)
        assert len({one.id for one in made}) == 6
        assert await harness.names() == ["new"]
        thread = harness.thread("new")
        assert sorted([(await harness.state(thread, one))["n"] for one in made]) == list(range(6))

    async def test_concurrent_updates_lose_nothing(self, harness: Harness) -> None:
        await harness.save(harness.thread(), {"seen": {}})
        other = harness.open()
        calls = [
            call((harness.store if n % 2 else other).thread("t"), "update", {"seen": {str(n): n}}) for n in range(16)
        ]
        await harness.together(calls)
        assert (await harness.state(harness.thread()))["seen"] == {str(n): n for n in range(16)}
        assert len(await harness.branches(harness.thread())) == 1
