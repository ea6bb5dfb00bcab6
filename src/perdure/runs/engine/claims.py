"""The claims of this process on runs, and their release.

A claim is entered before it is sent to the database. It ends when its execution has parked or finished the run. Any
other exit gives it up: an error, Ctrl-C, a cancelled task, a dropped flow. Giving up does no I/O: a thread queues the
run again later. `holds` returns False at once, and this process may claim the run again.

Ctrl-C and SystemExit in a task end `asyncio.run`, but may never end the coroutines that await that task. A blocking
caller therefore leaves the run after its loop has ended (local.py). If the application closes the loop, the thread that
renews leases leaves the run (runtime.py).
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from perdure.errors import PerdureError, ReadOnlyStore, StoreClosed
from perdure.runs.journal import rows
from perdure.storage.events import event, said
from perdure.storage.program import Flow, Transaction, either
from perdure.threads.context import StoreContext

T = TypeVar("T")
_WAIT_S = 5.0  # how long an interrupted caller waits for the release
_RETRY_S = 0.5
_log = logging.getLogger("perdure")


class Claim:
    """One claim of a run: its owner and its fence."""

    def __init__(self, ctx: StoreContext, tenant: int, run_id: str, fence: int, owner: str, lease_us: int) -> None:
        self.ctx, self.tenant, self.run_id, self.fence, self.owner = ctx, tenant, run_id, fence, owner
        self.until_s = time.monotonic() + lease_us / 1e6
        self.later_us = 0  # delay before a run that was given up is due again
        self.executing = False  # True: the execution gives it up, not the flow that claimed it
        self.ended = False  # the run was parked or finished
        self.released: Future[None] | None = None  # set when the claim is given up

    def __repr__(self) -> str:
        return f"<Claim of run {self.run_id!r}, fence {self.fence}>"


class Claims:
    """The claims of this process in one database."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], list[Claim]] = {}
        self._given_up: deque[Claim] = deque()
        self._releasing = False  # a thread empties `_given_up`
        # The garbage collector may drop a flow on any thread, under any lock, and so give up its claims. The lock is
        # therefore reentrant, and its holder waits for no other thread, not even for a thread to start.
        self._lock = threading.RLock()

    def enter(self, claim: Claim) -> Claim:
        """Hold a run from now on. Call this before the claim is sent to the database."""
        with self._lock:
            self._held.setdefault((claim.tenant, claim.run_id), []).append(claim)
        return claim

    def holds(self, tenant: int, run_id: str) -> bool:
        return (tenant, run_id) in self._held

    def begin(self, claim: Claim) -> bool:
        """Mark a claim as executing. Return False if it was given up before."""
        with self._lock:
            claim.executing = claim.released is None
            return claim.executing

    def leave(self, claim: Claim) -> None:
        """End a claim, or give it up if its run was neither parked nor finished."""
        with self._lock:
            if not self._remove(claim) or claim.ended:
                return
            claim.released = Future()
            self._given_up.append(claim)
            if not self._releasing:
                try:
                    _thread.start_new_thread(self._release_all, ())
                    self._releasing = True
                except RuntimeError:  # the interpreter is shutting down, and the owner ends with it
                    pass

    def settle(self) -> None:
        """Wait until the claims that were given up are released, for at most `_WAIT_S`."""
        wait(self._releases(), _WAIT_S)

    async def asettle(self) -> None:
        """Async version of `settle`."""
        if releases := self._releases():
            await _await_all(releases)

    def _releases(self) -> list[Future[None]]:
        return [claim.released for claim in list(self._given_up) if claim.released is not None]

    def _remove(self, claim: Claim) -> bool:
        key = (claim.tenant, claim.run_id)
        known = self._held.get(key, [])
        left = [one for one in known if one is not claim]
        if left:
            self._held[key] = left
        else:
            self._held.pop(key, None)
        return len(left) < len(known)

    def _release_all(self) -> None:
        while True:
            with self._lock:
                if not self._given_up:
                    self._releasing = False
                    return
                claim = self._given_up[0]
            if not self._release(claim) and time.monotonic() < claim.until_s:
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                self._given_up.popleft()
            if claim.released is not None:
                claim.released.set_result(None)

    def _release(self, claim: Claim) -> bool:
        """Queue the run again if the database still has this claim. Return False if the database did not answer."""
        with self._lock:  # another thread may have claimed the run with the same fence since
            held = self._held.get((claim.tenant, claim.run_id), ())
            if any(other.fence == claim.fence and other.owner == claim.owner for other in held):
                return True
        op = partial(
            rows.release,
            claim.tenant,
            claim.run_id,
            fence=claim.fence,
            owner=claim.owner,
            later=claim.later_us,
            now=claim.ctx.clock_us(),
        )
        try:
            claim.ctx.driver.run(Transaction(op, write=True))
        except (ReadOnlyStore, StoreClosed):
            return True
        except PerdureError as error:
            fields = event("run.not_released", run=claim.run_id, error=type(error).__name__)
            _log.warning("run %s could not be released yet: %s", claim.run_id, said(error), extra=fields)
            return False
        return True


class Hold:
    """The claims of one flow."""

    def __init__(self, ctx: StoreContext, claims: Claims, owner: str, lease_us: int) -> None:
        self._ctx, self._claims, self._owner, self._lease_us = ctx, claims, owner, lease_us
        self._entered: list[Claim] = []

    def enter(self, tenant: int, run_id: str, fence: int) -> Claim:
        claim = Claim(self._ctx, tenant, run_id, fence, self._owner, self._lease_us)
        self._entered = [*(one for one in self._entered if not one.ended), claim]
        return self._claims.enter(claim)

    def drop(self, claim: Claim) -> None:
        """End a claim that the database refused because another process has the run."""
        claim.ended = True
        self._claims.leave(claim)

    def leave(self) -> list[Future[None]]:
        """Give up the claims that are not executing. Return the releases under way."""
        for claim in self._entered:
            if not claim.executing:
                self._claims.leave(claim)
        return [claim.released for claim in self._entered if claim.released is not None]


def holding(hold: Hold, flow: Callable[[Hold], Flow[T]]) -> Flow[T]:
    """Drive a flow that claims runs. However it ends, give up the claims that are not executing."""
    try:
        return (yield from flow(hold))
    except GeneratorExit:
        raise
    except BaseException:
        if releases := hold.leave():
            yield from either(partial(wait, releases, _WAIT_S), partial(_await_all, releases))
        raise
    finally:
        hold.leave()


async def _await_all(releases: Sequence[Future[None]]) -> None:
    import asyncio

    await asyncio.wait([asyncio.wrap_future(one) for one in releases], timeout=_WAIT_S)
