"""Applying stored differences, as a load of a chain does."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.values import delta
from perdure.values.delta import Decoder
from perdure.values.dictionary import Dictionary
from perdure.values.limits import SIZE_MAX


def apply_all(old: bytes, diffs: Sequence[bytes], dictionary: Dictionary, *, size_max: int = SIZE_MAX) -> bytes:
    """The text after these differences."""
    return delta.apply_all(old, Decoder(dictionary, size_max).batches(diffs), size_max=size_max)
