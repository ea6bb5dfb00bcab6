-- Operating a store: cold bodies packed together, pins, what was erased, keys in use, copies made, how fast it grows.

-- The differences of up to 64 records of one chain, compressed together. A packed record has no row in body: its column
-- body holds the pack's number, negative.
CREATE TABLE pack (
    pack bigint GENERATED ALWAYS AS IDENTITY,
    tenant bigint NOT NULL,
    tree bigint NOT NULL,
    key bigint NOT NULL,           -- the keyframe of the chain, whose text is what the pack is compressed against
    first bigint NOT NULL,         -- the records in it: the oldest …
    last bigint NOT NULL,          -- … and the newest
    checksum bigint NOT NULL,      -- over data
    data bytea STORAGE EXTERNAL NOT NULL, -- see log/packs.py
    PRIMARY KEY (tenant, pack)
);
CREATE INDEX pack_chain ON pack (tenant, tree, key, first);

-- Checkpoints that no retention removes. Erasing does.
CREATE TABLE pin (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    name text NOT NULL,
    tree bigint NOT NULL,
    record bigint NOT NULL,
    at bigint NOT NULL,            -- microseconds since 1970
    PRIMARY KEY (tenant, thread, name)
);
CREATE INDEX pin_tree ON pin (tenant, tree);

-- What was erased: that it was there, and when it went. No name, no content.
CREATE TABLE erased (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    record bigint NOT NULL,        -- 0: the whole thread
    records bigint NOT NULL,       -- how many went
    head_hash bytea,
    at bigint NOT NULL,
    PRIMARY KEY (tenant, thread, record)
);

-- The keys that a tenant's data is encrypted with; never the keys themselves.
CREATE TABLE seal (
    tenant bigint NOT NULL,
    key bytea NOT NULL,              -- the key's id
    proof bytea NOT NULL,            -- a known text, encrypted with it: tells a wrong key from damage
    since bigint NOT NULL,
    retired_at bigint,             -- nothing is encrypted with it any more
    PRIMARY KEY (tenant, key)
);

-- Copies that hold data of this store: what erasing cannot reach, and what a restore was tried with.
CREATE TABLE copy (
    id text PRIMARY KEY,
    sort text NOT NULL,             -- backup, export
    place text NOT NULL,            -- where it was written, without secrets
    tenant bigint,                 -- NULL: the whole store
    at bigint NOT NULL,
    stamp bigint NOT NULL,         -- the point of the commit order that it shows
    bytes bigint NOT NULL,
    restored_at bigint             -- when it was last restored and found whole
);

-- How large the store was, once an hour at most: from these it is told how fast it grows.
CREATE TABLE size_sample (
    at bigint PRIMARY KEY,         -- microseconds since 1970
    bytes bigint NOT NULL,
    free_bytes bigint NOT NULL     -- inside the store, to be used again
);

-- What repair could not save, as it was: until it is written to a file for people.
CREATE TABLE quarantine (
    tenant bigint NOT NULL,
    sort text NOT NULL,             -- the table
    key text NOT NULL,              -- of the row, as JSON
    reason text NOT NULL,
    content text NOT NULL,          -- the row, as JSON; bytes in base 64
    PRIMARY KEY (tenant, sort, key)
);
