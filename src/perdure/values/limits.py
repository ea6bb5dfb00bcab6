"""The limits on values, for saving and for loading.

Each is far above the needs of an agent's state. With them a mistake (a list that holds itself) or hostile text ends in
an error that names the limit, never in a crash. Only constants live here.
"""

from __future__ import annotations

from typing import Final

# Levels of nesting in the text. A list or a dict is one level, a tuple two (`{"^tuple":[…]}`), a dict with
# keys that are not text and an object three. The fast encoder stops at 254, the fast decoder at 1024.
DEPTH_MAX: Final = 200

# Bytes of one text. PostgreSQL's largest field is 1 GiB; half of that leaves room for the difference.
SIZE_MAX: Final = 512 * 1024 * 1024

# Bytes of any stored value after decompression: one text, with room for the numbers of its splices.
INFLATED_MAX: Final = SIZE_MAX + (64 << 20)

# Values in one text. More numbers than this belong in a numpy array, which counts as one.
NODES_MAX: Final = 8_000_000
