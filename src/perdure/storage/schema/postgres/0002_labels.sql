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
    channel text NOT NULL,
    path text NOT NULL,
    base bigint,                    -- the record whose text the value was compressed against, if any
    value bytea NOT NULL,           -- a checksum over this row's meaning, then the text, perhaps compressed
    PRIMARY KEY (tenant, thread, space, id, task, idx)
);
