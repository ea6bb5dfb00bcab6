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
    channel TEXT NOT NULL,
    path TEXT NOT NULL,
    base INTEGER,                   -- the record whose text the value was compressed against, if any
    value BLOB NOT NULL,            -- a checksum over this row's meaning, then the text, perhaps compressed
    PRIMARY KEY (tenant, thread, space, id, task, idx)
) WITHOUT ROWID;
