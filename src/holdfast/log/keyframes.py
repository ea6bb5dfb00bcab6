"""When to write a full state: the rule that bounds both what is written and what is read.

A record stores its difference to a base. Reading it costs the keyframe plus the differences since. A new keyframe
is due when these cost as much as the state itself, or when the last keyframe is more than twice the state (it
shrank). So on a line the bytes written stay within about twice the bytes that changed, and any checkpoint is read
within about three times its own cost; tests/unit/test_keyframes.py proves both.
"""

from __future__ import annotations

from holdfast.values.delta import RAW_MAX

# What reading one more record costs beside its bytes, in bytes of a state that could be decompressed and decoded in
# about that time: fetching it; decompressing it, unless it is small; each splice of its difference beyond the first.
# Measured by `python -m bench load`.
RECORD_COST_BYTES = 500
COMPRESSED_COST_BYTES = 600
SPLICE_COST_BYTES = 300


def difference_cost(stored_bytes: int, splices: int) -> int:
    """What reading a difference adds to the cost of a chain."""
    cost = stored_bytes + RECORD_COST_BYTES + SPLICE_COST_BYTES * max(0, splices - 1)
    return cost + COMPRESSED_COST_BYTES if stored_bytes >= RAW_MAX else cost


def keyframe_is_due(*, cost: int, size: int, key_size: int, branching: bool) -> bool:
    """Whether a record with this cost and size should carry its full text.

    The first record of a branch has some slack, so that many forks of one long chain do not each write a keyframe:
    up to three times its own size in all, keyframe included.
    """
    limit = min(2 * size, 3 * size - key_size) if branching else size
    return cost >= limit or key_size > 2 * size
