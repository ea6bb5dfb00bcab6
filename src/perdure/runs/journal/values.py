"""Which large values (`perdure.External`) the rows of a run refer to. The rows of a run go with it, and so do these.

Kinds: `OF_VALUE`, the arguments and the outcome, which stay as long as the run; `OF_MAIL`, messages to the run; and
`OF_JOURNAL`, which ends with the journal. A use may be there before the row that refers to the value, never after it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from perdure.runs.tables import OF_JOURNAL, OF_MAIL, OF_VALUE
from perdure.storage.program import Batch, Rows, Sql, Statement
from perdure.threads.external_rows import use_each

__all__ = ["COPY", "DROP", "DROP_HISTORY", "OF_JOURNAL", "OF_MAIL", "OF_VALUE", "refer", "use"]

_INTO = "INSERT INTO run_external (tenant, run, kind, hash)"
_USE = Sql(f"{_INTO} VALUES (:tenant, :run, :kind, :hash) ON CONFLICT (tenant, run, hash, kind) DO NOTHING")
# A fork begins with the arguments of its origin.
COPY: Final = Sql(
    f"""{_INTO} SELECT tenant, CAST(:run AS bigint), kind, hash FROM run_external
    WHERE tenant = :tenant AND run = :origin AND kind = '{OF_VALUE}' ON CONFLICT (tenant, run, hash, kind) DO NOTHING"""
)
DROP: Final = Sql("DELETE FROM run_external WHERE tenant = :tenant AND run = :run AND kind = :kind")
DROP_HISTORY: Final = Sql(f"DELETE FROM run_external WHERE tenant = :tenant AND run = :run AND kind <> '{OF_VALUE}'")


def use(tenant: int, run: int, kind: str, key: bytes) -> Statement:
    """Return the statement that writes a use. The caller must know that the value stays until then."""
    return _USE(tenant=tenant, run=run, kind=kind, hash=key)


def refer(tenant: int, run: int, kind: str, keys: Sequence[bytes], now: int) -> Generator[Batch, list[Rows], None]:
    """Write that a run refers to values, inside another transaction. Raises Retired."""
    yield from use_each(tenant, keys, now, lambda key: use(tenant, run, kind, key))
