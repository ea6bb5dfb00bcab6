-- Operating a store: cold bodies packed together, pins, what was erased, keys in use, copies made, how fast it grows.

-- The differences of up to 64 records of one chain, compressed together. A packed record has no row in body: its column
-- body holds the pack's number, negative.
CREATE TABLE pack (
    pack INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    tree INTEGER NOT NULL,
    key INTEGER NOT NULL,           -- the keyframe of the chain, whose text is what the pack is compressed against
    first INTEGER NOT NULL,         -- the records in it: the oldest …
    last INTEGER NOT NULL,          -- … and the newest
    checksum INTEGER NOT NULL,      -- over data
    data BLOB NOT NULL              -- see log/packs.py
);
CREATE INDEX pack_chain ON pack (tenant, tree, key, first);

-- Checkpoints that no retention removes. Erasing does.
CREATE TABLE pin (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    name TEXT NOT NULL,
    tree INTEGER NOT NULL,
    record INTEGER NOT NULL,
    at INTEGER NOT NULL,            -- microseconds since 1970
    PRIMARY KEY (tenant, thread, name)
) WITHOUT ROWID;
CREATE INDEX pin_tree ON pin (tenant, tree);

-- What was erased: that it was there, and when it went. No name, no content.
CREATE TABLE erased (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    record INTEGER NOT NULL,        -- 0: the whole thread
    records INTEGER NOT NULL,       -- how many went
    head_hash BLOB,
    at INTEGER NOT NULL,
    PRIMARY KEY (tenant, thread, record)
) WITHOUT ROWID;

-- The keys that a tenant's data is encrypted with; never the keys themselves.
CREATE TABLE seal (
    tenant INTEGER NOT NULL,
    key BLOB NOT NULL,              -- the key's id
    proof BLOB NOT NULL,            -- a known text, encrypted with it: tells a wrong key from damage
    since INTEGER NOT NULL,
    retired_at INTEGER,             -- nothing is encrypted with it any more
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;

-- Copies that hold data of this store: what erasing cannot reach, and what a restore was tried with.
CREATE TABLE copy (
    id TEXT PRIMARY KEY,
    sort TEXT NOT NULL,             -- backup, export
    place TEXT NOT NULL,            -- where it was written, without secrets
    tenant INTEGER,                 -- NULL: the whole store
    at INTEGER NOT NULL,
    stamp INTEGER NOT NULL,         -- the point of the commit order that it shows
    bytes INTEGER NOT NULL,
    restored_at INTEGER             -- when it was last restored and found whole
) WITHOUT ROWID;

-- How large the store was, once an hour at most: from these it is told how fast it grows.
CREATE TABLE size_sample (
    at INTEGER PRIMARY KEY,         -- microseconds since 1970
    bytes INTEGER NOT NULL,
    free_bytes INTEGER NOT NULL     -- inside the store, to be used again
);

-- What repair could not save, as it was: until it is written to a file for people.
CREATE TABLE quarantine (
    tenant INTEGER NOT NULL,
    sort TEXT NOT NULL,             -- the table
    key TEXT NOT NULL,              -- of the row, as JSON
    reason TEXT NOT NULL,
    content TEXT NOT NULL,          -- the row, as JSON; bytes in base 64
    PRIMARY KEY (tenant, sort, key)
) WITHOUT ROWID;
