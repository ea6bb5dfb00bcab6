"""Declarations of the tables of threads and the log (`storage/domains.py`). Times are microseconds since 1970."""

from __future__ import annotations

from perdure.storage.domains import Column, Index, Table

# A named line of checkpoints. head, head_hash, updated_at and active are caches of the log.
THREAD = Table(
    "thread",
    (
        Column("thread", "int"),
        Column("tree", "int"),  # its own number; for a fork, the tree of the thread it was forked from
        Column("name", "ordered"),
        Column("metadata", "text", encrypted=("thread",)),  # JSON; table tag has the same data, to search by
        Column("origin", "int", null=True),  # the record it was forked at
        # The thread it was forked from. If that is deleted, that thread's source.
        Column("source", "int", null=True),
        Column("generation", "int"),  # grows when bases move: differences that writers have prepared are then refused
        Column("head", "int", null=True),
        Column("head_hash", "bytes", null=True),
        Column("created_at", "int"),
        Column("updated_at", "int"),
        Column("active", "int"),  # updated_at in minutes, so that its index is not written at every save
        Column("retention", "text", null=True),
        Column("owner", "text", null=True),  # the process that runs the thread's effects, or ran them last
        Column("autosave", "text", null=True),  # JSON: what adaptive autosave has measured (threads/failures.py)
        # When a task has attached a question, and to which id (`task_questions.py`). NULL: the newest id has none.
        Column("asked_at", "int", null=True),
        Column("asked_id", "bytes", null=True),
    ),
    ("thread",),
    (
        Index("thread_name", "tenant, name", unique=True),
        Index("thread_active", "tenant, active"),
        Index("thread_tree", "tenant, tree"),
        Index("thread_source", "tenant, source", where="source IS NOT NULL"),
        Index("thread_asked", "tenant, asked_at, thread", where="asked_at IS NOT NULL"),
    ),
    owner="thread",
    unversioned=("owner", "autosave"),
    looked_up=(("name",),),
    finds_changes=True,
    remembered="true",
    fillfactor=70,  # saves update the row but no indexed column: PostgreSQL then stays within the page (HOT)
)
# One row per key of a thread's metadata, so that finding threads by metadata is an index search.
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
# The log. A record's meaning never changes. thread, base, keyframe, key, cost, skip and body are physical and may.
RECORD = Table(
    "record",
    (
        Column("tree", "int"),
        Column("id", "int"),  # time-ordered and unique in the tree
        Column("thread", "int"),  # the thread that owns it: it is deleted with that thread
        Column("parent", "int", null=True),  # the record before it in the history
        Column("base", "int", null=True),  # the record that the difference was made against
        Column("keyframe", "small"),  # 1: the body holds the full text
        Column("key", "int"),  # the keyframe that the chain of differences starts at (its own id for a keyframe)
        Column("kind", "text"),
        Column("at", "int"),
        Column("step", "int"),
        Column("note", "text", null=True, encrypted=("tree", "id")),
        Column("metadata", "text", null=True, encrypted=("tree", "id")),  # JSON
        Column("size", "int"),  # bytes of the state's text
        Column("cost", "int"),  # the cost of reading the differences since the keyframe
        Column("hash", "bytes"),
        Column("skip", "int", null=True),  # an ancestor far behind, of some records only: `log/ancestors.py`
        Column("body", "int", null=True),  # NULL: a tombstone, kept so that its children's hashes can be checked
    ),
    ("tree", "id"),
    # Finds the records that a fork has written among those of its tree.
    (Index("record_of_fork", "tenant, thread, id", where="thread <> tree"),),
    owner="thread",
)
# A body's encryption is bound to no column, because the database assigns its number. The record's hash detects a swap.
BODY = Table(
    "body",
    (
        Column("id", "int", identity=True),
        Column("salt", "bytes", encrypted=()),  # for the content's hash; erased with the body
        Column("diff", "bytes", null=True, encrypted=(), compressed=True),
        Column("full_text", "bytes", null=True, encrypted=(), compressed=True),
    ),
    ("id",),
    layout="number",
)
# The namespaces of a thread, with their numbers. "" is 0 and has no row: its newest record is the thread's head.
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
# The record that a caller's id points at. Putting the id again points it at another record.
LABEL = Table(
    "label",
    (
        Column("thread", "int"),
        Column("space", "int"),
        Column("id", "bytes"),
        Column("record", "int"),
        Column("run", "bytes", null=True),  # the run that made it, if known
    ),
    ("thread", "space", "id"),
    (Index("label_run", "tenant, run", where="run IS NOT NULL"),),
    owner="thread",
    moves=True,
    finds_changes=True,
)
# Pending writes: outputs of tasks, attached to a labelled record. They may arrive before the record, or too late.
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
        # The text, perhaps compressed. Its encryption is not bound to the thread, because a fork copies the bytes.
        Column("value", "bytes", encrypted=("space", "id", "task", "idx", "key", "path", "base"), hashed=True),
    ),
    ("thread", "space", "id", "task", "idx"),
    owner="thread",
    moves=True,
    finds_changes=True,
)
# Checkpoints that no retention removes. Only erasing does.
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
# The places of threads and runs that were moved to another store file. Their names stay reserved.
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
# A record of each erasure, without name or content.
ERASED = Table(
    "erased",
    (
        Column("thread", "int"),
        Column("record", "int"),  # 0: the whole thread
        Column("records", "int"),  # how many were removed
        Column("head_hash", "bytes", null=True),
        Column("at", "int"),
    ),
    ("thread", "record"),
    versioned=False,
)
# Until when something was there that was deleted since: the store cannot show an earlier instant (`removals.py`).
REMOVAL = Table(
    "removal",
    (Column("kind", "text"), Column("until_at", "int")),  # kind: thread, run, memory_item
    ("kind", "until_at"),
    few_rows=True,
)
# Large values of states, each stored once per tenant as an object of another place (threads/externals.py). A value that
# nothing refers to is retired: a save that needs it again adds another row and object.
EXTERNAL = Table(
    "external",
    (
        Column("name", "text"),  # of the object; never used again
        Column("hash", "bytes"),
        Column("bytes", "int"),
        Column("at", "int"),  # when a save wanted it last
        Column("is_written", "int"),  # 1: its object is written
        Column("gone_at", "int", null=True),  # when it was retired
    ),
    ("name",),
    (Index("external_hash", "tenant, hash", unique=True, where="gone_at IS NULL"),),
    versioned=False,
)
# Which values a tree's records, and the writes on them, refer to: some of those from `first` to `last`.
EXTERNAL_USE = Table(
    "external_use",
    (Column("tree", "int"), Column("hash", "bytes"), Column("first", "int"), Column("last", "int")),
    ("tree", "hash"),
    (Index("external_use_hash", "tenant, hash"),),
    versioned=False,
    holds_values=True,
)
TABLES = (THREAD, TAG, RECORD, BODY, SPACE, LABEL, WRITE, PIN, ARCHIVED, ERASED, REMOVAL, EXTERNAL, EXTERNAL_USE)

# The encrypted columns, for statements that read or write them.
SALT, DIFF, FULL_TEXT = BODY.encrypted("salt"), BODY.encrypted("diff"), BODY.encrypted("full_text")
WRITE_VALUE = WRITE.encrypted("value")
THREAD_METADATA, TAG_VALUE = THREAD.encrypted("metadata"), TAG.encrypted("value")
