"""The tables of threads and of the log, declared (`storage/domains.py`). Times are microseconds since 1970."""

from __future__ import annotations

from perdure.storage.domains import Column, Index, Table

# A named line of work. head, head_hash, updated_at and active are caches of the log.
THREAD = Table(
    "thread",
    (
        Column("thread", "int"),
        Column("tree", "int"),  # whose records it shares: its own number, or that of the thread it was forked from
        Column("name", "text"),
        Column("metadata", "text", encrypted=("thread",)),  # JSON; tag has the same, to search by
        Column("origin", "int", null=True),  # the record it was forked at
        # The thread it was forked from; if that is deleted, the one that it was forked from.
        Column("source", "int", null=True),
        Column("generation", "int"),  # grows when bases move under a writer's feet
        Column("head", "int", null=True),
        Column("head_hash", "bytes", null=True),
        Column("created_at", "int"),
        Column("updated_at", "int"),
        Column("active", "int"),  # updated_at in minutes: indexed without touching the index at every save
        Column("retention", "text", null=True),
        Column("owner", "text", null=True),  # the process that runs the thread's effects, or ran them last
    ),
    ("thread",),
    (
        Index("thread_name", "tenant, name", unique=True),
        Index("thread_active", "tenant, active"),
        Index("thread_tree", "tenant, tree"),
        Index("thread_source", "tenant, source", where="source IS NOT NULL"),
    ),
    owner="thread",
    unversioned=("owner",),
    looked_up=(("name",),),
    finds_changes=True,
    remembered="true",
    fillfactor=70,  # every save updates the row, and no indexed column: PostgreSQL can do that within the page
)
# One row per key of a thread's metadata, so that looking threads up by it is an index search.
TAG = Table(
    "tag",
    (
        Column("key", "text"),
        Column("value", "text", encrypted=("key",), searched=True),  # JSON
        Column("thread", "int"),
    ),
    ("key", "value", "thread"),
    (Index("tag_thread", "tenant, thread"),),
    owner="thread",
)
# The log. Immutable in meaning; thread, base, keyframe, key, cost and body are physical and may move.
RECORD = Table(
    "record",
    (
        Column("tree", "int"),
        Column("id", "int"),  # time-ordered and unique in the tree
        Column("thread", "int"),  # whose it is: it goes with that thread
        Column("parent", "int", null=True),  # history
        Column("base", "int", null=True),  # what the difference was made against
        Column("keyframe", "small"),  # 1: the body holds the full text
        Column("key", "int"),  # the keyframe that the chain of differences starts at (its own id for a keyframe)
        Column("kind", "text"),
        Column("at", "int"),
        Column("step", "int"),
        Column("note", "text", null=True, encrypted=("tree", "id")),
        Column("metadata", "text", null=True, encrypted=("tree", "id")),  # JSON
        Column("size", "int"),  # bytes of the state's text
        Column("cost", "int"),  # of reading the differences since the keyframe
        Column("hash", "bytes"),
        Column("body", "int", null=True),  # NULL: a tombstone, kept so that its children's hashes can be checked
    ),
    ("tree", "id"),
    # What a fork has written, among the records of all forks of one thread.
    (Index("record_of_fork", "tenant, thread, id", where="thread <> tree"),),
    owner="thread",
)
# Nothing identifies a body, since the database gives its number; the record's hash tells a swap.
BODY = Table(
    "body",
    (
        Column("id", "int", identity=True),
        Column("salt", "bytes", encrypted=()),  # of the content's hash; erased with the body
        Column("diff", "bytes", null=True, encrypted=(), compressed=True),
        Column("full_text", "bytes", null=True, encrypted=(), compressed=True),
    ),
    ("id",),
    layout="number",
)
# A namespace of a thread, as a small number. "" is 0 and has no row: its newest record is the thread's head.
SPACE = Table(
    "space",
    (
        Column("thread", "int"),
        Column("name", "text"),
        Column("space", "int"),
        Column("head", "int", null=True),  # a cache: the newest labelled record
    ),
    ("thread", "name"),
    owner="thread",
    moves=True,
)
# Which record an id stands for that a caller gave. Putting the id again points it at another record.
LABEL = Table(
    "label",
    (
        Column("thread", "int"),
        Column("space", "int"),
        Column("id", "bytes"),
        Column("record", "int"),
        Column("run", "bytes", null=True),  # the run that made it, if it said so
    ),
    ("thread", "space", "id"),
    (Index("label_run", "tenant, run", where="run IS NOT NULL"),),
    owner="thread",
    moves=True,
    finds_changes=True,
)
# What tasks have written on a labelled record, not yet part of a state. May come before the record, or too late.
WRITE = Table(
    "write",
    (
        Column("thread", "int"),
        Column("space", "int"),
        Column("id", "bytes"),
        Column("task", "bytes"),
        Column("idx", "int"),
        Column("key", "text"),
        Column("path", "text"),
        Column("base", "int", null=True),  # the record whose text the value was compressed against, if any
        # The text, perhaps compressed. Not identified by the thread: a fork's are copied as they are.
        Column("value", "bytes", encrypted=("space", "id", "task", "idx", "key", "path", "base"), hashed=True),
    ),
    ("thread", "space", "id", "task", "idx"),
    owner="thread",
    moves=True,
    finds_changes=True,
)
# Checkpoints that no retention removes. Erasing does.
PIN = Table(
    "pin",
    (
        Column("thread", "int"),
        Column("name", "text"),
        Column("tree", "int"),
        Column("record", "int"),
        Column("at", "int"),
    ),
    ("thread", "name"),
    (Index("pin_tree", "tenant, tree"),),
    owner="thread",
    moves=True,
)
# Threads and runs that were moved into a store file: where each is. Their names stay taken.
ARCHIVED = Table(
    "archived",
    (
        Column("kind", "text"),  # thread, run
        Column("name", "text"),
        Column("place", "text"),  # a path, or the URL of an object
        Column("at", "int"),
    ),
    ("kind", "name"),
)
# What was erased: that it was there, and when it went. No name, no content.
ERASED = Table(
    "erased",
    (
        Column("thread", "int"),
        Column("record", "int"),  # 0: the whole thread
        Column("records", "int"),  # how many went
        Column("head_hash", "bytes", null=True),
        Column("at", "int"),
    ),
    ("thread", "record"),
    versioned=False,
)
TABLES = (THREAD, TAG, RECORD, BODY, SPACE, LABEL, WRITE, PIN, ARCHIVED, ERASED)

# What statements name of encrypted columns.
NOTE, RECORD_METADATA = RECORD.encrypted("note"), RECORD.encrypted("metadata")
SALT, DIFF, FULL_TEXT = BODY.encrypted("salt"), BODY.encrypted("diff"), BODY.encrypted("full_text")
WRITE_VALUE = WRITE.encrypted("value")
THREAD_METADATA, TAG_VALUE = THREAD.encrypted("metadata"), TAG.encrypted("value")
