"""numpy, for modules that hold and rank an index in memory. If it is missing, the import says which extra has it."""

from __future__ import annotations

from typing import Any

from perdure.errors import ExtraMissing

try:
    import numpy
    from numpy.typing import NDArray
except ImportError as error:
    raise ExtraMissing("a search", "search") from error

__all__ = ["Array", "numpy"]

Array = NDArray[Any]
