"""The tables of memory, as a domain (`storage/domains.py`)."""

from __future__ import annotations

from perdure.storage.domains import Domain, OwnedTable

TABLES = (
    OwnedTable(
        "memory_space",
        ("space",),
        ("path", "last", "generation", "items", "bytes", "policy"),
        looked_up=(("path",),),
    ),
    OwnedTable(
        "memory_item",
        ("id",),
        (
            *("space", "key", "version", "kind", "body", "words", "bytes", "pinned", "created_at", "at", "ended_at"),
            *("valid_from", "valid_to", "expires", "gone"),
        ),
        looked_up=(("space", "key"),),
        finds_changes=True,
    ),
    OwnedTable("memory_vector", ("id",), ("model", "vec")),
)
MEMORY = Domain("memory", TABLES)
