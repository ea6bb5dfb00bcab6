"""Finding the difference between two texts.

A difference is a list of splices in ascending order: keep some bytes, drop some, insert these. Where both the old and
the new bytes are many, the place is split into several splices, or becomes a *patch*: a zstd frame of the new bytes
with the old bytes as its prefix. Applied to the old text, a difference always results in exactly the new text.
"""

from __future__ import annotations

from typing import Any

from perdure.values import accelerator
from perdure.values.compress import compress_against, zstd

# skip, drop, insert, skip, …: keep `skip` bytes since the end of the last splice, drop `drop`, insert `insert`.
# A negative drop is a patch: the -1 - drop bytes there are the prefix of the zstd frame `insert`.
Splices = list[int | bytes]

# In a text of at most this, a change is one splice from the first byte that differs to the last. Looking closer takes
# longer than all else in the save, and compression finds the repeated bytes anyway.
SMALL_TEXT_BYTES = 2048

# A changed place whose old or new side is at most this long is one splice. Longer ones are split.
POOR = 512
# Two splices with fewer kept bytes than this between them become one, which is smaller.
MERGE_GAP = 16
# How many equal bytes are searched for to split a place, and the shortest run worth a split.
ANCHOR = 32
RUN_MIN = 64
# A changed place that needs more splits than this becomes a patch.
SPLITS_MAX = 24
# A place with an old or new side of at most this is never a patch.
PATCH_MIN = 2048
# If a place drops and inserts more than this, bytes may have moved: a patch is tried as well.
MOVED_MIN = 4096

_COMPARE_FIRST = 32
_COMPARE_STEP = 64 * 1024


def find(a: bytes, b: bytes, known: int = 0) -> Splices:
    """Return the difference that makes text `b` of text `a`; empty if they are equal.

    The caller knows that their first `known` bytes are equal.
    """
    shorter = min(len(a), len(b))
    head = known + _common(a, known, b, known, shorter - known)
    if head == len(a) == len(b):
        return []
    tail = _common(a, len(a), b, len(b), shorter - head, back=True)
    a_end, b_end = len(a) - tail, len(b) - tail
    if (a_end <= SMALL_TEXT_BYTES and b_end <= SMALL_TEXT_BYTES) or min(a_end, b_end) - head <= ANCHOR:
        return [head, a_end - head, b[head:b_end]]
    out = _Writer(a, b)
    _refine((head, a_end, head, b_end), out)
    return out.splices


def common_size(a: bytes, b: bytes) -> int:
    """Return how many bytes two texts have in common at their start."""
    return _common(a, 0, b, 0, min(len(a), len(b)))


def inserted_bytes(splices: Splices) -> int:
    """Return how many bytes a difference inserts. A patch counts with its stored size."""
    inserts: list[Any] = splices[2::3]
    return sum(map(len, inserts))


def same_ranges(splices: Splices, size: int) -> list[tuple[int, int]]:
    """Return the ranges of the new text, `size` bytes long, that the old text has at the same offsets."""
    ranges: list[tuple[int, int]] = []
    old = new = 0
    flat = iter(splices)
    skip: Any
    drop: Any
    insert: Any
    for skip, drop, insert in zip(flat, flat, flat, strict=True):
        if old == new:
            ranges.append((new, new + skip))
        old += skip + (drop if drop >= 0 else -1 - drop)
        new += skip + (len(insert) if drop >= 0 else zstd.get_frame_info(insert).decompressed_size or 0)
    return [*ranges, (new, size)] if old == new else ranges


class _Writer:
    """Collects the splices of one difference, and merges those that are near."""

    __slots__ = ("a", "b", "end", "splices")

    def __init__(self, a: bytes, b: bytes) -> None:
        self.a = a
        self.b = b
        self.end = 0
        self.splices: Splices = []

    def splice(self, a0: int, a1: int, b0: int, b1: int) -> None:
        """Replace a[a0:a1] by b[b0:b1]."""
        skip, drop, insert = a0 - self.end, a1 - a0, self.b[b0:b1]
        if self.splices and skip < MERGE_GAP:
            before: Any
            dropped: Any
            inserted: Any
            before, dropped, inserted = self.splices[-3:]
            if dropped >= 0:
                insert = inserted + self.a[self.end : a0] + insert
                skip, drop = before, dropped + a1 - self.end
                del self.splices[-3:]
        self.splices += (skip, drop, insert)
        self.end = a1

    def patch(self, a0: int, a1: int, frame: bytes) -> None:
        """Replace a[a0:a1] by the content of `frame`."""
        self.splices += (a0 - self.end, -1 - (a1 - a0), frame)
        self.end = a1


_Place = tuple[int, int, int, int]


def _refine(place: _Place, out: _Writer) -> None:
    """Add the splices that make b[b0:b1] of a[a0:a1], which are not equal at either end."""
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


def _replace(place: _Place, out: _Writer) -> None:
    """Add a place that cannot be split any more, as a splice or as a patch."""
    # Splices are compressed with the shared dictionary, patches are not. So small texts, and texts that are only of the
    # same kind as the old ones, are smaller as splices.
    if min(place[1] - place[0], place[3] - place[2]) > PATCH_MIN:
        frame = _patch_frame(place, out)
        bar = 0.75 if place[3] - place[2] < 16 * 1024 else 1.0
        if len(frame) < bar * _plain_size(out.b[place[2] : place[3]]):
            out.patch(place[0], place[1], frame)
            return
    out.splice(*place)


def _is_good(place: _Place) -> bool:
    return place[1] - place[0] <= POOR or place[3] - place[2] <= POOR


def _split(place: _Place, out: _Writer) -> list[_Place] | None:
    """Split a place into smaller ones with equal runs between them. Return None if that takes too many splits."""
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


def _equal_run(place: _Place, out: _Writer) -> _Place | None:
    """Return a long run of bytes that both sides have, searched for with a few samples of the new side, or None."""
    a0, a1, b0, b1 = place
    a, b = out.a, out.b
    best: _Place | None = None
    best_size = RUN_MIN - 1
    for quarter in (2, 0, 4, 1, 3):
        at = b0 + (b1 - b0 - ANCHOR) * quarter // 4
        anchor = b[at : at + ANCHOR]
        # First the same distance from either end: it is right if no length changed before or after the sample.
        for guess in (a0 + at - b0, a1 - (b1 - at), -1):
            match = guess if guess >= a0 and a.startswith(anchor, guess) else -1
            if guess < 0:
                match = a.find(anchor, a0, a1)
            if match < a0 or match + ANCHOR > a1:
                continue
            right = _common(a, match, b, at, min(a1 - match, b1 - at))
            left = _common(a, match, b, at, min(match - a0, at - b0), back=True)
            if left + right > best_size:
                best_size = left + right
                best = (match - left, match + right, at - left, at + right)
                break
        if best_size * 4 >= b1 - b0:
            break
    return best


def _patch_frame(place: _Place, out: _Writer) -> bytes:
    """Return the new side as a zstd frame with the old side as its prefix."""
    a0, a1, b0, b1 = place
    return compress_against(out.b[b0:b1], out.a[a0:a1])


def _plain_size(data: bytes) -> int:
    return len(zstd.compress(data, 3))


def _estimate(places: list[_Place], out: _Writer) -> int:
    """Return about how many bytes the places take as splices."""
    return 8 * len(places) + _plain_size(b"".join([out.b[place[2] : place[3]] for place in places]))


def _common(a: bytes, a_at: int, b: bytes, b_at: int, size: int, *, back: bool = False) -> int:
    """Return how many bytes are equal from a[a_at] and b[b_at] on, at most `size`; with `back`, before them."""
    if (speed := accelerator.speed) is not None:
        equal: int = speed.common(a, a_at, b, b_at, size, back)
        return equal
    # `startswith` compares in place at the speed of memory. Copying a slice takes longer than comparing it, and
    # memoryviews are compared byte by byte.
    done, step, is_same, view = 0, _COMPARE_FIRST, True, memoryview(a)
    while size - done > _COMPARE_FIRST:
        step = min(step, size - done) if is_same else (size - done) // 2
        shift = -done - step if back else done
        if b.startswith(view[a_at + shift : a_at + shift + step], b_at + shift):
            done += step
            step = min(step * 4, _COMPARE_STEP)
        else:
            is_same, size = False, done + step  # the first difference is before this
    shift = -size if back else done
    left, right = a[a_at + shift : a_at + shift + size - done], b[b_at + shift : b_at + shift + size - done]
    if left == right:
        return size
    # Read as numbers, two texts differ at the highest bit of the first byte that is not equal.
    order: Any = "little" if back else "big"
    odd = int.from_bytes(left, order) ^ int.from_bytes(right, order)
    return size - (odd.bit_length() + 7) // 8
