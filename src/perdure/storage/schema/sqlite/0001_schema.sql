-- The engine: tenants, threads, records and their bodies.
-- The tenant is the first column of every key. What is immutable and what is a cache of the log is said per table.

-- The store's id.
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- The source of thread, run and tenant numbers, which are never used twice.
CREATE TABLE counter (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    number INTEGER NOT NULL
);
INSERT INTO counter (one, number) VALUES (1, 0);

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
    source INTEGER,                 -- the thread it was forked from; if that is deleted, the one that it was forked from
    generation INTEGER NOT NULL,    -- grows when bases move under a writer's feet
    head INTEGER,
    head_hash BLOB,
    created_at INTEGER NOT NULL,    -- microseconds since 1970
    updated_at INTEGER NOT NULL,
    active INTEGER NOT NULL,        -- updated_at in minutes: indexed without touching the index at every save
    retention TEXT,
    owner TEXT,                     -- the process that runs the thread's effects, or ran them last; one at a time
    PRIMARY KEY (tenant, thread)
) WITHOUT ROWID;
CREATE UNIQUE INDEX thread_name ON thread (tenant, name);
CREATE INDEX thread_active ON thread (tenant, active);
CREATE INDEX thread_tree ON thread (tenant, tree);
CREATE INDEX thread_source ON thread (tenant, source) WHERE source IS NOT NULL;

-- One row per key of a thread's metadata, so that looking threads up by it is an index search.
CREATE TABLE tag (
    tenant INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,            -- JSON
    thread INTEGER NOT NULL,
    PRIMARY KEY (tenant, key, value, thread)
) WITHOUT ROWID;
CREATE INDEX tag_thread ON tag (tenant, thread);

-- The log. Immutable in meaning; thread, base, keyframe, key, cost and body are physical and may move.
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
    body INTEGER,                   -- NULL: a tombstone, kept so that its children's hashes can be checked
    PRIMARY KEY (tenant, tree, id)
) WITHOUT ROWID;
-- What a fork has written, among the records of all forks of one thread.
CREATE INDEX record_of_fork ON record (tenant, thread, id) WHERE thread <> tree;

CREATE TABLE body (
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    salt BLOB NOT NULL,             -- of the content's hash; erased with the body
    diff BLOB,
    full_text BLOB
);

-- Ids that a caller gives its records (LangGraph's checkpoints), in namespaces, and writes that are pending on them.

-- A namespace of a thread, as a small number. "" is 0 and has no row: its newest record is the thread's head.
CREATE TABLE space (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    name TEXT NOT NULL,
    space INTEGER NOT NULL,
    head INTEGER,                   -- a cache: the newest labelled record
    PRIMARY KEY (tenant, thread, name)
) WITHOUT ROWID;

-- Which record an id stands for. Putting an id again points it at another record.
CREATE TABLE label (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    space INTEGER NOT NULL,
    id BLOB NOT NULL,
    record INTEGER NOT NULL,
    run BLOB,                       -- the run that made it, if it said so
    PRIMARY KEY (tenant, thread, space, id)
) WITHOUT ROWID;
CREATE INDEX label_run ON label (tenant, run) WHERE run IS NOT NULL;

-- What tasks have written on a labelled record, not yet part of a state. May come before the record, or too late.
CREATE TABLE write (
    tenant INTEGER NOT NULL,
    thread INTEGER NOT NULL,
    space INTEGER NOT NULL,
    id BLOB NOT NULL,
    task BLOB NOT NULL,
    idx INTEGER NOT NULL,
    key TEXT NOT NULL,
    path TEXT NOT NULL,
    base INTEGER,                   -- the record whose text the value was compressed against, if any
    value BLOB NOT NULL,            -- a checksum over this row's meaning, then the text, perhaps compressed
    PRIMARY KEY (tenant, thread, space, id, task, idx)
) WITHOUT ROWID;

-- Durable runs: executions of functions, their journals, and what they wait for.

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
    origin INTEGER,                 -- a fork: the run whose journal it shares …
    origin_seq INTEGER NOT NULL,    -- … up to this number; what counts of it is in its first own entry
    status TEXT NOT NULL,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    owner TEXT,                     -- whose it is while it runs
    fence INTEGER NOT NULL,         -- grows with each owner; who has an older one cannot write
    lease_until INTEGER NOT NULL,   -- microseconds since 1970
    wake_at INTEGER NOT NULL,       -- queued or waiting: not before
    wakeup_pending INTEGER NOT NULL,        -- 1: something it may wait for came while it ran
    request TEXT,                   -- what an operator wants: cancel, pause, undo
    waiting TEXT,                   -- JSON: what it waits for, for people
    entries INTEGER NOT NULL,       -- how many journal rows, …
    digest INTEGER NOT NULL,        -- … and the sum of their hashes
    seq INTEGER NOT NULL,           -- the greatest number in the journal
    since INTEGER NOT NULL,         -- continue_as_new: rows up to this number are of an earlier round
    created_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,    -- of the status
    keep_until INTEGER,             -- finished: when its journal may go; NULL: never by itself
    cut INTEGER NOT NULL,           -- a promoted replica: journal rows from this number on may have been lost; 0: none
    bucket INTEGER,                 -- random, of 10,000: a deployment chose the version by it; NULL: none did
    PRIMARY KEY (tenant, run)
) WITHOUT ROWID;
CREATE UNIQUE INDEX run_id ON run (tenant, id);
-- Two, because a store may hold very many runs that wait for people: what is due must be found without passing them.
CREATE INDEX run_queued ON run (queue, priority DESC, wake_at, run) WHERE status = 'queued';
CREATE INDEX run_waiting ON run (queue, wake_at) WHERE status = 'waiting';
CREATE INDEX run_running ON run (owner) WHERE status = 'running';
CREATE INDEX run_root ON run (tenant, root);
-- Open work of a process in a thread: looked up when another process wants to write to the thread.
CREATE INDEX run_open ON run (tenant, root) WHERE status = 'running';
CREATE INDEX run_listed ON run (tenant, status, run);
CREATE INDEX run_origin ON run (tenant, origin) WHERE origin IS NOT NULL;
CREATE INDEX run_kept ON run (tenant, keep_until) WHERE keep_until IS NOT NULL;

-- A run's arguments and its outcome: apart from the row, which every step writes again.
CREATE TABLE run_value (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    kind TEXT NOT NULL,               -- args, outcome
    value BLOB NOT NULL,
    PRIMARY KEY (tenant, run, kind)
) WITHOUT ROWID;

-- What happened, in the order it was written down. Never changed.
CREATE TABLE journal (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    body BLOB NOT NULL,             -- MessagePack: see runs/journal/entries.py
    PRIMARY KEY (tenant, run, seq)
) WITHOUT ROWID;

-- Questions to people. The answer that counts is in the journal; these rows are how it gets there.
CREATE TABLE ask (
    tenant INTEGER NOT NULL,
    run INTEGER NOT NULL,
    path TEXT NOT NULL,
    kind TEXT NOT NULL,             -- question, approval, doubt
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

-- Which version of a function new runs get, and which share of them the next one gets first.
CREATE TABLE deployment (
    tenant INTEGER NOT NULL,
    function TEXT NOT NULL,
    version TEXT NOT NULL,
    canary TEXT,                    -- the version that is being tried
    share INTEGER NOT NULL,         -- how many runs of 10,000 get it
    since INTEGER NOT NULL,         -- microseconds since 1970 …
    run_after INTEGER NOT NULL,     -- … and a number below those of the runs since
    reverted TEXT,                  -- why the last canary was reverted
    PRIMARY KEY (tenant, function)
) WITHOUT ROWID;

-- What a queue allows; a token bucket for its rate.
CREATE TABLE queue (
    queue TEXT PRIMARY KEY,
    concurrency INTEGER,
    tenant_concurrency INTEGER,
    rate REAL,                      -- starts per second
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

-- Long-term memory: namespaces, versions of items, and the meaning of each version.

-- A namespace. Its number comes from the counter and is never used again.
CREATE TABLE memory_space (
    tenant INTEGER NOT NULL,
    space INTEGER NOT NULL,
    path TEXT NOT NULL,             -- its labels, each ended by \x01\x01: none is the beginning of another (memory/labels.py)
    last INTEGER NOT NULL,          -- the newest sequence number: every version takes one, so an index reads what is newer
    generation INTEGER NOT NULL,    -- grows when rows were removed or embedded again: indexes in memory start anew
    items INTEGER NOT NULL,         -- items that are there and not pinned, and the bytes of their bodies: caches of memory_item
    bytes INTEGER NOT NULL,
    policy TEXT,                    -- JSON: caps, ttl, history; NULL: that of the nearest namespace above
    PRIMARY KEY (tenant, space)
) WITHOUT ROWID;
CREATE UNIQUE INDEX memory_space_path ON memory_space (tenant, path);

-- One version of an item; a deletion is a version with a reason in gone. Never changed, but for ended_at (set once) and
-- expires (which reads may move).
CREATE TABLE memory_item (
    id INTEGER PRIMARY KEY,         -- space << 32 | sequence number: a namespace's rows are adjacent and in order
    tenant INTEGER NOT NULL,
    space INTEGER NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,       -- 1, 2, … of this key
    kind TEXT NOT NULL,             -- semantic, episodic, procedural, or the caller's
    body BLOB NOT NULL,             -- MessagePack: see memory/rows.py
    words BLOB,                     -- terms and their counts: see memory/words.py
    bytes INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    created_at INTEGER NOT NULL,    -- of the first version since the key was free; microseconds since 1970
    at INTEGER NOT NULL,            -- learned
    ended_at INTEGER,               -- replaced or deleted; NULL: the newest of its key
    valid_from INTEGER,             -- when the fact holds, if that differs from when it was learned
    valid_to INTEGER,
    expires INTEGER,
    gone TEXT                       -- NULL: an item; else why there is none: deleted, cap, expired, …
);
CREATE UNIQUE INDEX memory_item_version ON memory_item (tenant, space, key, version);
CREATE INDEX memory_item_ended ON memory_item (tenant, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX memory_item_expires ON memory_item (tenant, expires) WHERE expires IS NOT NULL;

-- The meaning of a version, by one model: embedding again replaces it, listing never reads it.
CREATE TABLE memory_vector (
    id INTEGER PRIMARY KEY,         -- of the version
    tenant INTEGER NOT NULL,
    model TEXT NOT NULL,
    vec BLOB NOT NULL               -- float16, little-endian, of length 1
);

-- Operating a store: pins, what was erased, keys in use, copies made, how fast it grows.

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

-- The data key of a tenant, with which its columns are encrypted: wrapped, that is, encrypted with the provider's key.
CREATE TABLE tenant_key (
    tenant INTEGER PRIMARY KEY,
    wrapped_by BLOB NOT NULL,       -- the id of the provider's key
    wrapped BLOB NOT NULL,
    since INTEGER NOT NULL            -- when it was wrapped with this key, microseconds since 1970
);

-- Copies that hold data of this store: what erasing cannot reach, and what a restore was tried with.
CREATE TABLE copy (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,             -- backup, export
    place TEXT NOT NULL,            -- where it was written, without secrets
    tenant INTEGER,                 -- NULL: the whole store
    at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    restored_at INTEGER             -- when it was last restored and found whole
) WITHOUT ROWID;

-- Threads and runs that were moved into a store file: where each is. Their names stay taken.
CREATE TABLE archived (
    tenant INTEGER NOT NULL,
    kind TEXT NOT NULL,             -- thread, run
    name TEXT NOT NULL,
    place TEXT NOT NULL,            -- a path, or the URL of an object
    at INTEGER NOT NULL,
    PRIMARY KEY (tenant, kind, name)
) WITHOUT ROWID;

-- How large the store was, once an hour at most: how fast it grows is computed from these.
CREATE TABLE size_sample (
    at INTEGER PRIMARY KEY,         -- microseconds since 1970
    bytes INTEGER NOT NULL,
    free_bytes INTEGER NOT NULL     -- inside the store, to be used again
);

