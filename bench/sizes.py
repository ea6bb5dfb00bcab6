"""Bytes per step for seven kinds of change: what the file grows by, against what changed.

For each kind a store gets a first state and is closed; then hundreds of steps, and on until the next keyframe is
written, so that keyframes count in full: it would be easy to stop just before one. The growth of the closed file, over
the steps, is our figure: rows, indexes, page waste, keyframes, all in it.
The floor is zstd level 3 of what changed (the JSON text of the new part; an array's new bytes) plus 150 B, the
price of a row with its ids, hashes and times. The peer is the whole state as JSON, zstd level 3.

Sizes are meant to be ordinary: a message has 60 words (0.4 KB), an edit replaces a sentence of 12 words, a key
holds 8 words, the array is float64 (numpy's default) and changes to fresh normal noise, which does not compress.
The words repeat as words do, but no sentence ever comes again, so that a difference finds nothing to copy.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import orjson

import perdure
from bench.measure import PEER_LEVEL, Prose, Row, Run, file_bytes, mean
from perdure.values.compress import zstd

ROW_BYTES = 150
PEER_EVERY = 20
STEPS_MAX = 4000
State = dict[str, object]
Steps = Iterator[tuple[State, bytes]]  # first the state to begin with, then each state and what is new in it


def nested_append(prose: Prose) -> Steps:
    turns: list[object] = [prose.message() for _ in range(100)]
    state: State = {"agent": {"conversation": {"turns": turns}, "model": "large"}, "plan": prose.words_of(200)}
    yield state, b""
    while True:
        turns.append(prose.message())
        yield state, orjson.dumps(turns[-1])


def sliding_window(prose: Prose) -> Steps:
    messages: list[object] = [prose.message() for _ in range(50)]
    state: State = {"system": prose.words_of(200), "messages": messages}
    yield state, b""
    while True:
        del messages[0]
        messages.append(prose.message())
        yield state, orjson.dumps(messages[-1])


def one_key(prose: Prose) -> Steps:
    state: State = {f"key_{number:05}": prose.words_of(8) for number in range(10_000)}
    yield state, b""
    while True:
        key = f"key_{prose.random.randrange(10_000):05}"
        state[key] = prose.words_of(8)
        yield state, orjson.dumps({key: state[key]})


def text_edit(prose: Prose) -> Steps:
    return _edits(prose, (0.5,))


def two_edits(prose: Prose) -> Steps:
    return _edits(prose, (0.15, 0.85))


def _edits(prose: Prose, places: tuple[float, ...]) -> Steps:
    """A text of 100 KB; each step replaces one sentence near each of the places."""
    sentences: list[str] = []
    while sum(map(len, sentences)) + 2 * len(sentences) < 100_000:
        sentences.append(prose.words_of(12))
    state: State = {"title": "report", "text": ". ".join(sentences), "version": "draft"}
    yield state, b""
    while True:
        new = [prose.words_of(12) for _ in places]
        for place, sentence in zip(places, new, strict=True):
            spread = len(sentences) // 10
            sentences[int(place * len(sentences)) + prose.random.randrange(-spread, spread)] = sentence
        state["text"] = ". ".join(sentences)
        yield state, orjson.dumps(" ".join(new))


def array_contiguous(prose: Prose) -> Steps:
    return _array_changes(prose, scattered=False)


def array_scattered(prose: Prose) -> Steps:
    return _array_changes(prose, scattered=True)


def _array_changes(prose: Prose, *, scattered: bool) -> Steps:
    """1 MB of float64; each step gives 1 % of the elements new values."""
    chance = numpy.random.default_rng(prose.random.getrandbits(32))
    array = chance.standard_normal(125_000, dtype=numpy.float64)
    count = len(array) // 100
    state: State = {"shape": "125000", "array": array, "done": False}
    yield state, b""
    while True:
        new = chance.standard_normal(count, dtype=numpy.float64)
        if scattered:
            array[chance.choice(len(array), count, replace=False)] = new
        else:
            start = int(chance.integers(0, len(array) - count))
            array[start : start + count] = new
        yield state, new.tobytes()


# what, its steps, how many of them at least, the bar
CASES: tuple[tuple[str, Callable[[Prose], Steps], int, float], ...] = (
    ("append to a list three deep", nested_append, 400, 2.0),
    ("sliding window of 50 messages", sliding_window, 400, 2.0),
    ("one key of 10,000", one_key, 400, 2.0),
    ("edit in a 100 KB text", text_edit, 400, 2.0),
    ("two edits far apart", two_edits, 400, 2.0),
    ("1 % of a 1 MB array, contiguous", array_contiguous, 200, 2.0),
    ("1 % of a 1 MB array, scattered", array_scattered, 200, 2.5),
)


def sizes(run: Run) -> list[Row]:
    rows = []
    for number, (name, steps, least, bar) in enumerate(CASES):
        path = run.folder / f"{number}.db"
        rows.append(_row(name, steps(Prose(number)), path, run.count(least, 12), run.count(STEPS_MAX, 12), bar))
        path.unlink()
    return rows


def _row(name: str, steps: Steps, path: Path, least: int, most: int, bar: float) -> Row:
    first, _ = next(steps)
    with perdure.open(str(path)) as store:
        store.thread("agent").save(first)
        before = store.ops.stats()
    before_bytes = file_bytes(path)
    floor: list[int] = []
    peer: list[int] = []
    # "normal" writes the same bytes and waits less often.
    with perdure.open(str(path), durability="normal") as store:
        thread = store.thread("agent")
        after = before
        while len(floor) < most:
            state, changed = next(steps)
            thread.save(state)
            floor.append(len(zstd.compress(changed, PEER_LEVEL)) + ROW_BYTES)
            if len(floor) % PEER_EVERY == 1:
                peer.append(len(zstd.compress(_as_json(state), PEER_LEVEL)))
            if len(floor) >= least:
                after, earlier = store.ops.stats(), after
                if earlier is not before and after.keyframes > earlier.keyframes:
                    break
    count = len(floor)
    ours = (file_bytes(path) - before_bytes) / count
    differences = (after.difference_bytes - before.difference_bytes) / count
    keyframes = (after.keyframe_bytes - before.keyframe_bytes) / count
    return Row(f"bytes: {name}", ours, "B", peer=mean(peer), floor=mean(floor), ratio=ours / mean(floor), bar=bar,
               note=f"{count} steps: differences {differences:.0f}, {after.keyframes - 1} keyframes {keyframes:.0f}, "
                    f"rows and pages {ours - differences - keyframes:.0f} B")  # fmt: skip


def _as_json(state: State) -> bytes:
    """An array is base64 in the peer's JSON, as frameworks have it."""
    return orjson.dumps(state, default=lambda array: b64encode(array.tobytes()).decode())
