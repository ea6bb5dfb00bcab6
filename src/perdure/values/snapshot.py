"""A copy of a value at one moment, though other threads change it.

Encoding looks at a value twice: at its types, then at its parts. What changes in between would be stored as something
that never was: a tuple as a list, a NaN as None. `marshal` copies built-in types exactly, in one call that runs no
Python code, so that no other thread gets the interpreter's lock meanwhile. What other types hold cannot be copied so.
"""

from __future__ import annotations

import gc
import marshal
from typing import Any, Final

from perdure.values.gc_pause import collector_pause

_CONTAINERS: Final = frozenset({list, dict, tuple, set, frozenset})


class Moving(Exception):
    """The value has a part that cannot be copied in one call."""


def still(value: Any) -> Any:
    """A copy of a value as it is now; but what has a buffer (a bytearray, an array) becomes bytes. Raises Moving."""
    try:
        with collector_pause:  # a collection calls Python code: another thread would add to a set that is being copied
            return marshal.loads(marshal.dumps(value))
    except ValueError:  # another type, or nested too deeply
        raise Moving from None


def holds_bytes(copy: Any) -> bool:
    """Whether a copy may not be exact."""
    level, seen = [copy], {id(copy)}
    while level:
        if bytes in set(map(type, level)):
            return True
        inner = gc.get_referents(*(one for one in level if type(one) in _CONTAINERS))
        # A list that holds itself, or is held twice, is looked at once.
        level = [one for one in {id(one): one for one in inner}.values() if id(one) not in seen]
        seen.update(map(id, level))
    return False
