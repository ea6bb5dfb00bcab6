"""The tables of threads and of the log, as a domain (`storage/domains.py`)."""

from __future__ import annotations

from perdure.log.records import Record
from perdure.storage.domains import Domain, OwnedTable

TABLES = (
    OwnedTable(
        "thread",
        ("thread",),
        (
            *("tree", "name", "metadata", "origin", "generation", "head", "head_hash", "created_at", "updated_at"),
            *("active", "retention", "source"),
        ),
        looked_up=(("name",),),
        finds_changes=True,
        remembered="true",
    ),
    OwnedTable("tag", ("key", "value", "thread"), ()),
    OwnedTable("record", ("tree", "id"), Record._fields[2:]),
    OwnedTable("body", ("id",), ("salt", "diff", "full_text")),
    OwnedTable("space", ("thread", "name"), ("space", "head")),
    OwnedTable("label", ("thread", "space", "id"), ("record", "run"), finds_changes=True),
    OwnedTable("write", ("thread", "space", "id", "task", "idx"), ("key", "path", "base", "value"), finds_changes=True),
    OwnedTable("pin", ("thread", "name"), ("tree", "record", "at")),
    OwnedTable("archived", ("kind", "name"), ("place", "at")),
)
THREADS = Domain("threads", TABLES)
