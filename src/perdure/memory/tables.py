"""The tables of memory (`storage/domains.py`): namespaces, versions of items, their vectors, stored indexes."""

from __future__ import annotations

from perdure.storage.domains import Column, Index, Table

# A namespace. Its number comes from the counter and is never used again.
MEMORY_SPACE = Table(
    "memory_space",
    (
        Column("space", "int"),
        Column("path", "ordered"),  # its labels, each ended by \x01\x01: see labels.py
        Column("last", "int"),  # the newest sequence number of its versions: an index reads only newer ones
        Column("generation", "int"),  # grows when rows are removed or embedded again: indexes are then rebuilt
        Column("items", "int"),  # items that are there and not pinned, …
        Column("bytes", "int"),  # … and the bytes of their bodies: caches of memory_item
        Column("policy", "text", null=True),  # JSON: caps, ttl, history; NULL: that of the nearest namespace above
        Column("merged", "text", null=True),  # JSON: how far other stores' namespaces were merged here (merging.py)
    ),
    ("space",),
    (Index("memory_space_path", "tenant, path", unique=True),),
    looked_up=(("path",),),
    fillfactor=70,  # every put updates the row in place
)
# One version of an item; a deletion is a version with a reason in gone. Only ended_at (set once) and expires (which
# reads may move) ever change. So the hash covers every other column that describes the version.
MEMORY_ITEM = Table(
    "memory_item",
    (
        Column("id", "int"),  # space << 32 | sequence number: a namespace's rows are adjacent and in order
        Column("space", "int"),
        Column("key", "ordered"),
        Column("version", "int"),  # 1, 2, … of this key
        Column("kind", "text"),  # semantic, episodic, procedural, or the caller's
        Column(  # MessagePack: see rows.py
            "body",
            "bytes",
            encrypted=("id", "key", "version", "kind", "pinned", "created_at", "at", "valid_from", "valid_to", "gone"),
            hashed=True,
        ),
        Column("words", "bytes", null=True, encrypted=("id",), compressed=True),  # terms and counts: see words.py
        Column("bytes", "int"),
        Column("pinned", "int"),
        Column("created_at", "int"),  # of the first version since the key was free; microseconds since 1970
        Column("at", "int"),  # learned
        Column("ended_at", "int", null=True),  # replaced or deleted; NULL: the newest of its key
        Column("valid_from", "int", null=True),  # when the fact holds, if that differs from when it was learned
        Column("valid_to", "int", null=True),
        Column("expires", "int", null=True),
        Column("gone", "text", null=True),  # NULL: an item; else why there is none: deleted, cap, expired, …
    ),
    ("id",),
    (
        Index("memory_item_version", "tenant, space, key, version", unique=True),
        Index("memory_item_ended", "tenant, ended_at", where="ended_at IS NOT NULL"),
        Index("memory_item_expires", "tenant, expires", where="expires IS NOT NULL"),
    ),
    looked_up=(("space", "key"),),
    finds_changes=True,
    layout="number",
)
# The vector of a version by one model. It has its own table: embedding again replaces it, and listing never reads it.
MEMORY_VECTOR = Table(
    "memory_vector",
    (
        Column("id", "int"),  # of the version
        Column("model", "text"),
        Column("vec", "bytes", encrypted=("id",), compressed=True),  # float16, little-endian, of length 1
    ),
    ("id",),
    layout="number",
)
# A part of the index of a large namespace, for processes that search it first (`stored_indexes.py`).
MEMORY_INDEX = Table(
    "memory_index",
    (
        Column("space", "int"),
        Column("model", "text"),  # and the analyzer
        Column("number", "int"),
        Column("until", "int"),  # the newest number that it covers, …
        Column("at", "int"),  # … when that was learned, …
        Column("generation", "int"),  # … and the generation of the namespace
        Column("digest", "bytes"),  # BLAKE3 of all parts
        Column("body", "bytes", encrypted=("space", "model", "number"), compressed=True),
    ),
    ("space", "model", "number"),
    copied=False,
    versioned=False,
    volatile=True,
)
ITEM, ITEM_WORDS = MEMORY_ITEM.encrypted("body"), MEMORY_ITEM.encrypted("words")
ITEM_VECTOR, INDEX_PART = MEMORY_VECTOR.encrypted("vec"), MEMORY_INDEX.encrypted("body")
TABLES = (MEMORY_SPACE, MEMORY_ITEM, MEMORY_VECTOR, MEMORY_INDEX)
