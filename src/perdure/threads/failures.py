"""Failures that autosave observes: sessions of a thread that ended without an end, and how long sessions ran.

The thread's row has the sums and a mark of the open session. The mark is written with the first save of a session and
removed at its end: two small commits per session. A mark that the next session finds is a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import orjson

from perdure.storage.program import Batch, Flow, Program, Sql, read, write
from perdure.threads.autosave_policies import Adaptive

_GET = Sql("SELECT autosave, updated_at FROM thread WHERE tenant = :tenant AND thread = :thread")
_SET = Sql("UPDATE thread SET autosave = :autosave WHERE tenant = :tenant AND thread = :thread")
_US = 1_000_000


@dataclass(frozen=True, slots=True)
class AutosaveInfo:
    """What adaptive autosave has measured on a thread, and the interval that follows from it."""

    failures: int = 0
    uptime_s: float = 0.0  # of all sessions that have ended
    mtbf_s: float = 0.0  # the mean time between failures: measured, beginning with that of the policy
    cost_s: float = 0.0  # of the last save
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A session of adaptive autosave: what was measured before it, when it began, and its mark."""

    before: AutosaveInfo
    began_us: int
    mark: str
    thread: int = 0  # 0: the thread does not exist yet
    tenant: int = 0

    def policy(self, policy: Adaptive) -> Adaptive:
        """Return the policy with the measured mean time between failures.

        The policy's own counts as one failure after that time, so it rules until more is known.
        """
        mean = (policy.mtbf_s + self.before.uptime_s) / (1 + self.before.failures)
        return replace(policy, mtbf_s=mean)


def read_info(tenant: int, thread: int) -> Flow[AutosaveInfo | None]:
    """Return what is known of a thread, without its open session; None if adaptive autosave was never used on it."""
    info, _, _ = yield from read(partial(_stored, tenant, thread))
    return info


def begin(tenant: int, thread: int, now: int, mark: str, is_ours: Callable[[str], bool]) -> Flow[Session]:
    """Return a new session. An open one that no state of this process has (`is_ours`) has failed."""
    info, open_, updated_at = yield from read(partial(_stored, tenant, thread))
    info = info or AutosaveInfo()
    if open_ and not is_ours(open_[0]):
        ran_s = max(0, updated_at - open_[1]) / _US
        info = replace(info, failures=info.failures + 1, uptime_s=info.uptime_s + ran_s)
    return Session(info, now, mark, thread, tenant)


def opened(session: Session, policy: Adaptive, cost_s: float) -> Flow[None]:
    """Mark a session as open."""
    info = replace(session.before, mtbf_s=policy.mtbf_s, cost_s=cost_s, interval_s=policy.interval_s(cost_s))
    yield from write(partial(_put, session, info, True))


def ended(session: Session, policy: Adaptive, cost_s: float, now: int) -> Flow[None]:
    """Remove the mark of a session and add its time. Do nothing if another session has begun meanwhile."""
    ran_s = max(0, now - session.began_us) / _US
    info = replace(session.before, uptime_s=session.before.uptime_s + ran_s, mtbf_s=policy.mtbf_s)
    info = replace(info, cost_s=cost_s, interval_s=policy.interval_s(cost_s))
    yield from write(partial(_put, session, info, False))


def _stored(tenant: int, thread: int) -> Program[tuple[AutosaveInfo | None, list[Any], int]]:
    [rows] = yield Batch(_GET(tenant=tenant, thread=thread))
    if not rows or rows[0][0] is None:
        return None, [], 0
    fields = orjson.loads(rows[0][0])
    return AutosaveInfo(**fields["info"]), fields["open"], rows[0][1]


def _put(session: Session, info: AutosaveInfo, is_open: bool) -> Program[None]:
    where = {"tenant": session.tenant, "thread": session.thread}
    if not is_open:
        _, open_, _ = yield from _stored(**where)
        if open_[:1] != [session.mark]:
            return
    marked = [session.mark, session.began_us] if is_open else []
    text = orjson.dumps({"info": asdict(info), "open": marked}).decode()
    yield Batch(_SET(**where, autosave=text), last=True)
