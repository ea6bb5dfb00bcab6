"""Finding the difference between two texts.

A difference is a list of splices on the whole text, in ascending order: keep so many bytes, drop so many,
insert these. Where one splice is poor, because both what goes and what comes is large, the place is split
into several splices, or becomes a *patch*: a zstd frame of the new bytes with the old bytes as its prefix.
Byte strings are compared as slices, at the speed of memory.

What must never happen here: a difference that gives something else than the new text.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from perdure.values.compress import compress_against, zstd
from perdure.values.limits import SMALL_TEXT_BYTES

# (skip, drop, insert): keep `skip` bytes since the end of the last splice, drop `drop`, insert `insert`.
# A negative drop is a patch: the -1 - drop bytes there are the prefix of the zstd frame `insert`.
Op = tuple[int, int, bytes]
_insert_of = itemgetter(2)

# A changed place whose old or new side is at most this long is one splice; longer ones are looked into.
POOR = 512
# Kept bytes between two splices that are cheaper to store again than a splice is.
MERGE_GAP = 16
# Equal bytes that are searched to split a place in two, and the shortest run worth splitting for.
ANCHOR = 32
RUN_MIN = 64
# Splits in one changed place before a patch is taken instead.
SPLITS_MAX = 24
# A place with an old or new side of at most this is never a patch.
PATCH_MIN = 2048
# Where more than this was both dropped and inserted, something may have moved: a patch is tried as well.
MOVED_MIN = 4096

_COMPARE_FIRST = 32
_COMPARE_STEP = 64 * 1024


class Ops(NamedTuple):
    """A difference: its splices, and how many first bytes both whole texts share."""

    items: list[Op]
    common_head: int

    @property
    def inserted_bytes(self) -> int:
        return sum(map(len, map(_insert_of, self.items)))

    def same(self, size: int) -> list[tuple[int, int]]:
        """Ranges of the new text, which is `size` bytes long, that the old one has at the same offsets."""
        ranges: list[tuple[int, int]] = []
        old = new = 0
        for skip, drop, insert in self.items:
            if old == new:
                ranges.append((new, new + skip))
            if drop < 0:
                drop, grown = -1 - drop, zstd.get_frame_info(insert).decompressed_size or 0
            else:
                grown = len(insert)
            old += skip + drop
            new += skip + grown
        if old == new:
            ranges.append((new, size))
        return ranges


def find(a: bytes, b: bytes) -> Ops:
    """The difference that makes the text `b` from the text `a`; no splices if they are equal."""
    shorter = min(len(a), len(b))
    head = _common_head(a, 0, b, 0, shorter)
    if head == len(a) == len(b):
        return Ops([], head)
    tail = _common_tail(a, len(a), b, len(b), shorter - head)
    a_end, b_end = len(a) - tail, len(b) - tail
    if (a_end <= SMALL_TEXT_BYTES and b_end <= SMALL_TEXT_BYTES) or min(a_end, b_end) - head <= ANCHOR:
        return Ops([(head, a_end - head, b[head:b_end])], head)
    out = _Splices(a, b)
    _refine((head, a_end, head, b_end), out)
    return Ops(out.ops, head)


class _Splices:
    """The splices of one difference while they are found, near ones merged."""

    __slots__ = ("a", "b", "end", "ops")

    def __init__(self, a: bytes, b: bytes) -> None:
        self.a = a
        self.b = b
        self.end = 0
        self.ops: list[Op] = []

    def splice(self, a0: int, a1: int, b0: int, b1: int) -> None:
        """Replace a[a0:a1] by b[b0:b1]."""
        skip = a0 - self.end
        insert = self.b[b0:b1]
        if self.ops and skip < MERGE_GAP and self.ops[-1][1] >= 0:
            before, dropped, inserted = self.ops[-1]
            insert = inserted + self.a[self.end : a0] + insert
            self.ops[-1] = (before, dropped + a1 - self.end, insert)
        else:
            self.ops.append((skip, a1 - a0, insert))
        self.end = a1

    def patch(self, a0: int, a1: int, frame: bytes) -> None:
        """Replace a[a0:a1] by what `frame` holds."""
        self.ops.append((a0 - self.end, -1 - (a1 - a0), frame))
        self.end = a1


_Place = tuple[int, int, int, int]


def _refine(place: _Place, out: _Splices) -> None:
    """Write down how a[a0:a1] becomes b[b0:b1], where nothing is equal at either end."""
    if _is_good(place):
        out.splice(*place)
        return
    places = _split(place, out)
    if places is None or min(sum(p[1] - p[0] for p in places), sum(p[3] - p[2] for p in places)) > MOVED_MIN:
        frame = _patch_frame(place, out)
        if places is None or len(frame) < _estimate(places, out):
            out.patch(place[0], place[1], frame)
            return
    for part in places:
        _replace(part, out)


def _replace(place: _Place, out: _Splices) -> None:
    """Write down a place that cannot be split any more, as a splice or as a patch."""
    # A splice's bytes meet the shared dictionary when they are stored, a patch's do not: small texts are better off as
    # splices, and so are those that merely are of the same kind.
    if min(place[1] - place[0], place[3] - place[2]) > PATCH_MIN:
        frame = _patch_frame(place, out)
        bar = 0.75 if place[3] - place[2] < 16 * 1024 else 1.0
        if len(frame) < bar * _plain_size(out.b[place[2] : place[3]]):
            out.patch(place[0], place[1], frame)
            return
    out.splice(*place)


def _is_good(place: _Place) -> bool:
    return place[1] - place[0] <= POOR or place[3] - place[2] <= POOR


def _split(place: _Place, out: _Splices) -> list[_Place] | None:
    """The place as smaller places in order, with equal runs between them; None if there are too many."""
    todo = [place]
    done: list[_Place] = []
    splits = 0
    while todo:
        part = todo.pop()
        run = None if _is_good(part) else _equal_run(part, out)
        if run is None:
            done.append(part)
            continue
        splits += 1
        if splits > SPLITS_MAX:
            return None
        a0, a1, b0, b1 = part
        left, right = (a0, run[0], b0, run[2]), (run[1], a1, run[3], b1)
        todo += [p for p in (right, left) if p[0] < p[1] or p[2] < p[3]]
    return done


def _equal_run(place: _Place, out: _Splices) -> _Place | None:
    """A long run of bytes that both sides have, found by a few samples of the new side."""
    a0, a1, b0, b1 = place
    a, b = out.a, out.b
    best: _Place | None = None
    best_size = RUN_MIN - 1
    for quarter in (2, 0, 4, 1, 3):
        at = b0 + (b1 - b0 - ANCHOR) * quarter // 4
        anchor = b[at : at + ANCHOR]
        # The same distance from either end first: it is right wherever lengths did not change before or
        # after.
        for guess in (a0 + at - b0, a1 - (b1 - at), -1):
            found = guess if guess >= a0 and a.startswith(anchor, guess) else -1
            if guess < 0:
                found = a.find(anchor, a0, a1)
            if found < a0 or found + ANCHOR > a1:
                continue
            right = _common_head(a, found, b, at, min(a1 - found, b1 - at))
            left = _common_tail(a, found, b, at, min(found - a0, at - b0))
            if left + right > best_size:
                best_size = left + right
                best = (found - left, found + right, at - left, at + right)
                break
        if best_size * 4 >= b1 - b0:
            break
    return best


def _patch_frame(place: _Place, out: _Splices) -> bytes:
    """The new side as a zstd frame that refers to the old side."""
    a0, a1, b0, b1 = place
    return compress_against(out.b[b0:b1], out.a[a0:a1])


def _plain_size(data: bytes) -> int:
    return len(zstd.compress(data, 3))


def _estimate(places: list[_Place], out: _Splices) -> int:
    """About what the places cost as splices."""
    return 8 * len(places) + _plain_size(b"".join([out.b[place[2] : place[3]] for place in places]))


def _common_head(a: bytes, a0: int, b: bytes, b0: int, size: int) -> int:
    """How many of the `size` bytes from a[a0] and b[b0] on are equal, up to the first that are not."""
    # `startswith` compares in place, at memory speed; slices of large texts cost more to copy than to
    # compare, and comparing memoryviews goes byte by byte.
    done, step = 0, _COMPARE_FIRST
    if size > step:
        view = memoryview(a)
        while done < size:
            step = min(step, size - done)
            if not b.startswith(view[a0 + done : a0 + done + step], b0 + done):
                break
            done += step
            step = min(step * 4, _COMPARE_STEP)
        else:
            return size
        while step > _COMPARE_FIRST:
            step //= 2
            if b.startswith(view[a0 + done : a0 + done + step], b0 + done):
                done += step
        step = _COMPARE_FIRST + 1
    step = min(step, size - done)
    left = a[a0 + done : a0 + done + step]
    right = b[b0 + done : b0 + done + step]
    if left == right:
        return done + step
    # The highest bit in which two numbers differ is in the first byte in which their texts do.
    odd = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
    return done + step - (odd.bit_length() + 7) // 8


def _common_tail(a: bytes, a1: int, b: bytes, b1: int, size: int) -> int:
    """How many of the `size` bytes before a[a1] and b[b1] are equal, counted from the end."""
    done, step = 0, _COMPARE_FIRST
    if size > step:
        view = memoryview(a)
        while done < size:
            step = min(step, size - done)
            if not b.startswith(view[a1 - done - step : a1 - done], b1 - done - step):
                break
            done += step
            step = min(step * 4, _COMPARE_STEP)
        else:
            return size
        while step > _COMPARE_FIRST:
            step //= 2
            if b.startswith(view[a1 - done - step : a1 - done], b1 - done - step):
                done += step
        step = _COMPARE_FIRST + 1
    step = min(step, size - done)
    left = a[a1 - done - step : a1 - done]
    right = b[b1 - done - step : b1 - done]
    if left == right:
        return done + step
    odd = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return done + step - (odd.bit_length() + 7) // 8
