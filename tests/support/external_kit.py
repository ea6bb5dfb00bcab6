"""Stores with large values in a folder, for tests: what is there, and what collection removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import perdure
from perdure.storage.program import Sql, fetch
from perdure.threads.externals import collect

_USES = ("SELECT count(*) FROM external_use", "SELECT count(*) FROM run_external")


def swept(store: perdure.Store) -> int:
    """Remove what nothing refers to, without waiting; return how many objects."""
    tenant = store._run(store._context.ensure_tenant())
    return store._run(collect(store._context, tenant, grace_us=0, kept_us=0))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def uses(store: perdure.Store) -> tuple[int, ...]:
    """Return how many uses by checkpoints and by runs there are."""
    return tuple(store._run(fetch(Sql(sql), tenant=None))[0][0] for sql in _USES)


class Interfering:
    """Objects that call something before or after each one is written."""

    def __init__(self, objects: Any, before: Any = None, after: Any = None) -> None:
        self.objects, self.before, self.after = objects, before, after

    def __str__(self) -> str:
        return str(self.objects)

    def put(self, name: str, data: bytes) -> None:
        if self.before is not None:
            self.before()
        self.objects.put(name, data)
        if self.after is not None:
            self.after()

    def get(self, name: str) -> bytes:
        return bytes(self.objects.get(name))

    def delete(self, name: str) -> None:
        self.objects.delete(name)
