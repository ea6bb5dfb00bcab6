"""What a repair answers: what it mended, what is lost, and where the result and the lost rows are."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.threads.models import Report


@dataclass(frozen=True, slots=True)
class Mend:
    """One thing that a repair did, or could not do: to a thread, a checkpoint, a run, or the store."""

    tenant: str  # "": the store itself
    thread: str | None
    checkpoint: str | None
    run: str | None
    what: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.thread or self.run, self.checkpoint) if part)
        return f"{where or 'store'}: {self.what}"


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did. `ok`: nothing is lost, and nothing is wrong with the result."""

    place: str  # where the mended store is; the store itself if nothing was wrong, or it was mended in place
    in_place: bool
    mended: tuple[Mend, ...]
    lost: tuple[Mend, ...]
    quarantine: str | None  # a file with every row that was taken out of use, as JSON lines
    rows: int  # in that file
    report: Report  # of all tenants, after the repair
    seconds: float
    damaged: str | None = None  # in place: where the file is kept as it was
    left: tuple[str, ...] = ()  # tenants that were not looked at, because that was said

    @property
    def changed(self) -> bool:
        return bool(self.mended or self.lost)

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.lost
