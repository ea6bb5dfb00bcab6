"""The tables of durable runs, declared (`storage/domains.py`). Times are microseconds since 1970."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perdure.storage.domains import Column, Index, RowPolicy, SchemaChange, Table

INTENT: Final = 1  # a kind of entry: an effect is about to run: arguments, key, deadline, undo
# One execution. What it is (id, function, version, args, incarnation, parent, origin) stands; the rest is where it is.
RUN = Table(
    "run",
    (
        Column("run", "int"),
        Column("id", "text"),  # the caller's
        Column("function", "text"),
        Column("version", "text"),
        # The digest of the arguments: the same id must come with the same.
        Column("input", "bytes", encrypted=("id", "function"), hashed=True),
        Column("incarnation", "bytes"),  # random: what idempotency keys are made from
        Column("parent", "int", null=True),  # the run that started it, …
        Column("parent_path", "text", null=True),  # … and the path of the call
        Column("root", "int"),  # the run at the top of the family
        Column("origin", "int", null=True),  # a fork: the run whose journal it shares …
        Column("origin_seq", "int"),  # … up to this number; what counts of it is in its first own entry
        Column("status", "text"),
        Column("queue", "text"),
        Column("priority", "int"),
        Column("owner", "text", null=True),  # whose it is while it runs
        Column("fence", "int"),  # grows with each owner; who has an older one cannot write
        Column("lease_until", "int"),
        Column("wake_at", "int"),  # queued or waiting: not before
        Column("wakeup_pending", "int"),  # 1: something it may wait for came while it ran
        Column("request", "text", null=True),  # what an operator wants: cancel, pause, undo
        Column("waiting", "text", null=True, encrypted=("run",), hashed=True),  # JSON: what it waits for, for people
        Column("entries", "int"),  # how many journal rows, …
        Column("digest", "int"),  # … and the sum of their hashes
        Column("seq", "int"),  # the greatest number in the journal
        Column("since", "int"),  # continue_as_new: rows up to this number are of an earlier round
        Column("created_at", "int"),
        Column("changed_at", "int"),  # of the status
        Column("keep_until", "int", null=True),  # finished: when its journal may go; NULL: never by itself
        Column("cut", "int"),  # a promoted replica: journal rows from this number on may have been lost; 0: none
        Column("bucket", "int", null=True),  # random, of 10,000: a deployment chose the version by it; NULL: none did
    ),
    ("run",),
    (
        Index("run_id", "tenant, id", unique=True),
        # Two, because a store may hold very many runs that wait for people: a worker finds those that are due without
        # passing them.
        Index("run_queued", "queue, priority DESC, wake_at, run", where="status = 'queued'"),
        Index("run_waiting", "queue, wake_at", where="status = 'waiting'"),
        Index("run_running", "owner", where="status = 'running'"),
        Index("run_root", "tenant, root"),
        # Open work of a process in a thread: looked up when another process wants to write to the thread.
        Index("run_open", "tenant, root", where="status = 'running'"),
        Index("run_listed", "tenant, status, run"),
        Index("run_origin", "tenant, origin", where="origin IS NOT NULL"),
        Index("run_kept", "tenant, keep_until", where="keep_until IS NOT NULL"),
    ),
    owner="run",
    looked_up=(("id",), ("root",)),
    finds_changes=True,
    remembered="true",
    fillfactor=50,  # every step updates the row, and no indexed column: PostgreSQL can do that within the page
)
# A run's arguments and its outcome: apart from the row, which every step writes again.
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
# What happened, in the order it was written down. Never changed.
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
# Questions to people. The answer that counts is in the journal; these rows are how it gets there.
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
        # The text of the value that counts.
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
        Column("key", "text"),  # the sender's: the same message twice is one
        Column("value", "bytes", encrypted=("run", "topic", "key"), hashed=True),
        Column("at", "int"),
        Column("received", "int"),  # 1: in the journal
    ),
    ("run", "topic", "seq"),
    (Index("signal_key", "tenant, run, key", unique=True),),
    owner="run",
    moves=True,
)
# Large results, once per tenant, …
BLOB = Table(
    "blob",
    (Column("hash", "bytes"), Column("body", "bytes", encrypted=("hash",), compressed=True)),
    ("hash",),
    layout="heap",
)
# … and which runs refer to them.
RUN_BLOB = Table(
    "run_blob",
    (Column("run", "int"), Column("hash", "bytes")),
    ("run", "hash"),
    (Index("run_blob_hash", "tenant, hash"),),
    refers_to="blob",
    owner="run",
)
# Which version of a function new runs get, and which share of them the next one gets first.
DEPLOYMENT = Table(
    "deployment",
    (
        Column("function", "text"),
        Column("version", "text"),
        Column("canary", "text", null=True),  # the version that is being tried
        Column("share", "int"),  # how many runs of 10,000 get it
        Column("since", "int"),  # when, …
        Column("run_after", "int"),  # … and a number below those of the runs since
        Column("reverted", "text", null=True),  # why the last canary was reverted
    ),
    ("function",),
    few_rows=True,
)
# What a queue allows; a token bucket for its rate. For those who work for more than one tenant.
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

# Workers hear at once that a run is due (LISTEN); without it they look every half second. Steps write none of the
# columns named here, so that they neither fire this nor wait for the lock that NOTIFY takes.
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

# What statements name of encrypted columns.
INPUT, WAITING = RUN.encrypted("input"), RUN.encrypted("waiting")
OUTCOME, JOURNAL_BODY = RUN_VALUE.encrypted("value"), JOURNAL.encrypted("body")
# A run's arguments are written before it has a number. They are bound to its incarnation, which idempotency keys are
# made from: if that was changed, the run does not start.
ARGS = replace(OUTCOME, by=("incarnation",))
QUESTION, TERMS, ASK_ANSWER = ASK.encrypted("question"), ASK.encrypted("terms"), ASK.encrypted("answer")
ANSWER_VALUE, SIGNAL_VALUE, BLOB_BODY = ANSWER.encrypted("value"), SIGNAL.encrypted("value"), BLOB.encrypted("body")
