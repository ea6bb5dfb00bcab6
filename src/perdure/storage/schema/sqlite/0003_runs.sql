-- Durable runs: executions of functions, their journals, and whom and what they wait for.

-- One execution. What it is (id, function, version, args, incarnation, parent, origin) stands; the rest is where it is now.
CREATE TABLE run (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    id TEXT NOT NULL,               -- the caller's
    function TEXT NOT NULL,
    version TEXT NOT NULL,
    input BLOB NOT NULL,            -- their digest: the same id must come with the same arguments
    incarnation BLOB NOT NULL,      -- random: what idempotency keys are made from
    parent INTEGER,                 -- the run that started it, and the path of the call
    parent_path TEXT,
    root INTEGER NOT NULL,          -- the run at the top of the family
    origin INTEGER,                 -- a fork: the run whose journal it shares, after origin_since, up to origin_seq …
    origin_since INTEGER NOT NULL,
    origin_seq INTEGER NOT NULL,
    origin_entries INTEGER NOT NULL, -- … and what that part adds up to
    origin_digest INTEGER NOT NULL,
    status TEXT NOT NULL,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    owner TEXT,                     -- whose it is while it runs
    fence INTEGER NOT NULL,         -- grows with each owner; who has an older one cannot write
    lease_until INTEGER NOT NULL,   -- microseconds since 1970
    wake_at INTEGER NOT NULL,       -- queued or waiting: not before
    nudged INTEGER NOT NULL,        -- 1: something it may wait for came while it ran
    request TEXT,                   -- what an operator wants: cancel, pause, rollback
    waiting TEXT,                   -- JSON: what it waits for, for people
    entries INTEGER NOT NULL,       -- how many journal rows, …
    digest INTEGER NOT NULL,        -- … and the sum of their hashes
    seq INTEGER NOT NULL,           -- the greatest number in the journal
    since INTEGER NOT NULL,         -- continue_as_new: rows up to this number are of an earlier round
    created_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,    -- of the status
    keep_until INTEGER,             -- finished: when its journal may go; NULL: never by itself
    stamp INTEGER NOT NULL,
    PRIMARY KEY (tenant, run)
) WITHOUT ROWID;
CREATE UNIQUE INDEX run_id ON run (tenant, id);
-- Two, because a store may hold very many runs that wait for people: what is due must be found without passing them.
CREATE INDEX run_queued ON run (queue, priority DESC, wake_at, run) WHERE status = 'queued';
CREATE INDEX run_waiting ON run (queue, wake_at) WHERE status = 'waiting';
CREATE INDEX run_running ON run (owner) WHERE status = 'running';
CREATE INDEX run_root ON run (tenant, root);
CREATE INDEX run_listed ON run (tenant, status, run);
CREATE INDEX run_origin ON run (tenant, origin) WHERE origin IS NOT NULL;
CREATE INDEX run_kept ON run (tenant, keep_until) WHERE keep_until IS NOT NULL;

-- A run's arguments and its outcome: apart from the row, which every step writes again.
CREATE TABLE run_value (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    sort TEXT NOT NULL,               -- args, outcome
    value BLOB NOT NULL,
    PRIMARY KEY (tenant, run, sort)
) WITHOUT ROWID;

-- What happened, in the order it was written down. Never changed.
CREATE TABLE journal (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    body BLOB NOT NULL,             -- MessagePack: see runs/entries.py
    stamp INTEGER NOT NULL,
    PRIMARY KEY (tenant, run, seq)
) WITHOUT ROWID;

-- Questions to people. The answer that counts is in the journal; these rows are how it gets there.
CREATE TABLE ask (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    path TEXT NOT NULL,
    sort TEXT NOT NULL,             -- question, approval, doubt
    question TEXT NOT NULL,
    terms TEXT NOT NULL,            -- JSON: options, schema, approvers, quorum …
    asked_at INTEGER NOT NULL,
    deadline INTEGER,
    status TEXT NOT NULL,           -- open, answered, closed
    answer BLOB,                    -- text of the value that counts
    PRIMARY KEY (tenant, run, path)
) WITHOUT ROWID;
CREATE INDEX ask_open ON ask (tenant, asked_at) WHERE status = 'open';

CREATE TABLE answer (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    path TEXT NOT NULL,
    who TEXT NOT NULL,
    value BLOB NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (tenant, run, path, who)
) WITHOUT ROWID;

-- Messages to runs, until they are received.
CREATE TABLE signal (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    topic TEXT NOT NULL,
    seq INTEGER NOT NULL,
    key TEXT NOT NULL,              -- the sender's: the same message twice is one
    value BLOB NOT NULL,
    at INTEGER NOT NULL,
    received INTEGER NOT NULL,      -- 1: in the journal
    PRIMARY KEY (tenant, run, topic, seq)
) WITHOUT ROWID;
CREATE UNIQUE INDEX signal_key ON signal (tenant, run, key);

-- What a queue allows; a token bucket for its rate.
CREATE TABLE queue (
    queue TEXT PRIMARY KEY,
    concurrency INTEGER,
    tenant_concurrency INTEGER,
    rate REAL,                      -- starts per second
    burst REAL,
    tokens REAL NOT NULL,
    filled_at INTEGER NOT NULL
) WITHOUT ROWID;

-- Large results, once per tenant, and who refers to them.
CREATE TABLE blob (
    tenant INTEGER NOT NULL,
    hash BLOB NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (tenant, hash)
);
CREATE TABLE run_blob (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    hash BLOB NOT NULL,
    PRIMARY KEY (tenant, run, hash),
    FOREIGN KEY (tenant, hash) REFERENCES blob (tenant, hash)
) WITHOUT ROWID;
CREATE INDEX run_blob_hash ON run_blob (tenant, hash);
