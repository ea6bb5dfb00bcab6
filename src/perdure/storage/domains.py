"""A domain owns its tables: what scans a whole store (retention, erasing, repair) asks the domains, not their tables.

The module of a domain's part of the store registers it (`threads/store.py`, `runs/store.py`). No SQL of a lower layer
names a table of an upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from perdure.storage.program import Flow, Program


class OwnedTable(NamedTuple):
    """What a domain declares of a table that has a column `tenant`. Past tables, triggers and views of snapshots
    (`versions.py`), transfers, erasing, verifying and repair are derived from it."""

    name: str
    key: tuple[str, ...]  # the primary key, without the tenant
    rest: tuple[str, ...]  # the other columns that snapshots and copies have
    looked_up: tuple[tuple[str, ...], ...] = ()  # by further columns: the past has an index on each
    finds_changes: bool = False  # a difference between snapshots starts from it: an index on the stamp
    # A condition on `{row}`: deleted rows that meet it stay in the past as long as any snapshot is kept, though none
    # shows them. A restore asks them what has happened since.
    remembered: str = "false"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.rest


@dataclass(frozen=True, slots=True)
class Domain:
    """The tables of one subject, and what others may ask of them. A hook that is None has nothing to say."""

    name: str
    tables: tuple[OwnedTable, ...]
    # The oldest record that open work needs of each thread, by its name: retention keeps that and all after it.
    held_threads: Callable[[int], Flow[dict[str, int]]] | None = None
    # The threads of a tree (tenant, tree) that open work is using: asked inside the transaction that would remove them.
    busy_threads: Callable[[int, int], Program[set[int]]] | None = None
    # Threads whose names begin so belong to the domain: retention leaves them to it.
    thread_prefix: str = ""
    # Remove what belongs to a thread (tenant, number) that was deleted. How many rows of the domain's main table.
    thread_deleted: Callable[[int, int], Flow[int]] | None = None


_domains: dict[str, Domain] = {}


def register(domain: Domain) -> None:
    """Add a domain; the same again replaces it."""
    _domains[domain.name] = domain


def domains() -> tuple[Domain, ...]:
    """All domains, the lowest layer first."""
    return tuple(_domains.values())


def owned_tables() -> dict[str, OwnedTable]:
    """The tables of all domains by name."""
    return {table.name: table for domain in _domains.values() for table in domain.tables}
