"""Agreement on era, cut and members: one value that is changed by compare-and-set.

`RowRegister` is a row of one store: if that store is away, no cut starts and no store joins; messages still flow.
`NatsRegister` is a key of NATS JetStream, which copies it to three servers by Raft: the loss of one costs seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from perdure.errors import ExtraMissing, Unavailable, UsageError
from perdure.storage.program import Batch, Flow, Program, Sql, either, read, write
from perdure.teams.views import TeamView
from perdure.threads.context import StoreContext

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue

T = TypeVar("T")
_ATTEMPT_S = 3.0
_READ = Sql("SELECT view FROM team_view WHERE tenant = :tenant AND team = :team")
_SWAP = Sql(
    """INSERT INTO team_view (tenant, team, revision, view) VALUES (:tenant, :team, :revision, :view)
    ON CONFLICT (tenant, team) DO UPDATE SET revision = excluded.revision, view = excluded.view
        WHERE team_view.revision = :before RETURNING 1"""
)


class Register(Protocol):
    """Where a team keeps its `TeamView`."""

    def read(self) -> Flow[TeamView]:
        """Return the newest view; an empty one if there is none."""
        ...

    def swap(self, old: TeamView, new: TeamView) -> Flow[bool]:
        """Replace a view by another one if it is still the newest. Return whether it was."""
        ...


def change(register: Register, alter: Callable[[TeamView], TeamView]) -> Flow[TeamView]:
    """Change the view, again and again until no other writer was faster. Return the new one."""
    while True:
        old = yield from register.read()
        new = alter(old)
        if new is old or (yield from register.swap(old, new)):
            return new


class RowRegister:
    """A register in a store's database."""

    def __init__(self, context: StoreContext, team: str) -> None:
        self._context, self._team = context, team

    def read(self) -> Flow[TeamView]:
        tenant = yield from self._context.tenant()
        return TeamView() if tenant is None else (yield from read(partial(self._read, tenant)))

    def swap(self, old: TeamView, new: TeamView) -> Flow[bool]:
        tenant = yield from self._context.ensure_tenant()
        return (yield from write(partial(self._swap, tenant, old, new)))

    def _read(self, tenant: int) -> Program[TeamView]:
        [rows] = yield Batch(_READ(tenant=tenant, team=self._team), last=True)
        return TeamView.decode(rows[0][0].encode()) if rows else TeamView()

    def _swap(self, tenant: int, old: TeamView, new: TeamView) -> Program[bool]:
        about = {"tenant": tenant, "team": self._team, "view": new.encode().decode()}
        [swapped] = yield Batch(_SWAP(**about, revision=new.revision, before=old.revision), last=True)
        return bool(swapped)


class NatsRegister:
    """A register in a bucket of NATS JetStream. One connection, on a thread of its own, serves all callers.

    `servers` are URLs of one cluster. `timeout_s` is how long a call waits for a leader before it raises Unavailable.
    """

    def __init__(
        self,
        servers: Sequence[str],
        team: str,
        *,
        bucket: str = "perdure",
        replicas: int = 3,
        timeout_s: float = 15.0,
    ) -> None:
        if isinstance(servers, str) or not servers:
            raise UsageError("servers=: a list of URLs, such as ['nats://a:4222', 'nats://b:4222', 'nats://c:4222']")
        try:
            import nats.js.errors
        except ImportError as error:
            raise ExtraMissing("a register in NATS", "nats") from error
        self._errors = nats.js.errors
        self._servers, self._bucket, self._replicas, self._timeout_s = list(servers), bucket, replicas, timeout_s
        self._key = f"team.{team.encode().hex()}"  # a key has few characters, a team's name any
        self._client: Client | None = None
        self._values: KeyValue | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="perdure-nats", daemon=True)
        self._thread.start()

    def read(self) -> Flow[TeamView]:
        return self._call(self._get_view)

    def swap(self, old: TeamView, new: TeamView) -> Flow[bool]:
        # The token tells our value from an equal one of another process, if the answer is lost.
        return self._call(partial(self._put_view, old, new, secrets.token_bytes(16)))

    def close(self) -> None:
        """Close the connection and end its thread. May be called twice."""
        if not self._thread.is_alive():
            return
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Callable[[], Awaitable[T]]) -> Flow[T]:
        if not self._thread.is_alive():
            raise UsageError("this register was closed")

        def start() -> Any:
            return asyncio.run_coroutine_threadsafe(self._patiently(work), self._loop)

        return either(lambda: start().result(), lambda: asyncio.wrap_future(start()))

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat work while the cluster has no leader. Each attempt may be repeated whatever became of it."""
        import nats.errors

        give_up = time.monotonic() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout(min(_ATTEMPT_S, self._timeout_s)):  # nats.connect would try forever
                    return await work()
            except (TimeoutError, nats.errors.Error, OSError) as error:
                if time.monotonic() > give_up:
                    raise Unavailable(
                        f"the register of the team cannot be reached ({error}): are the NATS servers "
                        f"{', '.join(self._servers)} up, and more than half of them?"
                    ) from error
            await asyncio.sleep(0.05)

    async def _bucket_values(self) -> KeyValue:
        if self._client is None:
            import nats

            self._client = await nats.connect(
                servers=self._servers,
                connect_timeout=1,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,
                error_cb=_ignore,  # the caller of a call that fails is told; else each lost server is logged
            )
        if self._values is None:
            context = self._client.jetstream(timeout=0.5)
            try:
                self._values = await context.key_value(self._bucket)
            except self._errors.BucketNotFoundError:
                # Not `direct`: a follower may answer such a read with an old value.
                self._values = await context.create_key_value(
                    bucket=self._bucket, replicas=self._replicas, history=1, direct=False
                )
        return self._values

    async def _entry(self) -> tuple[int, bytes, TeamView]:
        """Return the number that a change must name, who wrote the value, and the view."""
        try:
            entry = await (await self._bucket_values()).get(self._key)
        except self._errors.KeyNotFoundError:
            return 0, b"", TeamView()
        value = entry.value or b""
        return entry.revision or 0, value[:16], TeamView.decode(value[16:])

    async def _get_view(self) -> TeamView:
        return (await self._entry())[2]

    async def _put_view(self, old: TeamView, new: TeamView, token: bytes) -> bool:
        last, author, current = await self._entry()
        if author == token:  # an earlier attempt wrote it, and its answer was lost
            return True
        if current != old:
            return False
        try:
            await (await self._bucket_values()).update(self._key, token + new.encode(), last=last)
        except self._errors.KeyWrongLastSequenceError:
            return (await self._entry())[1] == token
        return True


async def _ignore(_: Exception) -> None:
    """Take what nats-py would log."""
