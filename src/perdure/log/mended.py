"""What a repair did, as the log sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

Notes = list[tuple[str, int | None, str]]  # a thread's name, which record (None: the thread itself, the store), what


@dataclass
class Done:
    """What was mended, and what was lost."""

    mended: Notes = field(default_factory=list)
    lost: Notes = field(default_factory=list)
    trees: int = 0

    def add(self, other: Done) -> None:
        self.mended += other.mended
        self.lost += other.lost
        self.trees += other.trees
