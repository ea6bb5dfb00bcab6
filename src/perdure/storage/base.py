"""What every driver shares beyond the contract in `program.py`.

`ConstraintFailed` is how a database tells an operation that a uniqueness, a foreign key or a check did not hold. The
transaction was rolled back; the flow that asked for it decides whether that is a conflict or a race to run again. If it
reaches a user, as a `StoreError`, the store is damaged or this library has a defect.
"""

from __future__ import annotations

from typing import Literal

from perdure.errors import StoreError

ConstraintKind = Literal["unique", "foreign_key", "check", "not_null", "other"]


class ConstraintFailed(StoreError):
    """A constraint of the schema refused the transaction, which was rolled back."""

    def __init__(self, message: str, *, kind: ConstraintKind = "other") -> None:
        super().__init__(message)
        self.kind: ConstraintKind = kind
