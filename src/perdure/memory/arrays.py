"""numpy, for modules that hold and rank an index in memory. If it is missing, the import says which extra has it."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

from perdure.errors import ExtraMissing

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise ExtraMissing("a search", "search") from error

__all__ = ["Array", "large_array", "numpy"]

_HEAP_BYTES = 256 << 10
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

Array = NDArray[Any]


def large_array(shape: tuple[int, ...], kind: Any) -> Array:
    """Return an array of zeros. A large one is not on the heap, which would keep its memory after it is freed."""
    size = math.prod(shape) * numpy.dtype(kind).itemsize
    if size <= _HEAP_BYTES:
        return numpy.zeros(shape, kind)
    memory = mmap.mmap(-1, size, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # as numpy does
        with suppress(OSError):  # a kernel without huge pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return numpy.frombuffer(memory, kind).reshape(shape)
