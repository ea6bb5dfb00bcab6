"""The members of a team: declared by functions, stored as runs of one family.

The run at the top of the family stands for the team. No code runs for it. A member's run has the id TEAM/NAME, and its
state is the thread of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import NotFound, UsageError
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.execution.turn import AgentOptions
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal import rows
from perdure.runs.journal.entries import compress, decompress
from perdure.runs.journal.rows import FINISHED, NEVER, NewRun
from perdure.runs.run_table import TEAM, RunRow, Waiting
from perdure.runs.tables import INPUT
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Batch, Driver, Flow, Program, Rows, Sql, change, fetch, read, write
from perdure.threads import flows as threads
from perdure.threads.checks import check_name
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.models import moment
from perdure.threads.save_engine import PreparedSave
from perdure.threads.saves import Save
from perdure.values.codec import encode

ELSEWHERE = "perdure.elsewhere"  # of a member's run in a store where it does not live; its version says where it does
_MEMBERS = Sql(
    f"""SELECT {", ".join(f"r.{column}" for column in RunRow._fields)},
        (SELECT count(*) FROM mail m WHERE m.tenant = r.tenant AND m.run = r.run AND m.state = 0),
        (SELECT count(*) FROM mail m WHERE m.tenant = r.tenant AND m.run = r.run AND m.state = 2)
    FROM run r WHERE r.tenant = :tenant AND r.root = :root AND r.turn IS NOT NULL ORDER BY r.run""",
    opens=rows.RUN_ENCRYPTED,
)
_TEAMS = Sql(
    f"""SELECT r.id, r.created_at, r.run,
        (SELECT count(*) FROM run m WHERE m.tenant = r.tenant AND m.root = r.run AND m.turn IS NOT NULL)
    FROM run r WHERE r.tenant = :tenant AND r.function = '{TEAM}' ORDER BY r.created_at, r.run"""
)
_MAIL = Sql(
    """SELECT m.state, count(*) FROM run r JOIN mail m ON m.tenant = r.tenant AND m.run = r.run
    WHERE r.tenant = :tenant AND r.root = :root AND r.turn IS NOT NULL AND m.state IN (0, 2) GROUP BY m.state"""
)

_COME_BACK = Sql(
    f"""UPDATE run SET status = 'waiting', wake_at = {NEVER}, fence = fence + 1, owner = NULL, waiting = NULL,
        crashes = 0, keep_until = NULL, function = :function, version = :version, input = :input, changed_at = {{now}}
    WHERE tenant = :tenant AND run = :run""",
    seals={"input": INPUT},
)
_FORGET_OUTCOME = Sql("DELETE FROM run_value WHERE tenant = :tenant AND run = :run AND kind = 'outcome'")


@dataclass(frozen=True)
class TeamInfo:
    """A team when it was read."""

    name: str
    members: int
    waiting: int
    """how many messages wait for its members"""
    dead: int
    """how many dead letters it has"""
    created_at: datetime


@dataclass(frozen=True)
class MemberInfo:
    """A member of a team when it was read."""

    name: str
    function: str
    status: str
    """waiting (for a message, or in the middle of a turn), queued, running, paused, stuck; done if it has left"""
    turn: int
    """how many messages it has taken"""
    waiting: int
    """how many messages wait for it"""
    dead: int
    """how many of its messages are dead letters"""
    failures: int
    """how often its next message has failed"""
    waiting_for: Waiting | None
    joined_at: datetime

    @property
    def has_left(self) -> bool:
        return self.status in FINISHED


class Declared(NamedTuple):
    """An agent as its decorator declared it."""

    spec: DurableSpec
    state: bytes  # of a new member
    capacity: int | None


class Roster:
    """The agents that this process has declared for one team, and the members that it knows to exist."""

    def __init__(self) -> None:
        self.declared: dict[str, Declared] = {}
        self.existing: set[str] = set()


def _rosters(driver: Driver) -> dict[tuple[str, str], Roster]:
    del driver
    return {}


_all_rosters = PerDriver(_rosters)


def roster_of(ctx: StoreContext, team: str) -> Roster:
    """Return the roster of a tenant's team in this process."""
    return _all_rosters.of(ctx.driver).setdefault((ctx.tenant_name, team), Roster())


def check_member(name: object) -> str:
    """Return the name of a team or of a member. Raises UsageError."""
    checked = check_name(name, "member")
    if "/" in checked:
        raise UsageError(f"the name of a team or a member has no slash: {checked!r}")
    return checked


def check_options(capacity: Any, options: AgentOptions) -> None:
    """Raise UsageError for options of an agent that make no sense."""
    if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
        raise UsageError(f"capacity={capacity!r}: how many messages may wait, at least 1; None for any number")
    if not isinstance(options.attempts, int) or options.attempts < 1:
        raise UsageError(f"attempts={options.attempts!r}: how often a message is tried, at least 1")
    if options.policy not in ("retry", "dead_letter", "stop", "escalate"):
        raise UsageError(f'policy={options.policy!r}: "retry", "dead_letter", "stop" or "escalate"')
    if options.policy == "escalate" and options.supervisor is None:
        raise UsageError('policy="escalate" hands messages to a supervisor: say supervisor=')


def find_team(ctx: StoreContext, team: str) -> Flow[tuple[int, RunRow]]:
    """Return the tenant's number and the run that stands for a team. Raises NotFound."""
    tenant = yield from ctx.tenant()
    row = None if tenant is None else (yield from read(partial(rows.find, tenant, team)))
    if tenant is None or row is None or row.function != TEAM:
        raise NotFound(f"there is no team {team!r} in this store for this tenant; `perdure teams` lists them")
    return tenant, row


def ensure_team(ctx: StoreContext, team: str) -> Flow[tuple[int, RunRow]]:
    """Return the tenant's number and the run that stands for a team. Create it on first use."""
    tenant = yield from ctx.ensure_tenant()
    row = yield from read(partial(rows.find, tenant, team))
    if row is None:
        new = NewRun(team, TEAM, "", compress(b"{}"), b"", ctx.entropy(16), wake_at=NEVER, status="waiting")
        row, _ = yield from write(partial(rows.create, tenant, new, now=ctx.clock_us()))
    if row.function != TEAM:
        raise UsageError(f"{team!r} is the id of a run of {row.function}: give the team another name")
    return tenant, row


def add_member(ctx: StoreContext, team: str, name: str, declared: Declared, *, returns: bool = False) -> Flow[None]:
    """Create a member with its first state, in one transaction, unless it exists.

    With `returns`, one that has left comes back, with the state that it had."""
    tenant, root = yield from ensure_team(ctx, team)
    run_id = f"{team}/{check_member(name)}"
    there = yield from read(partial(rows.find, tenant, run_id))
    if there is None:
        cursor = Cursor(thread_name(run_id), merge={RUN_KEY: run_id}, found_nothing=True)
        saving = yield from Save(ctx, cursor, text=declared.state).prepare()
        new = NewRun(
            run_id, declared.spec.name, declared.spec.version, _args(ctx, declared), b"", ctx.entropy(16),
            parent=root.run, root=root.run, wake_at=NEVER, turn=0, status="waiting",
        )  # fmt: skip

        def op() -> Program[None]:
            yield Batch(rows.LOCK(tenant=tenant, run=root.run))  # a restore removes those that join meanwhile
            if (yield from rows.insert(tenant, new, now=ctx.clock_us())):
                yield from saving.program()

        yield from write(op)
    elif (there.turn is None and there.function != ELSEWHERE) or there.root != root.run:
        raise UsageError(f"{run_id!r} is the id of a run that is no member of the team: give the member another name")
    elif there.turn is not None and returns and there.status in FINISHED:
        first = yield from _state_to_return(ctx, there, declared)
        yield from write(partial(_come_back, tenant, there, first, declared.spec, ctx.clock_us()))


def _args(ctx: StoreContext, declared: Declared) -> bytes:
    return compress(encode({"capacity": declared.capacity}, ctx.codec))


def _state_to_return(ctx: StoreContext, row: RunRow, declared: Declared) -> Flow[PreparedSave | None]:
    """Return the first state of a member that comes back and has none: retention removed it."""
    cursor = Cursor(thread_name(row.id), merge={RUN_KEY: row.id})
    try:
        yield from threads.load(ctx, cursor)
        return None
    except NotFound:
        return (yield from Save(ctx, cursor, text=declared.state).prepare())


def _come_back(tenant: int, row: RunRow, saving: PreparedSave | None, spec: DurableSpec, now: int) -> Program[None]:
    key = {"tenant": tenant, "run": row.run}
    [locked] = yield Batch(rows.LOCK(**key))
    if RunRow._make(locked[0]).status in FINISHED:
        about = {"function": spec.name, "version": spec.version, "id": row.id, "now": now}
        yield Batch(_COME_BACK(**key, **about, input=b""), _FORGET_OUTCOME(**key))
        if saving is not None:
            yield from saving.program()


def ensure_members(ctx: StoreContext, team: str) -> Flow[None]:
    """Create the members that this process has declared and that do not exist.

    Members of these agents that exist, under whatever name, get the capacity that is declared now."""
    roster = roster_of(ctx, team)
    new = {name: declared for name, declared in roster.declared.items() if name not in roster.existing}
    for name, declared in new.items():
        yield from add_member(ctx, team, name, declared)
    if new:
        tenant, root = yield from find_team(ctx, team)
        args = {declared.spec.name: _args(ctx, declared) for declared in new.values()}
        for row in (yield from read(partial(_declared_otherwise, tenant, root.run, args))):
            about = {"run": row.run, "incarnation": row.incarnation, "args": args[row.function]}
            yield from change(rows.SET_ARGS(tenant=tenant, **about))
        roster.existing |= new.keys()


def _declared_otherwise(tenant: int, root: int, args: Mapping[str, bytes]) -> Program[list[RunRow]]:
    """Return the members of some functions whose stored arguments are not these."""
    members = [row for row in (yield from member_rows(tenant, root)) if row.function in args]
    answers = yield Batch(*(rows.ARGS_OF(tenant=tenant, run=row.run) for row in members))
    pairs = zip(members, answers, strict=True)
    return [row for row, [(old, _)] in pairs if decompress(old) != decompress(args[row.function])]


def list_teams(ctx: StoreContext) -> Flow[list[TeamInfo]]:
    """Return the teams of a tenant, the oldest first."""
    tenant = yield from ctx.tenant()
    teams = []
    for name, created_at, run, members in (yield from fetch(_TEAMS, tenant=tenant)) if tenant is not None else ():
        counts: dict[int, int] = dict((yield from fetch(_MAIL, tenant=tenant, root=run)))
        teams.append(TeamInfo(name, members, counts.get(0, 0), counts.get(2, 0), moment(created_at)))
    return teams


def list_members(ctx: StoreContext, team: str) -> Flow[list[MemberInfo]]:
    """Return the members of a team in the order they joined."""
    tenant, root = yield from find_team(ctx, team)
    rows = yield from fetch(_MEMBERS, tenant=tenant, root=root.run)
    return [_info(RunRow._make(row[:-2]), int(row[-2]), int(row[-1])) for row in rows]


def _info(row: RunRow, waiting: int, dead: int) -> MemberInfo:
    name = row.id.partition("/")[2]
    about = Waiting.of(row.waiting)
    return MemberInfo(
        name, row.function, row.status, row.turn or 0, waiting, dead, row.crashes, about, moment(row.created_at)
    )


def member_rows(tenant: int, root: int) -> Generator[Batch, list[Rows], list[RunRow]]:
    """Return the rows of a team's members, by their numbers."""
    [rows] = yield Batch(_MEMBERS(tenant=tenant, root=root))
    return [RunRow._make(row[:-2]) for row in rows]


def declare(fn: Callable[..., Any], team: str, name: str, options: AgentOptions) -> DurableSpec:
    """Return the spec of an agent's function. Its runs are found by TEAM/NAME."""
    return DurableSpec(fn, f"{team}/{name}", agent=options)


# By the package of a framework: what makes handlers of its graphs and agents. Adapters add themselves.
as_agents: dict[str, Callable[[Any], Any]] = {}


def handler_of(agent: Any, name: str | None) -> Any:
    """Return the handler of an agent: a function, or what the adapter of an object's framework makes of it."""
    if callable(agent) and hasattr(agent, "__code__"):
        return agent
    homes = [f"{base.__module__}." for base in type(agent).__mro__]
    for package, as_agent in as_agents.items():
        if any(home.startswith(f"{package}.") for home in homes):
            if name is None:
                raise UsageError("an agent of a framework needs a name in the team: team.agent(…, name='writer')")
            return as_agent(agent)
    raise UsageError(
        f"{agent!r} cannot be an agent: team.agent takes a function, or a graph or an agent of a framework whose "
        "adapter was imported"
    )
