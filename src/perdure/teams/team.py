"""`Team`: declare agents, send them messages, let them work, look at them. Each operation is blocking and async."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from perdure.errors import NotFound, UsageError
from perdure.runs.calls.messages import put_mail
from perdure.runs.engine import flows
from perdure.runs.execution.turn import ATTEMPTS, AgentOptions, member_name
from perdure.runs.functions.specs import add_durable
from perdure.runs.journal.entries import compress
from perdure.runs.journal.rows import FINISHED
from perdure.snapshots.handle import Snapshot, find_snapshot, own_snapshot
from perdure.snapshots.store import SnapshotStore
from perdure.storage.program import Flow, Program, read, write
from perdure.storage.twins import awaited, blocking
from perdure.teams import letters, members
from perdure.teams.channels import refuse_linked
from perdure.teams.letters import DeadLetter
from perdure.teams.members import Declared, MemberInfo, roster_of
from perdure.teams.snapshots import TeamSnapshot
from perdure.threads.actions import noted
from perdure.threads.context import Handle
from perdure.values.codec import encode

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.runs.workers.worker import Worker
    from perdure.teams.restoring import TeamRestore
    from perdure.teams.rewinding import TeamRewind

F = TypeVar("F", bound=Callable[..., Any])
Policy = Literal["retry", "dead_letter", "stop", "escalate"]


class Team(Handle):
    """Agents that send each other messages. `store.team(name)` returns it.

    An agent is a durable run. It handles one message at a time, and each turn is one transaction: its message is taken,
    its state saved, and what it sends arrives, or nothing of that happens.
    """

    def __init__(self, whole: Store, name: str) -> None:
        self._whole, self._context = whole, whole._context
        self.name = members.check_member(name)

    def __repr__(self) -> str:
        return f"<Team {self.name!r}>"

    # --- who is in it

    @overload
    def agent(self, fn: F, /) -> F: ...

    @overload
    def agent(
        self,
        fn: object = ...,
        /,
        *,
        name: str | None = ...,
        state: Any = ...,
        capacity: int | None = ...,
        attempts: int = ...,
        supervisor: str | Callable[..., Any] | None = ...,
        policy: Policy = ...,
    ) -> Callable[[F], F]: ...

    def agent(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        state: Any = None,
        capacity: int | None = None,
        attempts: int = ATTEMPTS,
        supervisor: str | Callable[..., Any] | None = None,
        policy: Policy = "retry",
    ) -> Any:
        """Make a function an agent: it gets its state, which it changes, and one message. It may be async.

        The team gets a member of the function's name, or `name`, with `state` (default: an empty dict). A graph or an
        agent of a framework is one too, `team.agent(graph, name="writer")`: its input is the message, its output the
        answer.
        What the function returns answers `perdure.call`. `capacity` is how many messages may wait for it: senders
        outside get MailboxFull then, and members slow down. A message whose handler fails, or whose process dies, is
        tried `attempts` times, with growing pauses. Then its effects are undone and it becomes a dead letter (`dead`);
        the `supervisor`, a member, gets a message about it. With the policy "dead_letter" the first error is enough,
        with "stop" the agent stops until a person resumes it, and with "escalate" the supervisor gets the message too.
        """
        boss = None if supervisor is None else members.check_member(member_name(supervisor))
        options = AgentOptions(attempts, policy, boss)
        members.check_options(capacity, options)

        def declare(agent: Any) -> Any:
            handler = members.handler_of(agent, name)
            chosen = members.check_member(name or handler.__name__)
            spec = members.declare(handler, self.name, chosen, options)
            add_durable(spec)
            first = encode({} if state is None else state, self._context.codec)
            declared = Declared(spec, first, capacity)
            roster = roster_of(self._context, self.name)
            roster.declared[chosen] = declared
            roster.existing.discard(chosen)
            handler.perdure_member, handler.perdure_agent = chosen, declared
            return handler

        return declare if fn is None else declare(fn)

    @blocking
    def spawn(self, agent: Callable[..., Any], name: str) -> Flow[None]:
        """Add a member that runs an agent's function under a name of its own. One that is there stays as it is.

        One that has left comes back, with the state that it had. Its dead letters can be sent to it again."""
        declared = getattr(agent, "perdure_agent", None)
        if not isinstance(declared, Declared) or not declared.spec.name.startswith(f"{self.name}/"):
            raise UsageError(f"{agent!r} is no agent of team {self.name!r}: put @team.agent above it")
        return members.add_member(self._context, self.name, name, declared, returns=True)

    aspawn = awaited(spawn)

    @blocking
    def leave(self, member: str | Callable[..., Any], *, who: str | None = None) -> Flow[int]:
        """Remove a member, when its turn is over. Messages that wait for it become dead letters; return how many.

        Messages that are sent to it later become dead letters too. `who` is recorded in `store.ops.actions()`.
        """
        name = members.check_member(member_name(member))
        leaving = letters.leave(self._context, self.name, name)
        return noted(self._context, who, "leave", f"member {self.name}/{name}", leaving)

    aleave = awaited(leave)

    @blocking
    def members(self) -> Flow[list[MemberInfo]]:
        """List the members, in the order they joined, with how many messages wait for each. Raises NotFound."""
        yield from self._ensure()
        return (yield from members.list_members(self._context, self.name))

    amembers = awaited(members)

    # --- messages

    @blocking
    def send(
        self, member: str | Callable[..., Any], message: Any, *, key: str | None = None, who: str | None = None
    ) -> Flow[None]:
        """Send a message to a member, from outside. Messages with the same `key` arrive once.

        Raises MailboxFull if as many messages wait as the member's `capacity` allows, and NotFound. `who` is recorded
        in `store.ops.actions()`. Inside a turn, use `perdure.send`.
        """
        name = members.check_member(member_name(member))
        yield from self._ensure()
        sending = flows.send(self._context, f"{self.name}/{name}", message, "", key)
        return (yield from noted(self._context, who, "send", f"member {self.name}/{name}", sending))

    asend = awaited(send)

    @blocking
    def broadcast(self, message: Any, *, who: str | None = None) -> Flow[int]:
        """Send a message to all members, or to none if a box is full. Return how many got it."""
        yield from self._ensure()
        tenant, root = yield from members.find_team(self._context, self.name)
        ctx = self._context
        text, key, now = compress(encode(message, ctx.codec)), ctx.entropy(12).hex(), ctx.clock_us()

        def op() -> Program[int]:
            everyone = [row for row in (yield from members.member_rows(tenant, root.run)) if row.status not in FINISHED]
            for row in everyone:  # by their numbers, which is the lock order of all writers
                yield from put_mail(tenant, row.id, "", key, text, now)
            return len(everyone)

        count: int = yield from noted(ctx, who, "send", f"team {self.name}", write(op))
        return count

    abroadcast = awaited(broadcast)

    @blocking
    def dead(self, member: str | Callable[..., Any] | None = None) -> Flow[list[DeadLetter]]:
        """List the dead letters of a member, or of all: messages that failed for good, the oldest first.

        Each has `message`, `error`, and `resend(message=…)` to send it once more, as it is or corrected."""
        name = None if member is None else members.check_member(member_name(member))
        return letters.dead(self._context, self.name, name)

    adead = awaited(dead)

    # --- work

    def work(self, *, until_idle: bool = False, concurrency: int = 8, poll_s: float = 0.5) -> None:
        """Let the agents that this process has declared work: until stopped, or with `until_idle` until none is due.

        It is a `perdure.Worker` of these agents alone. `perdure worker app.py` runs teams too, among other runs."""
        self._run(self._ensure())
        self._worker(concurrency, poll_s).run(until_idle=until_idle)

    async def awork(self, *, until_idle: bool = False, concurrency: int = 8, poll_s: float = 0.5) -> None:
        """`work`, awaited."""
        await self._arun(self._ensure())
        await self._worker(concurrency, poll_s).arun(until_idle=until_idle)

    def _worker(self, concurrency: int, poll_s: float) -> Worker:
        from perdure.runs.workers.worker import Worker

        agents = [_TeamAgent(one.spec) for one in roster_of(self._context, self.name).declared.values()]
        if not agents:
            raise NotFound(f"this process has no agent of team {self.name!r}: declare one with @team.agent")
        return Worker(self._whole, agents, concurrency=concurrency, poll_s=poll_s)

    def _ensure(self) -> Flow[None]:
        """Create the declared members that do not exist yet."""
        return members.ensure_members(self._context, self.name)

    # --- its past

    @blocking
    def snapshot(
        self,
        name: str | None = None,
        *,
        note: str | None = None,
        keep_until: datetime | None = None,
        who: str | None = None,
    ) -> Flow[TeamSnapshot]:
        """Cut through the team while it works: the state of every member, and the messages in flight between them.

        It is a snapshot of the store, which takes milliseconds and stops no agent. See `store.snapshot`."""
        snap = yield from SnapshotStore(self._whole).taking(name, note, keep_until, who)
        return TeamSnapshot(self._whole, self.name, snap)

    asnapshot = awaited(snapshot)

    @blocking
    def restore(
        self,
        snapshot: TeamSnapshot | Snapshot | str,
        *,
        keys: Literal["same", "new"] | None = None,
        dry_run: bool = False,
        who: str | None = None,
    ) -> Flow[TeamRestore]:
        """Take all members back to a snapshot, in one transaction, while they work: states, boxes, turns, child runs.

        Members that joined since are removed. This is refused if effects ran since: `effects` of a `dry_run` lists
        them. `keys="same"` lets them run again with the same idempotency keys, `keys="new"` with new ones. A snapshot
        is taken first: `undo` of the result. Threads and memory of others stay. `who` is recorded in
        `store.ops.actions()`.
        """
        from perdure.teams.restoring import restore

        snap = yield from self._find(snapshot)
        yield from read(partial(refuse_linked, (yield from self._context.tenant()) or 0, self.name))
        work = restore(self._whole, self.name, snap, keys, dry_run=dry_run)
        by = None if dry_run else who
        return (yield from noted(self._context, by, "restore", f"team {self.name}", work, snapshot=snap.name))

    arestore = awaited(restore)

    @blocking
    def rewind(
        self,
        member: str | Callable[..., Any],
        *,
        turn: int,
        keys: Literal["same", "new"] | None = None,
        dry_run: bool = False,
        who: str | None = None,
    ) -> Flow[TeamRewind]:
        """Take a member back to one of its turns, with the members that must fall with it, in one transaction.

        A member falls if it took a message that is now unsent: `falls` of the result says who, how far and why.
        Messages that the undone turns took wait again. It is refused if effects ran in undone turns; `keys` as in
        `restore`. It needs no snapshot, and reaches as far back as retention keeps messages.
        """
        from perdure.teams.rewinding import rewind_member

        name = members.check_member(member_name(member))
        if not isinstance(turn, int) or turn < 0:
            raise UsageError(f"turn={turn!r}: the number of a turn, 0 for the beginning")
        work = rewind_member(self._context, self.name, name, turn, keys, dry_run=dry_run)
        by = None if dry_run else who
        return (yield from noted(self._context, by, "rewind", f"member {self.name}/{name}", work, turn=turn))

    arewind = awaited(rewind)

    def _find(self, snapshot: TeamSnapshot | Snapshot | str) -> Flow[Snapshot]:
        return own_snapshot(self._whole, snapshot.snapshot if isinstance(snapshot, TeamSnapshot) else snapshot)

    @blocking
    def get_snapshot(self, name: str) -> Flow[TeamSnapshot]:
        """Return a snapshot by its name, as this team sees it. Raises NotFound."""
        return TeamSnapshot(self._whole, self.name, (yield from find_snapshot(self._whole, name)))

    aget_snapshot = awaited(get_snapshot)

    # --- what it has done

    @blocking
    def diagram(self, at: str | None = None) -> Flow[str]:
        """Return a drawing as SVG: members are lines, turns boxes, messages arrows. `at` draws a snapshot's cut."""
        from perdure.teams.history import draw

        return draw(self._whole, self.name, at)

    adiagram = awaited(diagram)

    @blocking
    def explain(self) -> Flow[str]:
        """Say in words which ways of checkpointing the team has, and what each costs."""
        from perdure.teams.history import tell

        return tell(self._whole, self.name)

    aexplain = awaited(explain)


class _TeamAgent:
    """An agent as a Worker takes it."""

    def __init__(self, spec: Any) -> None:
        self.perdure_durable = spec

    def __call__(self, *args: Any) -> Any:
        return self.perdure_durable.fn(*args)
