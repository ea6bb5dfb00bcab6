"""Vectors of memory in PostgreSQL's extension pgvector, for scopes that are too large for the process (`pgvector.sql`).

Triggers write the index in the transaction of each put, so it is never behind. It has the vectors in the clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from perdure.errors import UsageError
from perdure.log.erase import scrub
from perdure.memory.labels import below
from perdure.memory.large import Near, NearestQuery, SearchIndex
from perdure.storage.program import Batch, Driver, Flow, Program, Sql, fetch, read

if TYPE_CHECKING:
    from perdure.storage.postgres.driver import PostgresDriver

# Of the live store alone: at a snapshot another schema comes first.
_IS_THERE = Sql(postgres="SELECT to_regproc(quote_ident(current_schema()) || '.memory_nearest') IS NOT NULL")
# Of the store and of the extension, quoted.
_SCHEMAS = """SELECT quote_ident(current_schema()), quote_ident(n.nspname)
    FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"""
_KEYS = Sql("SELECT EXISTS (SELECT 1 FROM tenant_key)")
_NEAREST = Sql(
    postgres="SELECT id, cosine FROM memory_nearest(:tenant, :path, :below, :model, :wanted, :limit, :exact)"
)


class PgvectorIndex:
    """The index that `perdure memory index` makes."""

    def nearest(self, wanted: NearestQuery) -> Flow[list[Near]]:
        return (yield from read(partial(_nearest, wanted)))

    def forget(self, tenant: int, ids: Sequence[int], full: bool) -> Flow[list[str]]:
        """The rows went with their vectors, in the same transaction: they are scrubbed from the files."""
        return (yield from scrub("postgres", full, ["memory_ann"]))


def _nearest(wanted: NearestQuery) -> Program[list[Near]]:
    params = {**wanted._asdict(), "below": below(wanted.path)}
    params["wanted"] = params.pop("vector")
    for exact in (False, True):  # a graph gives up early if few of what it visits belong to the scope
        [found] = yield Batch(_NEAREST(**params, exact=exact))
        if len(found) >= wanted.limit:
            break
    return [Near(id, cosine) for id, cosine in found]


def pgvector_of(driver: Driver) -> Flow[SearchIndex | None]:
    """The index of a database, if it was made."""
    if driver.dialect != "postgres":
        return None
    [(is_there,)] = yield from fetch(_IS_THERE)
    return PgvectorIndex() if is_there else None


def make_pgvector(driver: Driver) -> Flow[None]:
    """Make the index, or bring it up to date with the models in use. Raises UsageError."""
    if driver.dialect != "postgres":
        raise UsageError("pgvector is an extension of PostgreSQL: a store in a file can use QdrantIndex")
    [(is_encrypted,)] = yield from fetch(_KEYS)
    if is_encrypted:
        raise UsageError("an index of pgvector has vectors in the clear, and this store is encrypted: nothing was made")
    _run_script(driver.capabilities.base)  # type: ignore[arg-type]


def _run_script(driver: PostgresDriver) -> None:
    """On a connection of its own: it may take minutes, longer than any timeout."""
    import psycopg

    script = files("perdure.memory").joinpath("pgvector.sql").read_text()
    try:
        with driver.connect_alone() as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
            [(store, vector)] = connection.execute(_SCHEMAS).fetchall()
            connection.execute(script.replace("{store}", store).replace("{vector}", vector).encode())
    except psycopg.errors.FeatureNotSupported as error:
        raise UsageError(f"the server has no extension pgvector: install it there ({error})") from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise UsageError(f"only the store's owner can make the index ({error.diag.message_primary})") from error
