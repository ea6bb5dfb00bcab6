"""What the tests of sagas share: a trip that can be taken back."""

from __future__ import annotations

from typing import Any

from lab import Lab

import perdure


class Trip:
    """Effects of a lab with their undos; `did` is what was done, in order."""

    def __init__(self, lab: Lab, **undo_options: Any) -> None:
        self.did: list[str] = []
        did = self.did

        def cancel(what: str) -> None:
            did.append(f"-{what}")

        def book(what: str) -> str:
            did.append(f"+{what}")
            return f"booking of {what}"

        undo: Any = lab.body(cancel)
        if undo_options:
            undo = perdure.effect(name="cancel", **undo_options)(undo)
        self.cancel: Any = undo
        self.book: Any = lab.effect(name="book", undo=undo)(book)
