"""The tables that belong to the store as a whole: its id and settings, tenants, their keys and roles, copies of it."""

from __future__ import annotations

from perdure.storage.columns import EncryptedColumn
from perdure.storage.domains import OF_TENANT, Column, Domain, Index, RowPolicy, SchemaChange, Table
from perdure.storage.program import Sql
from perdure.storage.rights import RIGHTS

# The store's id, and settings. A key about one tenant is a word and the tenant's number ("maintenance 3").
META = Table(
    "meta",
    (Column("key", "text"), Column("value", "text")),
    ("key",),
    of_tenant=False,
    policies=(
        RowPolicy(
            "tenants",
            "(SELECT may_see_every_tenant()) OR split_part(key, ' ', 2) = (SELECT visible_tenant())::text",
        ),
        # Each tenant may know which store it is in: memory names its writers by that.
        RowPolicy("whole_store", "key IN ('store', 'era', 'replica')", reads_only=True),
    ),
)
# Which store this is, and its era.
STORE = Sql("SELECT value, coalesce((SELECT value FROM meta WHERE key = 'era'), '0') FROM meta WHERE key = 'store'")
# The source of thread, run and tenant numbers, which are never used twice. PostgreSQL: the sequence `number`.
COUNTER = Table(
    "counter",
    (Column("one", "int", check="one = 1"), Column("number", "int")),
    ("one",),
    of_tenant=False,
    copied=False,
    layout="number",
    only="sqlite",
)
# A tenant's number is looked up, and a tenant made, by its name, before the number is known. It is never changed.
TENANT = Table(
    "tenant",
    (Column("tenant", "int"), Column("name", "text")),
    ("tenant",),
    (Index("tenant_name", "name", unique=True),),
    of_tenant=False,
    policies=(RowPolicy("tenants", f"{OF_TENANT.using} OR name = (SELECT chosen_tenant_name())"),),
    roles_may="add",
    layout="number",
)
# Roles that are bound to one tenant, by name. Only the owner writes here.
TENANT_ROLE = Table(
    "tenant_role",
    (Column("role", "name"), Column("tenant", "int")),
    ("role",),
    of_tenant=False,
    copied=False,
    policies=(RowPolicy("tenants", "(SELECT may_see_every_tenant()) OR role = current_user"),),
    roles_may="read",
    only="postgres",
)
# The data key of a tenant, with which its columns are encrypted: wrapped, that is, encrypted with the provider's key.
TENANT_KEY = Table(
    "tenant_key",
    (
        Column("tenant", "int"),
        Column("wrapped_by", "bytes"),  # the id of the provider's key
        Column("wrapped", "bytes"),
        Column("since", "int"),  # when it was wrapped with this key, microseconds since 1970
    ),
    ("tenant",),
    of_tenant=False,
    policies=(OF_TENANT,),
    layout="number",
)
# Copies that hold data of this store: what erasing cannot reach, and what a restore was tried with. Copies of the whole
# store hold every tenant's data: each tenant may know of them, since erasing must name them.
COPY = Table(
    "copy",
    (
        Column("id", "text"),
        Column("kind", "text"),  # backup, bundle, archive; "unfinished …" until it is in its place
        Column("place", "text"),  # where it was written, without secrets
        Column("tenant", "int", null=True),  # NULL: the whole store
        Column("at", "int"),
        Column("bytes", "int"),
        Column("restored_at", "int", null=True),  # when it was last restored and found whole
    ),
    ("id",),
    of_tenant=False,
    policies=(OF_TENANT, RowPolicy("whole_store", "tenant IS NULL", reads_only=True)),
)
# How large the store was, once an hour at most: how fast it grows is computed from these. Any role can ask the server
# for the size; those who work for more than one tenant write it down.
SIZE_SAMPLE = Table(
    "size_sample",
    (
        Column("at", "int"),  # microseconds since 1970
        Column("bytes", "int"),
        Column("free_bytes", "int"),  # inside the store, to be used again
    ),
    ("at",),
    of_tenant=False,
    copied=False,
    policies=(
        RowPolicy("several", "(SELECT serves_several_tenants())"),
        RowPolicy("whole_store", "true", reads_only=True),
    ),
    layout="number",
)
_SEVERAL = (RowPolicy("several", "(SELECT serves_several_tenants())"),)
# Transactions over several stores that are prepared here, and wait for the decision of another store (`prepared.py`).
# While SQLite has one, no other transaction writes. A copy of the store takes no part in them.
PREPARED = Table(
    "prepared",
    (
        Column("gid", "text"),
        Column("decider", "text"),  # JSON: the id of the store that has the decision, and where it is, without secrets
        Column("redo", "bytes", null=True),  # SQLite: known statements by their digests, with values
        Column("deadline", "int"),  # microseconds since 1970: from then on anyone may ask for the decision
    ),
    ("gid",),
    of_tenant=False,
    copied=False,
    policies=_SEVERAL,
)
# How transactions over several stores ended, in the store that decides: who inserts the row first has decided.
DECISION = Table(
    "decision",
    (Column("gid", "text"), Column("outcome", "text"), Column("at", "int")),  # commit, abort
    ("gid",),
    of_tenant=False,
    copied=False,
    policies=_SEVERAL,
)
# What operators did (`threads/actions.py`). Neither a restore nor a snapshot changes what was done.
OPERATOR_ACTION = Table(
    "operator_action",
    (
        Column("id", "int"),  # time first
        Column("at", "int"),  # microseconds since 1970
        Column("who", "text"),
        Column("action", "text"),
        Column("subject", "text"),
        Column("details", "text", null=True, encrypted=("id",)),  # JSON
    ),
    ("id",),
    (Index("operator_action_subject", "tenant, subject, id"),),
    versioned=False,
)
ACTION_DETAILS = OPERATOR_ACTION.encrypted("details")
# Whether a tenant's data is encrypted: reads as None with its key, and without keys is an error.
HAS_KEY = EncryptedColumn("tenant_key.wrapped_by", "tenant")

DOMAIN = Domain(
    "store",
    (META, COUNTER, TENANT, TENANT_ROLE, TENANT_KEY, COPY, SIZE_SAMPLE, PREPARED, DECISION, OPERATOR_ACTION),
    changes=(
        SchemaChange(
            sqlite="INSERT INTO counter (one, number) VALUES (1, 0)",
            postgres=f"CREATE SEQUENCE number;{RIGHTS}",
        ),
    ),
)
