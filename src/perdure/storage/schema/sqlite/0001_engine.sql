-- The engine: tenants, threads, records and their bodies.
-- The tenant is the first column of every key. What is immutable and what is a cache of the log is said per table.

-- The store's id.
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- The commit counter (stamp) and the source of thread and tenant numbers, which are never used twice.
CREATE TABLE clock (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    stamp INTEGER NOT NULL,
    number INTEGER NOT NULL
);
INSERT INTO clock (one, stamp, number) VALUES (1, 0, 0);

CREATE TABLE tenant (
    tenant INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);

-- A named line of work. head, head_hash, updated_at and active are caches of the log.
CREATE TABLE thread (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    tree INTEGER NOT NULL,          -- whose records it shares: its own number, or that of the thread it was forked from
    name TEXT NOT NULL,
    metadata TEXT NOT NULL,         -- JSON
    origin INTEGER,                 -- the record it was forked at
    generation INTEGER NOT NULL,    -- grows when bases move under a writer's feet
    head INTEGER,
    head_hash BLOB,
    created_at INTEGER NOT NULL,    -- microseconds since 1970
    updated_at INTEGER NOT NULL,
    active INTEGER NOT NULL,        -- updated_at in minutes: indexed without touching the index at every save
    retention TEXT,
    stamp INTEGER NOT NULL,
    PRIMARY KEY (tenant, thread)
) WITHOUT ROWID;
CREATE UNIQUE INDEX thread_name ON thread (tenant, name);
CREATE INDEX thread_active ON thread (tenant, active);
CREATE INDEX thread_tree ON thread (tenant, tree);

-- One row per key of a thread's metadata, so that looking threads up by it is an index search.
CREATE TABLE tag (
    tenant INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,            -- JSON
    thread INTEGER NOT NULL,
    PRIMARY KEY (tenant, key, value, thread)
) WITHOUT ROWID;
CREATE INDEX tag_thread ON tag (tenant, thread);

-- The log. Immutable in meaning; thread, base, keyframe, key, cost, body and checksum are physical and may move.
CREATE TABLE record (
    tenant INTEGER NOT NULL,
    tree INTEGER NOT NULL,
    id INTEGER NOT NULL,            -- time-ordered and unique in the tree
    thread INTEGER NOT NULL,        -- whose it is: it goes with that thread
    parent INTEGER,                 -- history
    base INTEGER,                   -- what the difference was made against
    keyframe INTEGER NOT NULL,      -- 1: the body holds the full text
    key INTEGER NOT NULL,           -- the keyframe that the chain of differences starts at (its own id for a keyframe)
    kind TEXT NOT NULL,
    at INTEGER NOT NULL,            -- microseconds since 1970
    step INTEGER NOT NULL,
    note TEXT,
    metadata TEXT,                  -- JSON
    size INTEGER NOT NULL,          -- bytes of the state's text
    cost INTEGER NOT NULL,          -- of reading the differences since the keyframe
    hash BLOB NOT NULL,
    checksum INTEGER NOT NULL,      -- over the columns of this row
    body INTEGER,                   -- NULL: a tombstone, kept so that its children's hashes can be checked
    stamp INTEGER NOT NULL,
    PRIMARY KEY (tenant, tree, id)
) WITHOUT ROWID;

CREATE TABLE body (
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    salt BLOB NOT NULL,             -- of the content's hash; erased with the body
    checksum INTEGER NOT NULL,      -- over salt, diff and full_text
    diff BLOB,
    full_text BLOB
);

-- Deletions that are decided but not finished: a crash in the middle is taken up by whoever comes next.
CREATE TABLE sweep (
    tenant INTEGER NOT NULL,
    tree INTEGER NOT NULL,
    id INTEGER NOT NULL,            -- the record to remove; 0: whatever in the tree no thread needs
    PRIMARY KEY (tenant, tree, id)
) WITHOUT ROWID;
