"""When a record becomes a keyframe: the rule that bounds both what is written and what is read.

A record stores its difference to a base. Reading it costs the keyframe plus the differences since. A new keyframe
is due when these cost as much as the state itself, or when the last keyframe is more than twice the state (it
shrank). So on a line the bytes written stay within about twice the bytes that changed, and any checkpoint is read
within about three times its own cost; tests/unit/test_keyframes.py proves both. States under 16 KiB are left out:
there a full text is written when the differences cost 16 KiB, because less would be read no faster.

A chain belongs to one thread. The first save of a fork borrows its source's chain, because many forks are dropped after
one save; the second is a keyframe (`append.prepare`), whatever the differences cost.
"""

from __future__ import annotations

# What reading one more record costs beside its bytes, in bytes of a state that could be decompressed and decoded in
# about that time: fetching it, decompressing it (as much as it holds, but hardly more for a long one), and each splice
# of its difference beyond the first. Measured by `python -m bench workload sizes`.
RECORD_COST_BYTES = 300
PAYLOAD_COST_BYTES_MAX = 1200
SPLICE_COST_BYTES = 150
# Below this a state is read in the time that finding it takes, whatever its differences cost.
SMALL_BYTES = 16 * 1024


def difference_cost(stored_bytes: int, inserted_bytes: int, splices: int) -> int:
    """What reading a difference adds to the cost of a chain."""
    decompressing = min(inserted_bytes * 11 // 10, PAYLOAD_COST_BYTES_MAX) if inserted_bytes > stored_bytes else 0
    return stored_bytes + RECORD_COST_BYTES + decompressing + SPLICE_COST_BYTES * max(0, splices - 1)


def keyframe_is_due(*, cost: int, size: int, key_size: int, branching: bool) -> bool:
    """Whether a record with this cost and size should carry its full text.

    The first record of a branch has some slack, so that many forks of one long chain do not each write a keyframe:
    up to three times its own size in all, keyframe included.
    """
    limit = min(2 * size, 3 * size - key_size) if branching else size
    return cost >= max(limit, SMALL_BYTES) or key_size > max(2 * size, SMALL_BYTES)
