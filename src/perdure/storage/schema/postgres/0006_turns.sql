-- The process that runs a thread's effects, or did last: one at a time. NULL: none ever did.
ALTER TABLE thread ADD COLUMN owner text;
-- What a process has under way in a thread: looked up whenever another wants to write to it.
CREATE INDEX run_open ON run (tenant, root) WHERE status = 'running';
