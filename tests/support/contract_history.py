"""The contract, part two: histories, comparisons, and lists of threads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from harness import Harness, call

from perdure.errors import NotFound, UsageError
from perdure.threads.models import Change, Checkpoint


def is_decoded(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds its state already, or would fetch it."""
    return type(checkpoint._state) is not object


class HistoryContract:
    """What led to a state."""

    async def test_history_is_newest_first_and_decodes_nothing(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(7)])
        line = await harness.history(thread)
        assert line == saved[::-1]
        assert [one.is_head for one in line] == [True] + [False] * 6
        assert not any(is_decoded(one) for one in line)
        assert line[2].state == {"n": 4}
        assert [is_decoded(one) for one in line] == [False, False, True, False, False, False, False]

    async def test_history_pages_over_more_than_a_hundred(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(205)])
        assert await harness.history(thread) == saved[::-1]
        for limit in (0, 1, 99, 100, 101, 200, 205, 300):
            assert await harness.history(thread, limit=limit) == saved[::-1][:limit]
        assert await harness.history(thread, start=saved[150]) == saved[150::-1]
        assert await harness.history(thread, start=saved[199].id, limit=120) == saved[199:79:-1]
        assert await harness.history(thread, start=saved[0]) == saved[:1]

    async def test_history_ends_where_it_was_pruned(self, harness: Harness) -> None:
        """Also where the last page is a full one."""
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(110)])
        for keep in (101, 100, 99):
            await harness.prune(thread, keep=keep)
            assert await harness.history(thread) == saved[::-1][:keep]

    async def test_history_goes_on_while_the_thread_is_saved_to(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(150)])
        seen = []
        if harness.mode == "async":
            async for one in thread.ahistory():
                seen.append(one)
                await harness.save(thread, {"more": len(seen)})
        else:
            for one in thread.history():
                seen.append(one)
                await harness.save(thread, {"more": len(seen)})
        assert seen == saved[::-1]

    async def test_a_limit_that_is_no_count_is_refused(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {})
        for limit in (-1, "3", 1.5):
            with pytest.raises(UsageError):
                await harness.history(thread, limit=limit)

    async def test_diff_names_what_was_added_removed_and_changed(self, harness: Harness) -> None:
        thread = harness.thread()
        before = await harness.save(thread, {"a": 1, "b": {"c": 2, "d": 3}, "log": ["x"], "gone": True})
        after = await harness.save(thread, {"a": 1, "b": {"c": 9, "d": 3}, "log": ["x", "y"], "new": None})
        expected = [
            Change(("b", "c"), "changed", 2, 9),
            Change(("log", 1), "added", None, "y"),
            Change(("gone",), "removed", True),
            Change(("new",), "added"),
        ]
        assert await harness.diff(thread, before, after) == expected
        assert await harness.diff(thread, before.id) == expected
        assert await harness.diff(thread, after, after) == []
        assert [change.kind for change in await harness.diff(thread, after, before)] == [
            "changed",
            "removed",
            "removed",
            "added",
        ]

    async def test_diff_does_not_move_the_handle(self, harness: Harness) -> None:
        mine, theirs = harness.thread(), harness.thread()
        first = await harness.save(mine, {"n": 0})
        await harness.load(theirs)
        await harness.save(theirs, {"n": 1})
        assert len(await harness.diff(mine, first)) == 1
        assert not (await harness.save(mine, {"n": 2})).is_head

    async def test_diff_against_what_is_not_there_is_not_found(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save(thread, {})
        with pytest.raises(NotFound):
            await harness.diff(thread, saved, "0000000000000")
        with pytest.raises(NotFound):
            await harness.diff(thread, "0000000000000")

    async def test_branches_are_the_ends_of_all_lines(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"n": n} for n in range(4)])
        assert await harness.branches(thread) == [saved[-1]]
        tips = [await harness.save(harness.thread(), {"b": n}, parent=saved[n]) for n in range(3)]
        found = await harness.branches(thread)
        assert {tip.id for tip in found} == {saved[-1].id, *(tip.id for tip in tips)}
        assert [tip.id for tip in found if tip.is_head] == [saved[-1].id]


class ListingContract:
    """Threads and what is said about them."""

    async def test_threads_are_listed_most_recently_saved_first(self, harness: Harness) -> None:
        assert await harness.threads() == []
        for name in ("a", "b", "c"):
            await harness.save(harness.thread(name), {})
        await harness.save(harness.thread("a"), {})
        assert await harness.names() == ["a", "c", "b"]
        assert await harness.names(limit=2) == ["a", "c"]
        assert await harness.names(limit=0) == []
        assert await harness.names(limit=None) == ["a", "c", "b"]
        with pytest.raises(UsageError):
            await harness.threads(limit=-1)

    async def test_a_list_of_threads_is_bounded_unless_all_are_asked_for(self, harness: Harness) -> None:
        for number in range(103):
            await harness.save(harness.thread(f"t{number}"), {})
        assert len(await harness.threads()) == 100
        assert len(await harness.threads(limit=None)) == 103

    async def test_since_leaves_out_what_was_saved_before(self, harness: Harness) -> None:
        for name in ("a", "b"):
            await harness.save(harness.thread(name), {})
        newest = await harness.info(harness.thread("b"))
        assert await harness.names(since=newest.updated_at) == ["b"]
        assert await harness.names(since=newest.updated_at.replace(tzinfo=UTC).astimezone()) == ["b"]
        assert await harness.names(since=newest.updated_at + timedelta(seconds=1)) == []
        assert await harness.names(since=datetime(2020, 1, 1)) == ["b", "a"]
        with pytest.raises(UsageError):
            await harness.threads(since=12345)

    async def test_where_finds_threads_by_all_of_their_metadata(self, harness: Harness) -> None:
        values = {"user": "ann", "n": 1, "ok": True, "tags": ["x", {"y": None}], "long": "z" * 5_000}
        await harness.save(harness.thread("a", metadata=values), {})
        await harness.save(harness.thread("b", metadata={**values, "n": 2}), {})
        await harness.save(harness.thread("c"), {})
        for key, value in values.items():
            assert set(await harness.names(where={key: value})) == ({"a"} if key == "n" else {"a", "b"})
        assert await harness.names(where={"user": "ann", "n": 2}) == ["b"]
        assert await harness.names(where={"user": "ann", "n": 3}) == []
        assert await harness.names(where={"n": "1"}) == []
        assert await harness.names(where={"long": "z" * 4_999 + "y"}) == []
        assert await harness.names(where={"user": "ann"}, limit=1) == ["b"]
        assert len(await harness.names(where={})) == 3

    async def test_annotate_merges_and_none_removes(self, harness: Harness) -> None:
        thread = harness.thread(metadata={"a": 1, "b": {"x": 1}})
        await harness.save(thread, {})
        info = await harness.annotate(thread, {"b": 2, "c": [3]})
        assert info.metadata == {"a": 1, "b": 2, "c": [3]}
        assert (await harness.annotate(thread, {"a": None, "nowhere": None})).metadata == {"b": 2, "c": [3]}
        assert await harness.names(where={"b": 2}) == ["t"]
        assert await harness.names(where={"a": 1}) == []
        assert await harness.info(thread) == (await harness.threads())[0]
        assert len(await harness.history(thread)) == 1
        with pytest.raises(NotFound):
            await harness.annotate(harness.thread("nobody"), {"a": 1})

    async def test_metadata_given_with_the_handle_is_merged_by_the_next_save(self, harness: Harness) -> None:
        await harness.save(harness.thread(metadata={"a": 1, "none": None}), {})
        assert (await harness.info(harness.thread())).metadata == {"a": 1}
        thread = harness.thread(metadata={"b": 2, "a": None})
        assert (await harness.info(thread)).metadata == {"a": 1}
        assert (await harness.save(thread, {})).is_head
        assert (await harness.info(thread)).metadata == {"b": 2}
        await harness.annotate(thread, {"b": None})
        await harness.save(thread, {})
        assert (await harness.info(thread)).metadata == {}

    async def test_concurrent_annotations_lose_nothing(self, harness: Harness) -> None:
        await harness.save(harness.thread(), {})
        calls = [call(harness.thread(), "annotate", {str(n): n}) for n in range(8)]
        await harness.together(calls)
        assert (await harness.info(harness.thread())).metadata == {str(n): n for n in range(8)}

    async def test_info_says_where_a_thread_stands(self, harness: Harness) -> None:
        thread = harness.thread(metadata={"k": "v"})
        first = await harness.save(thread, {})
        info = await harness.info(thread)
        assert (info.name, info.metadata, info.head, info.forked_at) == ("t", {"k": "v"}, first.id, None)
        assert info.created_at == info.updated_at == first.at
        assert abs(datetime.now(UTC) - first.at) < timedelta(minutes=5)
        second = await harness.save(thread, {})
        later = await harness.info(thread)
        assert (later.created_at, later.updated_at, later.head) == (first.at, second.at, second.id)
        assert (await harness.save(thread, {}, parent=first)).is_head is False
        assert (await harness.info(thread)).head == second.id
