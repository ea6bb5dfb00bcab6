"""`thread.at_step(n)` and `thread.sizes(points=)`: places in a long history, without walking it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import perdure

LONG = 4_400  # beyond the longest skip


def _line(thread: perdure.Thread, count: int) -> list[str]:
    return [thread.save({"n": number}, note=f"note {number}").id for number in range(count)]


def test_every_position_of_a_long_history_is_the_checkpoint_that_was_saved_there(store: perdure.Store) -> None:
    thread = store.thread("long")
    ids = _line(thread, LONG)
    places = [0, 1, 127, 128, 129, 4094, 4095, 4096, 4097, LONG - 2, LONG - 1, *range(0, LONG, 61)]
    assert [thread.at_step(place).id for place in places] == [ids[place] for place in places]
    head, first = thread.at_step(LONG - 1), thread.at_step(0)
    assert (head.is_head, first.is_head, first.state, first.step) == (True, False, {"n": 0}, 0)
    assert asyncio.run(thread.aat_step(4095)).state == {"n": 4095}
    assert [tip.id for tip in thread.branches()] == [ids[-1]]  # in time, though PostgreSQL has no statistics yet
    assert store.ops.verify().ok


def test_a_position_is_looked_up_on_the_heads_own_history_and_not_on_a_branch(store: perdure.Store) -> None:
    thread = store.thread("main")
    ids = _line(thread, 300)
    branch = store.thread("main")
    last = branch.save({"branch": 0}, parent=ids[100])
    for number in range(1, 300):
        last = branch.save({"branch": number}, parent=last)
    fork = thread.fork(ids[200], name="fork")
    for number in range(200):
        fork.save({"fork": number})
    assert [thread.at_step(step).id for step in range(300)] == ids
    assert [fork.at_step(step).id for step in range(201)] == ids[:201]
    assert fork.at_step(256).state == {"fork": 55}
    assert fork.at_step(400).is_head


def test_positions_stay_when_older_checkpoints_are_pruned(store: perdure.Store) -> None:
    thread = store.thread("pruned")
    ids = _line(thread, 400)
    thread.prune(keep=150)
    assert [thread.at_step(step).id for step in range(250, 400)] == ids[250:]
    with pytest.raises(perdure.NotFound, match="no checkpoint at step 249 of its head's history: it was pruned"):
        thread.at_step(249)
    with pytest.raises(perdure.NotFound, match="the head is step 399"):
        thread.at_step(400)
    sampled = thread.sizes(points=10)
    assert (sampled[0].step, sampled[-1].step, len(sampled)) == (250, 399, 10)


def test_line_positions_are_found_for_checkpoints_under_ids_of_the_caller(store: perdure.Store) -> None:
    line = store.thread("graph").line()
    for number in range(300):
        line.save({"n": number}, id=f"{number:03}", parent=f"{number - 1:03}" if number else None)
    thread = store.thread("graph")
    assert [thread.at_step(step).state for step in (0, 128, 255, 256, 299)] == [
        {"n": number} for number in (0, 128, 255, 256, 299)
    ]


def test_a_copy_of_a_thread_has_the_same_positions(store: perdure.Store, tmp_path: Path) -> None:
    ids = _line(store.thread("copied"), 300)
    store.ops.transfer(tmp_path / "copy.db", threads=["copied"])
    with perdure.open(tmp_path / "copy.db") as other:
        copied = other.thread("copied")
        assert [copied.at_step(step).id for step in range(0, 300, 13)] == ids[::13]


def test_sizes_are_a_thinned_history_with_both_ends(store: perdure.Store) -> None:
    thread = store.thread("grows")
    for number in range(500):
        thread.save({"text": "x" * number}, note=f"note {number}")
    sampled = thread.sizes(points=50)
    steps = [checkpoint.step for checkpoint in sampled]
    assert (len(steps), steps[0], steps[-1], steps == sorted(set(steps))) == (50, 0, 499, True)
    by_step = {checkpoint.step: checkpoint for checkpoint in thread.history()}
    assert [(one.size_bytes, one.at, one.note) for one in sampled] == [
        (by_step[step].size_bytes, by_step[step].at, by_step[step].note) for step in steps
    ]
    assert [one.id for one in asyncio.run(thread.asizes(points=50))] == [one.id for one in sampled]
    short = store.thread("short")
    _line(short, 3)
    assert [one.step for one in short.sizes(points=50)] == [0, 1, 2]


def test_a_very_long_history_is_sampled_without_reading_it_all(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.log.ancestors._WALKED_MAX", 1_000)
    thread = store.thread("long")
    _line(thread, 1_300)
    steps = [checkpoint.step for checkpoint in thread.sizes(points=200)]
    assert steps == [*range(0, 1_299, 128), 1_299]
    assert len(thread.sizes(points=5)) == 5


@pytest.mark.parametrize("step", [-1, True, "1", 1.5, None])
def test_a_wrong_step_is_refused(store: perdure.Store, step: object) -> None:
    store.thread("t").save({})
    with pytest.raises(perdure.UsageError, match="the `step` of a checkpoint"):
        store.thread("t").at_step(step)  # type: ignore[arg-type]
    with pytest.raises(perdure.UsageError, match="from 2 to 10,000"):
        store.thread("t").sizes(points=1)
