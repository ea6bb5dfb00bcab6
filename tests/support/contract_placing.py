"""The contract, part six: where a save goes when handles stand in different places."""

from __future__ import annotations

import pytest
from harness import Harness, call

import perdure
from perdure.errors import UsageError


class PlacingContract:
    """A save goes on from what its handle has seen, and says so when that is no longer the head."""

    @pytest.mark.parametrize("look", ["head", "load"])
    async def test_two_that_found_nothing_do_not_overwrite_each_other(self, harness: Harness, look: str) -> None:
        one, two = harness.thread("new"), harness.thread("new")
        for handle in (one, two):
            if look == "head":
                assert await harness.head(handle) is None
            else:
                with pytest.raises(LookupError):
                    await harness.load(handle)
        first, second = await harness.save(one, {"by": "one"}), await harness.save(two, {"by": "two"})
        assert (first.is_head, second.is_head) == (True, False)
        assert second.parent is None
        assert {tip.id for tip in await harness.branches(one)} == {first.id, second.id}
        assert await harness.state(harness.thread("new")) == {"by": "one"}
        # Each goes on along its own line.
        assert (await harness.save(two, {"by": "two again"})).parent == second.id

    async def test_one_that_never_looked_goes_on_from_the_head(self, harness: Harness) -> None:
        first = await harness.save(harness.thread(), {"n": 1})
        assert (await harness.save(harness.thread(), {"n": 2})).parent == first.id

    async def test_after_a_branch_of_its_own_a_handle_goes_on_there(self, harness: Harness) -> None:
        thread = harness.thread()
        first, head = await harness.save_all(thread, [{"n": 1}, {"n": 2}])
        branch = await harness.save(thread, {"n": 3}, parent=first)
        following = await harness.save(thread, {"n": 4})
        assert (branch.is_head, following.is_head, following.parent) == (False, False, branch.id)
        assert await harness.state(harness.thread(), head) == {"n": 2}

    async def test_an_expectation_on_a_fresh_handle_costs_no_keyframe(self, harness: Harness) -> None:
        state = {"text": "many words " * 10_000, "n": 0}
        head = await harness.save(harness.thread(), state)
        for number in range(1, 8):
            head = await harness.save(harness.thread(), state | {"n": number}, expect=head)
        assert (await harness.stats()).keyframes == 1

    async def test_branches_always_have_the_head(self, harness: Harness) -> None:
        thread = harness.thread()
        head = await harness.save(thread, {"n": 1})
        fork = await harness.fork(thread, name="fork")
        assert [tip.id for tip in await harness.branches(fork)] == [head.id]
        await harness.save(fork, {"n": 2})
        assert [tip.id for tip in await harness.branches(thread)] == [head.id]

    async def test_a_handle_of_another_store_deletes_nothing_here(self, harness: Harness) -> None:
        await harness.save(harness.thread("precious"), {"n": 1})
        with perdure.open(":memory:") as elsewhere:
            stranger = elsewhere.thread("precious")
            stranger.save({"n": 2})
            with pytest.raises(UsageError, match="another store"):
                await harness.run(call(harness.store, "delete_thread", stranger))
        assert await harness.names() == ["precious"]
        same = harness.open().thread("precious")  # the same database, by another handle
        await harness.run(call(harness.store, "delete_thread", same))
        assert await harness.names() == []

    async def test_prunes_and_forks_of_one_tree_at_once(self, harness: Harness) -> None:
        """Forks that are made while others prune keep their head; nobody waits for each other for good."""
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n, "text": str(n) * 3_000} for n in range(40)])
        forks = [await harness.fork(thread, saved[at], name=f"fork-{at}") for at in (5, 15, 25)]
        calls = [call(harness.thread(), "prune", keep=keep) for keep in (30, 20, 10)]
        calls += [call(fork, "prune", keep=2) for fork in forks]
        calls += [call(fork, "fork", name=f"{fork.name}-child") for fork in forks]
        await harness.together(calls)
        for name in await harness.names():
            handle = harness.thread(name)
            assert (await harness.load(handle, strict=True)).state["n"] in (5, 15, 25, 39)

    async def test_bad_counts_and_paths_are_named(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"v": 1, "o": 2, "votes": 3})
        for wrong in ("3", 1.5, 0, None):
            with pytest.raises(UsageError, match="keep"):
                await harness.prune(thread, keep=wrong)
        for paths in ("vo", [5], 7):
            with pytest.raises(UsageError, match="remove"):
                await harness.update(thread, {}, remove=paths)
        with pytest.raises(UsageError, match="limit"):
            await harness.threads(limit=2**70)
        assert await harness.state(thread) == {"v": 1, "o": 2, "votes": 3}
