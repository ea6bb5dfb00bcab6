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
    source bigint,
    generation bigint NOT NULL,
    head bigint,
    head_hash bytea,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    active bigint NOT NULL,
    retention text,
    owner text,                     -- the process that runs the thread's effects, or ran them last; one at a time
    PRIMARY KEY (tenant, thread)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX thread_name ON thread (tenant, name);
CREATE INDEX thread_active ON thread (tenant, active);
CREATE INDEX thread_tree ON thread (tenant, tree);
CREATE INDEX thread_source ON thread (tenant, source) WHERE source IS NOT NULL;

-- One row per key of a thread's metadata, so that looking threads up by it is an index search.
CREATE TABLE tag (
    tenant bigint NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    thread bigint NOT NULL,
    PRIMARY KEY (tenant, key, value, thread)
);
CREATE INDEX tag_thread ON tag (tenant, thread);

-- The log. Immutable in meaning; thread, base, keyframe, key, cost and body are physical and may move.
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
    body bigint,
    PRIMARY KEY (tenant, tree, id)
);
-- What a fork has written, among the records of all forks of one thread.
CREATE INDEX record_of_fork ON record (tenant, thread, id) WHERE thread <> tree;

CREATE TABLE body (
    id bigint GENERATED ALWAYS AS IDENTITY,
    tenant bigint NOT NULL,
    salt bytea NOT NULL,
    diff bytea,
    full_text bytea,
    PRIMARY KEY (tenant, id)
);

-- Ids that a caller gives its records (LangGraph's checkpoints), in namespaces, and writes that are pending on them.

-- A namespace of a thread, as a small number. "" is 0 and has no row: its newest record is the thread's head.
CREATE TABLE space (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    name text NOT NULL,
    space bigint NOT NULL,
    head bigint,                    -- a cache: the newest labelled record
    PRIMARY KEY (tenant, thread, name)
);

-- Which record an id stands for. Putting an id again points it at another record.
CREATE TABLE label (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    space bigint NOT NULL,
    id bytea NOT NULL,
    record bigint NOT NULL,
    run bytea,                      -- the run that made it, if it said so
    PRIMARY KEY (tenant, thread, space, id)
);
CREATE INDEX label_run ON label (tenant, run) WHERE run IS NOT NULL;

-- What tasks have written on a labelled record, not yet part of a state. May come before the record, or too late.
CREATE TABLE write (
    tenant bigint NOT NULL,
    thread bigint NOT NULL,
    space bigint NOT NULL,
    id bytea NOT NULL,
    task bytea NOT NULL,
    idx bigint NOT NULL,
    key text NOT NULL,
    path text NOT NULL,
    base bigint,                    -- the record whose text the value was compressed against, if any
    value bytea NOT NULL,           -- a checksum over this row's meaning, then the text, perhaps compressed
    PRIMARY KEY (tenant, thread, space, id, task, idx)
);

-- Durable runs: executions of functions, their journals, and what they wait for.

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
    origin bigint,                 -- a fork: the run whose journal it shares …
    origin_seq bigint NOT NULL,    -- … up to this number; what counts of it is in its first own entry
    status text NOT NULL,
    queue text NOT NULL,
    priority bigint NOT NULL,
    owner text,                     -- whose it is while it runs
    fence bigint NOT NULL,         -- grows with each owner; who has an older one cannot write
    lease_until bigint NOT NULL,   -- microseconds since 1970
    wake_at bigint NOT NULL,       -- queued or waiting: not before
    wakeup_pending bigint NOT NULL,        -- 1: something it may wait for came while it ran
    request text,                   -- what an operator wants: cancel, pause, undo
    waiting text,                   -- JSON: what it waits for, for people
    entries bigint NOT NULL,       -- how many journal rows, …
    digest bigint NOT NULL,        -- … and the sum of their hashes
    seq bigint NOT NULL,           -- the greatest number in the journal
    since bigint NOT NULL,         -- continue_as_new: rows up to this number are of an earlier round
    created_at bigint NOT NULL,
    changed_at bigint NOT NULL,    -- of the status
    keep_until bigint,             -- finished: when its journal may go; NULL: never by itself
    cut bigint NOT NULL,           -- a promoted replica: journal rows from this number on may have been lost; 0: none
    bucket bigint,                  -- random, of 10,000: a deployment chose the version by it; NULL: none did
    PRIMARY KEY (tenant, run)
) WITH (fillfactor = 50);
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

-- Workers hear at once that a run is due (LISTEN); without it they look every half second. Steps write none of the
-- columns named here, so that they neither fire this nor wait for the lock that NOTIFY takes.
CREATE FUNCTION run_is_due() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify(left('perdure_' || TG_TABLE_SCHEMA, 63), '');
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION run_is_due() FROM PUBLIC;
CREATE TRIGGER run_started AFTER INSERT ON run FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();
CREATE TRIGGER run_woken AFTER UPDATE OF wake_at ON run FOR EACH ROW
    WHEN (NEW.status IN ('queued', 'waiting') AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();

-- A run's arguments and its outcome: apart from the row, which every step writes again.
CREATE TABLE run_value (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    kind text NOT NULL,               -- args, outcome
    value bytea NOT NULL,
    PRIMARY KEY (tenant, run, kind)
);

-- What happened, in the order it was written down. Never changed.
CREATE TABLE journal (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    seq bigint NOT NULL,
    kind bigint NOT NULL,
    body bytea NOT NULL, -- MessagePack: see runs/journal/entries.py
    PRIMARY KEY (tenant, run, seq)
);

-- Questions to people. The answer that counts is in the journal; these rows are how it gets there.
CREATE TABLE ask (
    tenant bigint NOT NULL,
    run bigint NOT NULL,
    path text NOT NULL,
    kind text NOT NULL,             -- question, approval, doubt
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

-- Which version of a function new runs get, and which share of them the next one gets first.
CREATE TABLE deployment (
    tenant bigint NOT NULL,
    function text NOT NULL,
    version text NOT NULL,
    canary text,                    -- the version that is being tried
    share bigint NOT NULL,         -- how many runs of 10,000 get it
    since bigint NOT NULL,         -- microseconds since 1970 …
    run_after bigint NOT NULL,     -- … and a number below those of the runs since
    reverted text,                  -- why the last canary was reverted
    PRIMARY KEY (tenant, function)
);

-- What a queue allows; a token bucket for its rate.
CREATE TABLE queue (
    queue text PRIMARY KEY,
    concurrency bigint,
    tenant_concurrency bigint,
    rate double precision,                      -- starts per second
    tokens double precision NOT NULL,
    filled_at bigint NOT NULL
);

-- Large results, once per tenant, and who refers to them.
CREATE TABLE blob (
    tenant bigint NOT NULL,
    hash bytea NOT NULL,
    body bytea NOT NULL,
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

-- Long-term memory: namespaces, versions of items, and the meaning of each version. Ranking is done in the process.

-- fillfactor: every put updates the row in place.
CREATE TABLE memory_space (
    tenant bigint NOT NULL,
    space bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    last bigint NOT NULL,
    generation bigint NOT NULL,
    items bigint NOT NULL,
    bytes bigint NOT NULL,
    policy text,
    PRIMARY KEY (tenant, space)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX memory_space_path ON memory_space (tenant, path);

CREATE TABLE memory_item (
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    space bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    kind text NOT NULL,
    body bytea NOT NULL,
    words bytea,
    bytes bigint NOT NULL,
    pinned bigint NOT NULL,
    created_at bigint NOT NULL,
    at bigint NOT NULL,
    ended_at bigint,
    valid_from bigint,
    valid_to bigint,
    expires bigint,
    gone text,
    PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX memory_item_version ON memory_item (tenant, space, key, version);
CREATE INDEX memory_item_ended ON memory_item (tenant, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX memory_item_expires ON memory_item (tenant, expires) WHERE expires IS NOT NULL;

CREATE TABLE memory_vector (
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    model text NOT NULL,
    vec bytea NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- Operating a store: pins, what was erased, keys in use, copies made, how fast it grows.

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

-- The data key of a tenant, with which its columns are encrypted: wrapped, that is, encrypted with the provider's key.
CREATE TABLE tenant_key (
    tenant bigint PRIMARY KEY,
    wrapped_by bytea NOT NULL,       -- the id of the provider's key
    wrapped bytea NOT NULL,
    since bigint NOT NULL            -- when it was wrapped with this key, microseconds since 1970
);

-- Copies that hold data of this store: what erasing cannot reach, and what a restore was tried with.
CREATE TABLE copy (
    id text PRIMARY KEY,
    kind text NOT NULL,             -- backup, export
    place text NOT NULL,            -- where it was written, without secrets
    tenant bigint,                 -- NULL: the whole store
    at bigint NOT NULL,
    bytes bigint NOT NULL,
    restored_at bigint             -- when it was last restored and found whole
);

-- Threads and runs that were moved into a store file: where each is. Their names stay taken.
CREATE TABLE archived (
    tenant bigint NOT NULL,
    kind text NOT NULL,             -- thread, run
    name text NOT NULL,
    place text NOT NULL,            -- a path, or the URL of an object
    at bigint NOT NULL,
    PRIMARY KEY (tenant, kind, name)
);

-- How large the store was, once an hour at most: how fast it grows is computed from these.
CREATE TABLE size_sample (
    at bigint PRIMARY KEY,         -- microseconds since 1970
    bytes bigint NOT NULL,
    free_bytes bigint NOT NULL     -- inside the store, to be used again
);

-- Tenants that the database keeps apart: row-level security on every table that has a tenant, and which role sees what.
-- A new table needs the same three lines; a test looks for one that lacks them.
--
-- Who sees what hangs on two types, which hold nothing: a role that may use the type has the right. Types, because GRANT …
-- ON ALL TABLES does not reach them, so that a broad grant gives no role more than it should see; and because their
-- owner has the right by itself, as the owner of a store always could see all of it. `perdure store role` makes the grants.
--   sees_every_tenant     all tenants: the owner; workers, backups and maintenance for all tenants
--   chooses_tenant        the tenant named by the setting perdure.tenant, for as long as a transaction
--   neither               the one tenant that tenant_role names for the role, whatever is set; without a row there, nothing
CREATE TYPE sees_every_tenant AS ENUM ();
CREATE TYPE chooses_tenant AS ENUM ();
REVOKE USAGE ON TYPE sees_every_tenant FROM PUBLIC;
REVOKE USAGE ON TYPE chooses_tenant FROM PUBLIC;

-- Roles that are bound to one tenant, by name. Only the owner writes here.
CREATE TABLE tenant_role (
    role name PRIMARY KEY,
    tenant bigint NOT NULL
);

-- Bodies of this form are resolved when they are made: a caller's search_path and temporary tables do not reach into them.
-- All but bound_tenant are taken apart by the planner, so that they cost a look into a cache. STABLE and without
-- arguments, inside (SELECT …): once for each statement, not for each row.
CREATE FUNCTION may_see_every_tenant() RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN has_type_privilege('sees_every_tenant'::regtype, 'USAGE');
CREATE FUNCTION bound_tenant() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (SELECT r.tenant FROM tenant_role r WHERE r.role = current_user);
CREATE FUNCTION chosen_tenant_name() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        THEN current_setting('perdure.tenant_name', true) END;
-- A setting that was local to a transaction is the empty text after it.
CREATE FUNCTION visible_tenant() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        THEN nullif(current_setting('perdure.tenant', true), '')::bigint
        ELSE bound_tenant() END;
CREATE FUNCTION serves_several_tenants() RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        OR has_type_privilege('sees_every_tenant'::regtype, 'USAGE');

-- These are compressed already: the server stores them as they are. (CREATE TABLE takes STORAGE from PostgreSQL 16 on.)
ALTER TABLE body ALTER COLUMN diff SET STORAGE EXTERNAL;
ALTER TABLE body ALTER COLUMN full_text SET STORAGE EXTERNAL;
ALTER TABLE journal ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE blob ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE memory_item ALTER COLUMN words SET STORAGE EXTERNAL;
ALTER TABLE memory_vector ALTER COLUMN vec SET STORAGE EXTERNAL;

-- FORCE: for the owner too, who passes by the right above and can give it away.
DO $$
DECLARE
    each text;
BEGIN
    FOREACH each IN ARRAY ARRAY[
        'thread', 'tag', 'record', 'body', 'space', 'label', 'write', 'run', 'run_value', 'journal', 'ask',
        'answer', 'signal', 'blob', 'run_blob', 'pin', 'erased', 'tenant_key', 'copy', 'archived',
        'memory_space', 'memory_item', 'memory_vector', 'deployment'
    ] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', each);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', each);
        EXECUTE format(
            'CREATE POLICY tenants ON %I
            USING ((SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()))', each
        );
    END LOOP;
END $$;

-- Copies of the whole store hold every tenant's data: each may know of them, since erasing must name them.
CREATE POLICY whole_store ON copy FOR SELECT USING (tenant IS NULL);

-- A tenant's number is looked up, and a tenant made, by its name, before the number is known.
ALTER TABLE tenant ENABLE ROW LEVEL SECURITY;
ALTER TABLE tenant FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tenant USING (
    (SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()) OR name = (SELECT chosen_tenant_name())
);

ALTER TABLE tenant_role ENABLE ROW LEVEL SECURITY;
ALTER TABLE tenant_role FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tenant_role USING ((SELECT may_see_every_tenant()) OR role = current_user);

-- What belongs to the store. In meta, a key about one tenant is a word and the tenant's number ("maintenance 3").
ALTER TABLE meta ENABLE ROW LEVEL SECURITY;
ALTER TABLE meta FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON meta USING (
    (SELECT may_see_every_tenant()) OR split_part(key, ' ', 2) = (SELECT visible_tenant())::text
);
CREATE POLICY whole_store ON meta FOR SELECT USING (key = 'store');

-- Limits of queues are for those who work for more than one tenant. How large the store is, any role can ask the server.
ALTER TABLE queue ENABLE ROW LEVEL SECURITY;
ALTER TABLE queue FORCE ROW LEVEL SECURITY;
CREATE POLICY several ON queue USING ((SELECT serves_several_tenants()));
ALTER TABLE size_sample ENABLE ROW LEVEL SECURITY;
ALTER TABLE size_sample FORCE ROW LEVEL SECURITY;
CREATE POLICY several ON size_sample USING ((SELECT serves_several_tenants()));
CREATE POLICY whole_store ON size_sample FOR SELECT USING (true);
