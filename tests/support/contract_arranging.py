"""The contract, part three: forking, deleting, pruning. What lives never changes, whatever goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from harness import Harness, call

from perdure.errors import NotFound, ThreadDeleted, UsageError
from perdure.threads.models import Checkpoint
from perdure.threads.thread import Thread


def growing(count: int, *, width: int = 60) -> list[dict[str, Any]]:
    """States like an agent's: messages that are added, a phase that alternates, a plan that is rewritten."""
    return [
        {
            "messages": [f"message {n} {'x' * width}" for n in range(size)],
            "phase": ("think", "act")[size % 2],
            "plan": {"step": size, "notes": ["n" * (size % 7)]},
        }
        for size in range(count)
    ]


async def states_of(
    harness: Harness, thread: Thread, checkpoints: list[Checkpoint]
) -> list[tuple[str, Any, str | None]]:
    found = [await harness.load(thread, one, strict=True) for one in checkpoints]
    return [(one.id, one.state, one.note) for one in found]


class ArrangingContract:
    """Forks and deletions."""

    async def test_a_fork_shares_history_and_goes_its_own_way(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(6))
        fork = await harness.fork(thread, saved[3], name="fork")
        assert fork.name == "fork"
        assert await harness.state(fork) == growing(6)[3]
        assert [one.id for one in await harness.history(fork)] == [one.id for one in saved[3::-1]]
        made = await harness.save(fork, {"own": 1})
        assert (made.is_head, made.parent, made.step) == (True, saved[3].id, 4)
        assert await harness.state(thread) == growing(6)[5]
        assert len(await harness.history(thread)) == 6
        assert (await harness.save(thread, {"on": 1})).is_head
        assert await harness.state(fork) == {"own": 1}

    async def test_a_fork_opens_by_name_and_says_where_it_began(self, harness: Harness) -> None:
        thread = harness.thread(metadata={"user": "ann", "kind": "main"})
        saved = await harness.save_all(thread, growing(3))
        await harness.fork(thread, name="fork", metadata={"kind": "try", "user": None, "n": 1})
        for store in (harness.store, harness.open()):
            fork = store.thread("fork")
            info = await harness.info(fork)
            assert (info.forked_at, info.head) == (saved[2].id, saved[2].id)
            assert info.metadata == {"kind": "try", "n": 1}
            assert await harness.state(fork) == growing(3)[2]
        assert set(await harness.names(where={"kind": "try"})) == {"fork"}

    async def test_a_fork_copies_nothing(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save_all(thread, growing(20))
        before = await harness.stats()
        for number in range(10):
            await harness.fork(thread, name=f"fork {number}")
        after = await harness.stats()
        assert after.threads == before.threads + 10
        assert (after.checkpoints, after.stored_bytes) == (before.checkpoints, before.stored_bytes)

    async def test_forks_of_forks_and_of_old_checkpoints(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(8))
        one = await harness.fork(thread, saved[2], name="one")
        await harness.save(one, {"one": 1})
        two = await harness.fork(one, name="two")
        three = await harness.fork(two, saved[1].id, name="three")
        await harness.save(two, {"two": 2})
        await harness.save(three, {"three": 3})
        assert [len(await harness.history(fork)) for fork in (one, two, three)] == [4, 5, 3]
        assert await harness.state(one) == {"one": 1}
        assert await harness.state(two, (await harness.history(two))[1]) == {"one": 1}

    async def test_a_fork_needs_a_free_name_and_a_checkpoint(self, harness: Harness) -> None:
        thread = harness.thread()
        with pytest.raises(NotFound):
            await harness.fork(thread, name="fork")
        await harness.save(thread, {})
        with pytest.raises(UsageError, match="exists already"):
            await harness.fork(thread, name="t")
        with pytest.raises(NotFound):
            await harness.fork(thread, "0000000000000", name="fork")
        with pytest.raises(UsageError):
            await harness.fork(thread, name="")
        assert await harness.names() == ["t"]

    async def test_late_writes_to_a_deleted_thread_are_refused(self, harness: Harness) -> None:
        thread, late, other = harness.thread(), harness.thread(), harness.open().thread("t")
        saved = await harness.save(thread, {"n": 1})
        await harness.load(late)
        await harness.load(other)
        assert (await harness.delete("t")).removed == 1
        for handle in (thread, late, other):
            for refused in (
                call(handle, "save", {}),
                call(handle, "save", {}, parent=saved),
                call(handle, "update", {}),
                call(handle, "rollback", saved),
                call(handle, "load"),
                call(handle, "get_head"),
                call(handle, "info"),
                call(handle, "fork", name="f"),
                call(handle, "annotate", {}),
                call(handle, "prune", keep=1),
            ):
                with pytest.raises(ThreadDeleted):
                    await harness.run(refused)
        assert await harness.threads() == []
        assert (await harness.stats()).checkpoints == 0

    async def test_the_name_of_a_deleted_thread_can_be_used_anew(self, harness: Harness) -> None:
        old = harness.thread()
        saved = await harness.save(old, {"old": 1})
        await harness.delete(old)
        with pytest.raises(NotFound):
            await harness.load(harness.thread())
        fresh = await harness.save(harness.thread(), {"new": 1})
        assert (fresh.parent, fresh.step) == (None, 0)
        with pytest.raises(NotFound):
            await harness.load(harness.thread(), saved)
        with pytest.raises(ThreadDeleted):
            await harness.save(old, {"late": 1})
        with pytest.raises(ThreadDeleted):
            await harness.delete(old)
        assert await harness.state(harness.thread()) == {"new": 1}

    async def test_deleting_what_is_not_there_is_not_found(self, harness: Harness) -> None:
        with pytest.raises(NotFound):
            await harness.delete("nobody")
        await harness.save(harness.thread(), {})
        with pytest.raises(NotFound):
            await harness.delete("nobody")

    async def test_forks_survive_the_deletion_of_their_origin(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(40))
        fork = await harness.fork(thread, saved[25], name="fork")
        tip = await harness.save(fork, {"own": 1})
        line = await harness.history(fork)
        before = await states_of(harness, fork, line)
        await harness.delete("t")
        assert await states_of(harness, fork, line) == before
        assert await harness.history(fork) == line
        assert (await harness.stats()).checkpoints == 27
        for one in saved[26:]:
            with pytest.raises(NotFound):
                await harness.load(fork, one)
        assert (await harness.save(fork, {"own": 2})).parent == tip.id
        await harness.delete("fork")
        assert (await harness.stats()).checkpoints == 0

    async def test_deleting_a_fork_leaves_its_origin_alone(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(10))
        fork = await harness.fork(thread, saved[4], name="fork")
        await harness.save_all(fork, [{"own": n} for n in range(5)])
        await harness.save(thread, {"branch": 1}, parent=saved[2])
        before = await states_of(harness, thread, saved)
        assert (await harness.delete(fork)).removed == 5
        assert await states_of(harness, thread, saved) == before
        assert len(await harness.branches(thread)) == 2


class PruningContract:
    """Removing the old, keeping the rest exactly as it was."""

    @pytest.mark.parametrize("keep", [1, 2, 7, 39, 40, 100])
    async def test_what_is_kept_loads_as_before(self, harness: Harness, keep: int) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(40))
        kept = saved[-keep:]
        before = await states_of(harness, thread, kept)
        done = await harness.prune(thread, keep=keep)
        assert done.removed == max(0, 40 - keep)
        assert await states_of(harness, thread, kept) == before
        assert await harness.history(thread) == kept[::-1]
        assert (await harness.verify(thread)).ok
        assert (await harness.stats()).checkpoints == min(keep, 40)
        for one in saved[: 40 - keep] if keep < 40 else []:
            with pytest.raises(NotFound):
                await harness.load(thread, one)
            with pytest.raises(NotFound):
                await harness.save(thread, {}, parent=one)

    async def test_keyframes_and_alternating_sizes_survive_pruning(self, harness: Harness) -> None:
        states = [{"n": n, "text": f"{n}" * (6_000 if n % 3 else 200)} for n in range(30)]
        thread = harness.thread()
        saved = await harness.save_all(thread, states)
        for keep in (25, 14, 13, 3, 1):
            await harness.prune(thread, keep=keep)
            for one, state in list(zip(saved, states, strict=True))[-keep:]:
                assert await harness.state(thread, one) == state
            assert (await harness.verify(thread)).ok

    async def test_forks_keep_what_they_need(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(30))
        fork = await harness.fork(thread, saved[10], name="fork")
        await harness.save_all(fork, [{"own": n} for n in range(3)])
        old = await harness.fork(thread, saved[20], name="old")
        forked = [*await harness.history(fork), *await harness.history(old)]
        before = await states_of(harness, fork, forked)
        pruned = await harness.prune(thread, keep=2)
        assert (pruned.removed, pruned.kept) == (7, 21)
        assert await states_of(harness, fork, forked) == before
        assert await harness.state(thread) == growing(30)[29]
        assert len(await harness.history(thread)) == 2
        await harness.delete(old)
        await harness.prune(fork, keep=1)
        assert await harness.state(fork) == {"own": 2}
        # What only the forks had kept goes with the next prune of the thread that wrote it.
        await harness.prune(thread, keep=2)
        assert (await harness.stats()).checkpoints == 3

    async def test_recent_branches_are_kept_and_old_ones_go(self, harness: Harness) -> None:
        thread = harness.thread()
        early = await harness.save_all(thread, growing(5))
        old = await harness.save(harness.thread(), {"old": 1}, parent=early[2])
        await asyncio.sleep(0.002)
        late = await harness.save_all(thread, growing(10)[5:])
        await asyncio.sleep(0.002)  # ids tell milliseconds apart, and "recent" goes by them
        recent = await harness.save(harness.thread(), {"recent": 1}, parent=early[3])
        await harness.prune(thread, keep=3)
        assert await harness.state(thread, recent) == {"recent": 1}
        with pytest.raises(NotFound):
            await harness.load(thread, old)
        assert await harness.history(thread) == late[:-4:-1]
        assert {tip.id for tip in await harness.branches(thread)} == {late[-1].id, recent.id}

    async def test_saving_goes_on_through_handles_that_knew_the_old_arrangement(self, harness: Harness) -> None:
        thread = harness.thread()
        other_store = harness.open()
        saved = await harness.save_all(thread, growing(30))
        fork = await harness.fork(thread, saved[20], name="fork")
        handles = [thread, other_store.thread("t"), harness.thread(), other_store.thread("fork"), fork]
        for handle in handles:
            await harness.load(handle)
        await harness.prune(harness.open().thread("t"), keep=2)
        assert (await harness.save(handles[0], {"by": 0})).is_head
        assert not (await harness.save(handles[1], {"by": 1})).is_head
        assert not (await harness.save(handles[2], {"by": 2})).is_head
        assert (await harness.save(handles[3], {"by": 3})).is_head
        assert not (await harness.save(handles[4], {"by": 4})).is_head
        await harness.prune(handles[3], keep=1)
        for number, handle in enumerate(handles):
            assert (await harness.update(handle, {"again": number})).is_head

    async def test_a_handle_whose_checkpoint_was_pruned_is_told(self, harness: Harness) -> None:
        behind, thread = harness.thread(), harness.thread()
        await harness.save(behind, {"n": 0})
        await harness.save_all(thread, growing(5))
        await harness.prune(thread, keep=1)
        with pytest.raises(NotFound, match="load"):
            await harness.save(behind, {"late": 1})
        await harness.load(behind)
        assert (await harness.save(behind, {"n": 1})).is_head

    async def test_saves_while_pruning_lose_nothing(self, harness: Harness) -> None:
        thread, other = harness.thread(), harness.open().thread("t")
        await harness.save_all(thread, growing(30))
        calls = [call(thread, "save", {"n": n}) for n in range(6)]
        calls += [call(other, "prune", keep=20), call(harness.thread(), "prune", keep=12)]
        made = (await harness.together(calls))[:6]
        for one in made:
            assert set(await harness.state(thread, one)) == {"n"}
        line = await harness.history(thread)
        assert {one.id for one in made} <= {one.id for one in line}
        assert len(line) >= 12

    async def test_prune_keeps_at_least_one(self, harness: Harness) -> None:
        thread = harness.thread()
        with pytest.raises(NotFound):
            await harness.prune(thread, keep=1)
        await harness.save_all(thread, growing(3))
        for keep in (0, -1):
            with pytest.raises(UsageError):
                await harness.prune(thread, keep=keep)
        assert len(await harness.history(thread)) == 3

    async def test_rollback_and_diff_after_a_prune(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, growing(20))
        await harness.prune(thread, keep=5)
        made = await harness.rollback(thread, saved[15])
        assert made.is_head
        assert await harness.state(thread) == growing(20)[15]
        assert await harness.diff(thread, saved[15]) == []
        with pytest.raises(NotFound):
            await harness.rollback(thread, saved[3])
