"""What a child process does in the tests of moving runs: export or import, and die at a named step of it."""

from __future__ import annotations

import os
import signal
from typing import Any

import perdure
from perdure.runs.moving.exporting import Export
from perdure.runs.moving.importing import Import
from perdure.testing.processes import Say


def move(say: Say, url: str, tenant: str, what: str, path: str, die_at: str) -> None:
    """`die_at` names a method of Export or Import, and whether to die before it or after: "mark after"."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    kind: Any = Export if what == "export" else Import
    name, _, when = die_at.partition(" ")
    if name:
        setattr(kind, name, _dying(getattr(kind, name), when, kill))
    store = perdure.open(url).tenant(tenant)
    if what == "export":
        store.ops.export_run("trip", path)
    else:
        store.ops.import_run(path)
    say("done")


def _dying(method: Any, when: str, kill: Any) -> Any:
    def wrapped(self: Any) -> Any:
        if when == "before":
            kill()
        found = method(self)
        if hasattr(found, "send"):  # a flow: it dies when that has ended
            return _flow(found, kill)
        kill()
        return found

    return wrapped


def _flow(flow: Any, kill: Any) -> Any:
    found = yield from flow
    kill()
    return found
