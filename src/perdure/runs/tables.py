"""The tables of durable runs, declared (`storage/domains.py`); `run` itself is in `run_table.py`.

Times are microseconds since 1970.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perdure.runs.run_table import NO_TASK, RUN
from perdure.storage.domains import Column, Index, RowPolicy, SchemaChange, Table

INTENT: Final = 1  # the kind of an entry written before an effect runs: arguments, key, deadline, undo
# One row per tag of a run, so that finding runs by a tag is an index search in the order of lists.
RUN_TAG = Table(
    "run_tag",
    (
        Column("key", "text"),
        Column("value", "text", encrypted=("key",), searched=True),
        Column("at", "int"),  # the run's created_at
        Column("run", "int"),
    ),
    ("key", "value", "at", "run"),
    (Index("run_tag_run", "tenant, run"),),
    owner="run",
    moves=True,
)
# How many runs there are of each kind, without tasks. Triggers keep it, so that counting reads no run.
RUN_COUNT = Table(
    "run_count",
    (
        Column("function", "text"),
        Column("version", "text"),
        Column("queue", "text"),
        Column("status", "text"),
        # Several rows per kind, so that no transaction waits for another: the sum counts. One of them may be negative.
        Column("shard", "int"),
        Column("n", "int"),
    ),
    ("function", "version", "queue", "status", "shard"),
    copied=False,
    versioned=False,
    few_rows=True,
    fillfactor=50,
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
# What the bodies of running steps have emitted, until their ends are recorded. Never part of a replay.
EMITTED = Table(
    "emitted",
    (
        Column("run", "int"),
        Column("fence", "int"),
        Column("upto", "int"),  # the number of its last value among all values of this execution
        Column("path", "text"),
        Column("name", "text"),
        Column("attempt", "int"),
        Column("first", "int"),  # the number of its first value among those of this attempt, from 0
        Column("at", "int"),
        Column("body", "bytes", encrypted=("run", "fence", "upto"), compressed=True),  # MessagePack: a list of texts
    ),
    ("run", "fence", "upto"),
    copied=False,
    versioned=False,
    volatile=True,
)
# Messages to runs, numbered for each receiver in the order they were sent.
WAITING_MAIL, TAKEN, DEAD, WITHDRAWN, DROPPED = range(5)  # values of mail.state
MAIL = Table(
    "mail",
    (
        Column("run", "int"),  # the receiver
        Column("seq", "int"),
        Column("topic", "text"),
        Column("key", "text"),  # chosen by the sender: a second message with the same key is dropped
        Column("sender", "text", null=True),  # the id of the run that sent it; NULL: it came from outside
        Column("sent_turn", "int", null=True),  # the sender's turn, if the sender is a member of a team
        Column("taken_turn", "int", null=True),  # the receiver's turn that took it
        Column("record", "int", null=True),  # the checkpoint of the receiver's state after that turn
        Column("state", "int"),  # 0 waiting, 1 taken, 2 dead (a person decides), 3 withdrawn by a rewind, 4 dropped
        # JSON: which call it makes or answers, why it is dead
        Column("header", "bytes", null=True, encrypted=("run", "key"), hashed=True),
        Column("value", "bytes", encrypted=("run", "key"), hashed=True),
        Column("at", "int"),
    ),
    ("run", "seq"),
    (
        Index("mail_key", "tenant, run, key", unique=True),
        Index("mail_waiting", "tenant, run, topic, seq", where="state = 0"),
        Index("mail_sent", "tenant, sender, sent_turn", where="sender IS NOT NULL"),
    ),
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
# Which large values in objects (`perdure.External`) the rows of a run refer to (journal/values.py).
OF_VALUE, OF_JOURNAL, OF_MAIL = "value", "journal", "mail"  # values of run_external.kind
RUN_EXTERNAL = Table(
    "run_external",
    # Hash first: by number, text and bytes, a repair would take a row for one of run_value.
    (Column("run", "int"), Column("hash", "bytes"), Column("kind", "text")),
    ("run", "hash", "kind"),
    (Index("run_external_hash", "tenant, hash"),),
    looked_up=(("hash",),),
    owner="run",
    holds_values=True,
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
# When to start runs of a function, and how far that is. Workers start them.
SCHEDULE = Table(
    "schedule",
    (
        Column("name", "text"),
        Column("function", "text"),
        Column("version", "text"),  # of the code that declared it last; a deployment takes precedence
        Column("args", "bytes", encrypted=("name",), hashed=True),
        Column("cron", "text", null=True),
        Column("every_us", "int", null=True),  # instead of cron
        Column("timezone", "text"),
        Column("queue", "text"),
        Column("priority", "int"),
        Column("overlap", "text"),  # skip, queue, cancel
        Column("catch_up", "text"),  # none, last, all
        Column("jitter_us", "int"),
        Column("paused", "int"),
        Column("last_at", "int"),  # the last instant that has passed
        Column("next_at", "int"),  # the next one; while it is paused, never
        Column("last_run", "text", null=True),
        Column("skipped", "int"),  # how many instants started no run
    ),
    ("name",),
    (Index("schedule_due", "next_at"),),
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
TABLES = (
    RUN, RUN_TAG, RUN_COUNT, RUN_VALUE, JOURNAL, EMITTED, ASK, ANSWER, MAIL, BLOB, RUN_BLOB, RUN_EXTERNAL,
    DEPLOYMENT, SCHEDULE, QUEUE,
)  # fmt: skip
PARTS = [table for table in TABLES if table.owner and table is not RUN]  # their rows belong to one run

# NOTIFY tells workers at once that a run is due; without it they poll every half second. Steps write none of the
# columns named here. So they neither fire the triggers nor wait for the lock that NOTIFY takes. Members of teams wake
# each other all the time: the process that sends notifies after its commits (engine/turns.py).
DUE_RUNS = SchemaChange(
    postgres="""
CREATE FUNCTION run_is_due() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF coalesce(current_setting('perdure.prepares', true), '') <> 'on' THEN -- a prepared transaction must not NOTIFY
        PERFORM pg_notify(left('perdure_' || TG_TABLE_SCHEMA, 63), '');
    END IF;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION run_is_due() FROM PUBLIC;
CREATE TRIGGER run_started AFTER INSERT ON run FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.wake_at = 0) EXECUTE FUNCTION run_is_due();
CREATE TRIGGER run_woken AFTER UPDATE OF wake_at ON run FOR EACH ROW
    WHEN (NEW.status IN ('queued', 'waiting') AND NEW.wake_at = 0 AND NEW.turn IS NULL) EXECUTE FUNCTION run_is_due()"""
)

_KIND = ("function", "version", "queue", "status")


def _count_in_sqlite(row: str, by: int) -> str:
    values = ", ".join(f"{row}.{column}" for column in ("tenant", *_KIND))
    columns = ", ".join(("tenant", *_KIND, "shard"))
    return f"""INSERT INTO run_count ({columns}, n) VALUES ({values}, 0, {by})
        ON CONFLICT ({columns}) DO UPDATE SET n = n + {by}"""


def _trigger_in_sqlite(name: str, event: str, row: str, also: str, *statements: str) -> str:
    return f"""CREATE TRIGGER {name} AFTER {event} ON run WHEN {NO_TASK.replace("function", f"{row}.function")}{also}
    BEGIN {"; ".join(statements)}; END"""


_MOVES = " OR ".join(f"OLD.{column} <> NEW.{column}" for column in _KIND)
_IS_RUN = {row: NO_TASK.replace("function", f"{row}.function") for row in ("OLD", "NEW")}
# PostgreSQL: a transaction counts in a row that no other one has locked, or in a new one. So it waits for none, and
# two of them cannot deadlock.
COUNTS = SchemaChange(
    sqlite=";\n".join(
        (
            _trigger_in_sqlite("run_counted", "INSERT", "NEW", "", _count_in_sqlite("NEW", 1)),
            _trigger_in_sqlite(
                "run_moved",
                f"UPDATE OF {', '.join(_KIND)}",
                "NEW",
                f" AND ({_MOVES})",
                _count_in_sqlite("OLD", -1),
                _count_in_sqlite("NEW", 1),
            ),
            _trigger_in_sqlite("run_uncounted", "DELETE", "OLD", "", _count_in_sqlite("OLD", -1)),
        )
    ),
    postgres=f"""
DO $do$ BEGIN EXECUTE format($made$
CREATE FUNCTION count_runs() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    run %1$I.run;
BEGIN
    FOR change IN CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END .. CASE TG_OP WHEN 'DELETE' THEN -1 ELSE 1 END BY 2 LOOP
        run := CASE change WHEN 1 THEN NEW ELSE OLD END;
        UPDATE %1$I.run_count c SET n = c.n + change
        WHERE (c.tenant, c.function, c.version, c.queue, c.status, c.shard) = (
            SELECT k.tenant, k.function, k.version, k.queue, k.status, k.shard FROM %1$I.run_count k
            WHERE k.tenant = run.tenant AND k.function = run.function AND k.version = run.version
                AND k.queue = run.queue AND k.status = run.status
            LIMIT 1 FOR UPDATE SKIP LOCKED);
        IF NOT FOUND THEN
            INSERT INTO %1$I.run_count (tenant, function, version, queue, status, shard, n)
            VALUES (run.tenant, run.function, run.version, run.queue, run.status,
                pg_current_xact_id()::text::bigint, change);
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
$made$, current_schema()); END $do$;
REVOKE ALL ON FUNCTION count_runs() FROM PUBLIC;
CREATE TRIGGER run_counted AFTER INSERT ON run FOR EACH ROW WHEN ({_IS_RUN["NEW"]}) EXECUTE FUNCTION count_runs();
CREATE TRIGGER run_moved AFTER UPDATE OF {", ".join(_KIND)} ON run FOR EACH ROW
    WHEN ({_IS_RUN["NEW"]} AND ({_MOVES})) EXECUTE FUNCTION count_runs();
CREATE TRIGGER run_uncounted AFTER DELETE ON run FOR EACH ROW WHEN ({_IS_RUN["OLD"]}) EXECUTE FUNCTION count_runs()""",
)

# The encrypted columns that SQL statements name.
INPUT, WAITING, TAGS = RUN.encrypted("input"), RUN.encrypted("waiting"), RUN.encrypted("tags")
TAG_VALUE = RUN_TAG.encrypted("value")
OUTCOME, JOURNAL_BODY = RUN_VALUE.encrypted("value"), JOURNAL.encrypted("body")
EMITTED_BODY = EMITTED.encrypted("body")
# A run's arguments are written before it has a number, so their encryption is bound to its incarnation. Idempotency
# keys are derived from the incarnation: if it was changed, the run does not start.
ARGS = replace(OUTCOME, by=("incarnation",))
QUESTION, TERMS, ASK_ANSWER = ASK.encrypted("question"), ASK.encrypted("terms"), ASK.encrypted("answer")
ANSWER_VALUE, BLOB_BODY = ANSWER.encrypted("value"), BLOB.encrypted("body")
MAIL_VALUE, MAIL_HEADER = MAIL.encrypted("value"), MAIL.encrypted("header")
