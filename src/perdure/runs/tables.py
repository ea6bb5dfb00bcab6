"""The tables of durable runs, declared (`storage/domains.py`). Times are microseconds since 1970."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perdure.storage.domains import Column, Index, RowPolicy, SchemaChange, Table

INTENT: Final = 1  # the kind of an entry written before an effect runs: arguments, key, deadline, undo
# One execution. Identity (id, function, version, args, incarnation, parent, origin) is fixed; other columns change.
RUN = Table(
    "run",
    (
        Column("run", "int"),
        Column("id", "text"),  # chosen by the caller
        Column("function", "text"),
        Column("version", "text"),
        # The digest of the arguments: a second start with the same id must have the same one.
        Column("input", "bytes", encrypted=("id", "function"), hashed=True),
        Column("incarnation", "bytes"),  # random: idempotency keys are derived from it
        Column("parent", "int", null=True),  # the run that started it, …
        Column("parent_path", "text", null=True),  # … and the path of the call
        Column("root", "int"),  # the run at the top of the family
        Column("origin", "int", null=True),  # a fork: the run whose journal it shares …
        Column("origin_seq", "int"),  # … up to this seq; its first own entry lists which entries count
        Column("status", "text"),
        Column("queue", "text"),
        Column("priority", "int"),
        Column("owner", "text", null=True),  # the process that runs it
        Column("fence", "int"),  # grows with each owner; a write with an older fence is refused
        Column("lease_until", "int"),
        Column("wake_at", "int"),  # queued or waiting: not due before this time
        Column("wakeup_pending", "int"),  # 1: something that it may wait for arrived while it ran
        Column("request", "text", null=True),  # what an operator asked for: cancel, pause, undo
        Column("waiting", "text", null=True, encrypted=("run",), hashed=True),  # JSON: what it waits for, to be shown
        Column("entries", "int"),  # how many journal rows, …
        Column("digest", "int"),  # … and the sum of their hashes
        Column("seq", "int"),  # the greatest seq in the journal
        Column("since", "int"),  # continue_as_new: journal rows up to this seq belong to an earlier round
        Column("created_at", "int"),
        Column("changed_at", "int"),  # when the status changed
        Column("keep_until", "int", null=True),  # finished: when a sweep may delete its journal; NULL: never
        Column("cut", "int"),  # on a promoted replica, journal rows from this seq on may be lost; 0: none
        Column("bucket", "int", null=True),  # random below 10,000: a deployment chose the version by it; NULL: none did
    ),
    ("run",),
    (
        Index("run_id", "tenant, id", unique=True),
        # Two indexes, because very many runs may wait for people: a worker finds the due ones without scanning those.
        Index("run_queued", "queue, priority DESC, wake_at, run", where="status = 'queued'"),
        Index("run_waiting", "queue, wake_at", where="status = 'waiting'"),
        Index("run_running", "owner", where="status = 'running'"),
        Index("run_root", "tenant, root"),
        # Looked up when a process wants to write to a thread in which another one has running tasks.
        Index("run_open", "tenant, root", where="status = 'running'"),
        Index("run_listed", "tenant, status, run"),
        Index("run_origin", "tenant, origin", where="origin IS NOT NULL"),
        Index("run_kept", "tenant, keep_until", where="keep_until IS NOT NULL"),
    ),
    owner="run",
    looked_up=(("id",), ("root",)),
    finds_changes=True,
    remembered="true",
    fillfactor=50,  # steps update no indexed column: with free space in the page, PostgreSQL does a HOT update
)
# A run's arguments and outcome. They are not in the run's row, because every step rewrites that row.
RUN_VALUE = Table(
    "run_value",
    (
        Column("run", "int"),
        Column("kind", "text"),  # args, outcome
        Column("value", "bytes", encrypted=("run", "kind"), hashed=True),
    ),
    ("run", "kind"),
    owner="run",
)
# Journal entries, numbered in the order they were written. A row never changes.
JOURNAL = Table(
    "journal",
    (
        Column("run", "int"),
        Column("seq", "int"),
        Column("kind", "int"),
        # MessagePack: see journal/entries.py
        Column("body", "bytes", encrypted=("run", "seq", "kind"), hashed=True, compressed=True),
    ),
    ("run", "seq"),
    owner="run",
    remembered=f"{{row}}.kind = {INTENT}",
)
# Questions to people. The run reads the answer from the journal; these rows collect it until it is written there.
ASK = Table(
    "ask",
    (
        Column("run", "int"),
        Column("path", "text"),
        Column("kind", "text"),  # question, approval, doubt
        Column("question", "text", encrypted=("run", "path"), hashed=True),
        # JSON: options, schema, approvers, quorum …
        Column("terms", "text", encrypted=("run", "path"), hashed=True),
        Column("asked_at", "int"),
        Column("deadline", "int", null=True),
        Column("status", "text"),  # open, answered, closed
        # The text of the value that was accepted.
        Column("answer", "bytes", null=True, encrypted=("run", "path"), hashed=True),
    ),
    ("run", "path"),
    (Index("ask_open", "tenant, asked_at", where="status = 'open'"),),
    owner="run",
    moves=True,
)
ANSWER = Table(
    "answer",
    (
        Column("run", "int"),
        Column("path", "text"),
        Column("who", "text"),
        Column("value", "bytes", encrypted=("run", "path", "who"), hashed=True),
        Column("at", "int"),
    ),
    ("run", "path", "who"),
    owner="run",
    moves=True,
)
# Messages to runs, until they are received.
SIGNAL = Table(
    "signal",
    (
        Column("run", "int"),
        Column("topic", "text"),
        Column("seq", "int"),
        Column("key", "text"),  # chosen by the sender: a second message with the same key is dropped
        Column("value", "bytes", encrypted=("run", "topic", "key"), hashed=True),
        Column("at", "int"),
        Column("received", "int"),  # 1: it is in the journal
    ),
    ("run", "topic", "seq"),
    (Index("signal_key", "tenant, run, key", unique=True),),
    owner="run",
    moves=True,
)
# Large results, each stored once per tenant.
BLOB = Table(
    "blob",
    (Column("hash", "bytes"), Column("body", "bytes", encrypted=("hash",), compressed=True)),
    ("hash",),
    layout="heap",
)
# Which runs refer to which large results.
RUN_BLOB = Table(
    "run_blob",
    (Column("run", "int"), Column("hash", "bytes")),
    ("run", "hash"),
    (Index("run_blob_hash", "tenant, hash"),),
    refers_to="blob",
    owner="run",
)
# Which version of a function new runs get, and which share of them gets a canary.
DEPLOYMENT = Table(
    "deployment",
    (
        Column("function", "text"),
        Column("version", "text"),
        Column("canary", "text", null=True),  # the version on trial
        Column("share", "int"),  # how many runs of 10,000 get it
        Column("since", "int"),  # when the version or the canary was deployed
        Column("run_after", "int"),  # runs created since have higher numbers
        Column("reverted", "text", null=True),  # why the last canary was reverted
    ),
    ("function",),
    few_rows=True,
)
# The limits of a queue, with a token bucket for its rate. Only sessions that serve several tenants may use it.
QUEUE = Table(
    "queue",
    (
        Column("queue", "text"),
        Column("concurrency", "int", null=True),
        Column("tenant_concurrency", "int", null=True),
        Column("rate", "real", null=True),  # starts per second
        Column("tokens", "real"),
        Column("filled_at", "int"),
    ),
    ("queue",),
    of_tenant=False,
    policies=(RowPolicy("several", "(SELECT serves_several_tenants())"),),
)
TABLES = (RUN, RUN_VALUE, JOURNAL, ASK, ANSWER, SIGNAL, BLOB, RUN_BLOB, DEPLOYMENT, QUEUE)

# NOTIFY tells workers at once that a run is due; without it they poll every half second. Steps write none of the
# columns named here. So they neither fire the triggers nor wait for the lock that NOTIFY takes.
DUE_RUNS = SchemaChange(
    postgres="""
CREATE FUNCTION run_is_due() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify(left('perdure_' || TG_TABLE_SCHEMA, 63), '');
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION run_is_due() FROM PUBLIC;
CREATE TRIGGER run_started AFTER INSERT ON run FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();
CREATE TRIGGER run_woken AFTER UPDATE OF wake_at ON run FOR EACH ROW
    WHEN (NEW.status IN ('queued', 'waiting') AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due()"""
)

# The encrypted columns that SQL statements name.
INPUT, WAITING = RUN.encrypted("input"), RUN.encrypted("waiting")
OUTCOME, JOURNAL_BODY = RUN_VALUE.encrypted("value"), JOURNAL.encrypted("body")
# A run's arguments are written before it has a number, so their encryption is bound to its incarnation. Idempotency
# keys are derived from the incarnation: if it was changed, the run does not start.
ARGS = replace(OUTCOME, by=("incarnation",))
QUESTION, TERMS, ASK_ANSWER = ASK.encrypted("question"), ASK.encrypted("terms"), ASK.encrypted("answer")
ANSWER_VALUE, SIGNAL_VALUE, BLOB_BODY = ANSWER.encrypted("value"), SIGNAL.encrypted("value"), BLOB.encrypted("body")
