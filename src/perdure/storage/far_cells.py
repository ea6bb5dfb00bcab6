"""What stands in a column whose data was moved to an object store: a mark, where it is, how long, and its hash.

    mark 5 · head 11 · BLAKE3 32 · size 8 · name

`head` is what the data begins with: of a sealed cell it says which key opens it, without fetching it. Imports little:
this is also asked where a store has no object store at all.
"""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

from perdure.errors import Damaged, ObjectMissing

MARK = b"\xf5far\x01"  # no cell of ours, sealed or not, begins so
HEAD_BYTES = 11  # what a sealed cell begins with: says which key opens it, without fetching it
_DIGEST_AT = len(MARK) + HEAD_BYTES
_SIZE_AT = _DIGEST_AT + 32
_NAME_AT = _SIZE_AT + 8
START_BYTES = _NAME_AT


class Wanted(NamedTuple):
    """An object, and what it must be."""

    name: str
    size: int
    digest: bytes


def digest_of(data: bytes) -> bytes:
    return blake3(data).digest()


def far_cell(name: str, data: bytes) -> bytes:
    """What stands in the column instead of the data."""
    head = data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
    return MARK + head + digest_of(data) + len(data).to_bytes(8, "big") + name.encode()


def wanted_of(cell: bytes) -> Wanted:
    """Where the data of a cell is. Raises Damaged."""
    try:
        if len(cell) <= _NAME_AT:
            raise ValueError
        size = int.from_bytes(cell[_SIZE_AT:_NAME_AT], "big")
        return Wanted(cell[_NAME_AT:].decode("ascii"), size, cell[_DIGEST_AT:_SIZE_AT])
    except ValueError:
        raise Damaged("a cell that should say where its object is does not: run `perdure verify`") from None


def stored_size(start: bytes, length: int) -> int:
    """How many bytes a cell's data has, here or elsewhere, by the cell's beginning (START_BYTES) and its length."""
    return int.from_bytes(start[_SIZE_AT:_NAME_AT], "big") if start.startswith(MARK) else length


def is_far(value: object) -> bool:
    return type(value) is bytes and value.startswith(MARK)


def not_far(value: object) -> None:
    """Where a cell is not what it should be: is it because nobody said where the objects are? Raises ObjectMissing."""
    if type(value) is bytes and value.startswith(MARK):
        name = value[_NAME_AT:].decode("ascii", "replace")
        raise ObjectMissing(
            "this is in an object store, and the store was opened without it: open(url, objects=…), or --objects URL "
            f"or PERDURE_OBJECTS for the commands (object {name})",
            name=name,
        )
