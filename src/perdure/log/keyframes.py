"""The rule for when a record becomes a keyframe. It bounds both the bytes written and the bytes read.

A keyframe is due when the differences since the last one cost as much as the state, or when the last one is more than
twice as large as the state. So a line writes about twice the bytes that changed at most, and reading a checkpoint costs
about three times its size at most; tests/unit/test_keyframes.py proves both.
"""

from __future__ import annotations

# The costs of reading one more record beside its stored bytes. The unit is the bytes of a state that could be
# decompressed and decoded in the same time. They are the cost of fetching a record, the limit for decompressing it, and
# the cost of each splice of its difference beyond the first. Measured by `python -m bench workload sizes`.
RECORD_COST_BYTES = 300
PAYLOAD_COST_BYTES_MAX = 1200
SPLICE_COST_BYTES = 150
# Below this size, the time to read a state is the time to find it, whatever its differences cost.
SMALL_BYTES = 16 * 1024


def difference_cost(stored_bytes: int, inserted_bytes: int, splices: int) -> int:
    """Return the cost that a difference adds to reading its chain."""
    decompressing = min(inserted_bytes * 11 // 10, PAYLOAD_COST_BYTES_MAX) if inserted_bytes > stored_bytes else 0
    return stored_bytes + RECORD_COST_BYTES + decompressing + SPLICE_COST_BYTES * max(0, splices - 1)


def keyframe_is_due(*, cost: int, size: int, key_size: int, branching: bool) -> bool:
    """Return whether a record with this cost and size should carry its full text.

    The first record of a branch may cost up to three times its own size, keyframe included. So many forks of one long
    chain do not each write a keyframe.
    """
    limit = min(2 * size, 3 * size - key_size) if branching else size
    return cost >= max(limit, SMALL_BYTES) or key_size > max(2 * size, SMALL_BYTES)
