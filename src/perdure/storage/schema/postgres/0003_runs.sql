-- Durable runs: executions of functions, their journals, and whom and what they wait for.

-- fillfactor: every step updates the row in place, and no indexed column, so that PostgreSQL can do it within the page.
-- One execution. What it is (id, function, version, args, incarnation, parent, origin) stands; the rest is where it is now.
CREATE TABLE run (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    id text NOT NULL,               -- the caller's
    function text NOT NULL,
    version text NOT NULL,
    input bytea NOT NULL,            -- their digest: the same id must come with the same arguments
    incarnation bytea NOT NULL,      -- random: what idempotency keys are made from
    parent bigint,                 -- the run that started it, and the path of the call
    parent_path text,
    root bigint NOT NULL,          -- the run at the top of the family
    origin bigint,                 -- a fork: the run whose journal it shares, after origin_since, up to origin_seq …
    origin_since bigint NOT NULL,
    origin_seq bigint NOT NULL,
    origin_entries bigint NOT NULL, -- … and what that part adds up to
    origin_digest bigint NOT NULL,
    status text NOT NULL,
    queue text NOT NULL,
    priority bigint NOT NULL,
    owner text,                     -- whose it is while it runs
    fence bigint NOT NULL,         -- grows with each owner; who has an older one cannot write
    lease_until bigint NOT NULL,   -- microseconds since 1970
    wake_at bigint NOT NULL,       -- queued or waiting: not before
    nudged bigint NOT NULL,        -- 1: something it may wait for came while it ran
    request text,                   -- what an operator wants: cancel, pause, rollback
    waiting text,                   -- JSON: what it waits for, for people
    entries bigint NOT NULL,       -- how many journal rows, …
    digest bigint NOT NULL,        -- … and the sum of their hashes
    seq bigint NOT NULL,           -- the greatest number in the journal
    since bigint NOT NULL,         -- continue_as_new: rows up to this number are of an earlier round
    created_at bigint NOT NULL,
    changed_at bigint NOT NULL,    -- of the status
    keep_until bigint,             -- finished: when its journal may go; NULL: never by itself
    stamp bigint NOT NULL,
    PRIMARY KEY (tenant, run)
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX run_id ON run (tenant, id);
-- Two, because a store may hold very many runs that wait for people: what is due must be found without passing them.
CREATE INDEX run_queued ON run (queue, priority DESC, wake_at, run) WHERE status = 'queued';
CREATE INDEX run_waiting ON run (queue, wake_at) WHERE status = 'waiting';
CREATE INDEX run_running ON run (owner) WHERE status = 'running';
CREATE INDEX run_root ON run (tenant, root);
CREATE INDEX run_listed ON run (tenant, status, run);
CREATE INDEX run_origin ON run (tenant, origin) WHERE origin IS NOT NULL;
CREATE INDEX run_kept ON run (tenant, keep_until) WHERE keep_until IS NOT NULL;

-- Workers hear at once that a run is due (LISTEN); without it they look every half second. Steps write none of the
-- columns named here, so that they neither fire this nor wait for the lock that NOTIFY takes.
CREATE FUNCTION run_is_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(left('perdure_' || TG_TABLE_SCHEMA, 63), '');
    RETURN NULL;
END $$;
CREATE TRIGGER run_started AFTER INSERT ON run FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();
CREATE TRIGGER run_woken AFTER UPDATE OF wake_at ON run FOR EACH ROW
    WHEN (NEW.status IN ('queued', 'waiting') AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();

-- A run's arguments and its outcome: apart from the row, which every step writes again.
CREATE TABLE run_value (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    sort text NOT NULL,               -- args, outcome
    value bytea NOT NULL,
    PRIMARY KEY (tenant, run, sort)
);

-- What happened, in the order it was written down. Never changed.
CREATE TABLE journal (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    seq bigint NOT NULL,
    kind bigint NOT NULL,
    body bytea STORAGE EXTERNAL NOT NULL, -- MessagePack: see runs/entries.py
    stamp bigint NOT NULL,
    PRIMARY KEY (tenant, run, seq)
);

-- Questions to people. The answer that counts is in the journal; these rows are how it gets there.
CREATE TABLE ask (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    path text NOT NULL,
    sort text NOT NULL,             -- question, approval, doubt
    question text NOT NULL,
    terms text NOT NULL,            -- JSON: options, schema, approvers, quorum …
    asked_at bigint NOT NULL,
    deadline bigint,
    status text NOT NULL,           -- open, answered, closed
    answer bytea,                    -- text of the value that counts
    PRIMARY KEY (tenant, run, path)
);
CREATE INDEX ask_open ON ask (tenant, asked_at) WHERE status = 'open';

CREATE TABLE answer (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    path text NOT NULL,
    who text NOT NULL,
    value bytea NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (tenant, run, path, who)
);

-- Messages to runs, until they are received.
CREATE TABLE signal (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    topic text NOT NULL,
    seq bigint NOT NULL,
    key text NOT NULL,              -- the sender's: the same message twice is one
    value bytea NOT NULL,
    at bigint NOT NULL,
    received bigint NOT NULL,      -- 1: in the journal
    PRIMARY KEY (tenant, run, topic, seq)
);
CREATE UNIQUE INDEX signal_key ON signal (tenant, run, key);

-- What a queue allows; a token bucket for its rate.
CREATE TABLE queue (
    queue text PRIMARY KEY,
    concurrency bigint,
    tenant_concurrency bigint,
    rate double precision,                      -- starts per second
    burst double precision,
    tokens double precision NOT NULL,
    filled_at bigint NOT NULL
);

-- Large results, once per tenant, and who refers to them.
CREATE TABLE blob (
    tenant bigint NOT NULL,
    hash bytea NOT NULL,
    body bytea STORAGE EXTERNAL NOT NULL,
    PRIMARY KEY (tenant, hash)
);
CREATE TABLE run_blob (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    hash bytea NOT NULL,
    PRIMARY KEY (tenant, run, hash),
    FOREIGN KEY (tenant, hash) REFERENCES blob (tenant, hash)
);
CREATE INDEX run_blob_hash ON run_blob (tenant, hash);
