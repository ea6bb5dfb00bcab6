-- The engine: tenants, threads, records and their bodies.
-- The tenant is the first column of every key. What is immutable and what is a cache of the log is said per table.

CREATE TABLE meta (
    key text PRIMARY KEY,
    value text NOT NULL
);

-- Tenant and thread numbers, which are never used twice.
CREATE SEQUENCE number;

CREATE TABLE tenant (
    tenant bigint PRIMARY KEY,
    name text NOT NULL UNIQUE
);

-- A named line of work. head, head_hash, updated_at and active are caches of the log.
-- fillfactor: every save updates the row in place, and no indexed column, so that PostgreSQL can do it within the page.
CREATE TABLE thread (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    tree bigint NOT NULL,
    name text NOT NULL,
    metadata text NOT NULL,
    origin bigint,
    generation bigint NOT NULL,
    head bigint,
    head_hash bytea,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    active bigint NOT NULL,
    retention text,
    stamp bigint NOT NULL,
    PRIMARY KEY (tenant, thread)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX thread_name ON thread (tenant, name);
CREATE INDEX thread_active ON thread (tenant, active);
CREATE INDEX thread_tree ON thread (tenant, tree);

-- One row per key of a thread's metadata, so that looking threads up by it is an index search.
CREATE TABLE tag (
    tenant bigint NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    thread bigint NOT NULL,
    PRIMARY KEY (tenant, key, value, thread)
);
CREATE INDEX tag_thread ON tag (tenant, thread);

-- The log. Immutable in meaning; thread, base, keyframe, key, cost, body and checksum are physical and may move.
CREATE TABLE record (
    tenant bigint NOT NULL,
    tree bigint NOT NULL,
    id bigint NOT NULL,
    thread bigint NOT NULL,
    parent bigint,
    base bigint,
    keyframe smallint NOT NULL,
    key bigint NOT NULL,
    kind text NOT NULL,
    at bigint NOT NULL,
    step bigint NOT NULL,
    note text,
    metadata text,
    size bigint NOT NULL,
    cost bigint NOT NULL,
    hash bytea NOT NULL,
    checksum bigint NOT NULL,
    body bigint,
    stamp bigint NOT NULL,
    PRIMARY KEY (tenant, tree, id)
);

-- Bodies are compressed already: store them as they are.
CREATE TABLE body (
    id bigint GENERATED ALWAYS AS IDENTITY,
    tenant bigint NOT NULL,
    salt bytea NOT NULL,
    checksum bigint NOT NULL,
    diff bytea STORAGE EXTERNAL,
    full_text bytea STORAGE EXTERNAL,
    PRIMARY KEY (tenant, id)
);

-- Deletions that are decided but not finished: a crash in the middle is taken up by whoever comes next.
CREATE TABLE sweep (
    tenant bigint NOT NULL,
    tree bigint NOT NULL,
    id bigint NOT NULL,
    PRIMARY KEY (tenant, tree, id)
);
