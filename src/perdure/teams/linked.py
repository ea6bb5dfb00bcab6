"""`LinkedTeam`: one team in several stores that this process has open. It carries messages, cuts, restores and moves.

Each store works on its own, with its own workers. A process that has both ends open may carry. Several may at once,
because a frame is taken once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from perdure.errors import Busy, Damaged, NotFound, OutcomeUnknown, Unavailable, UsageError
from perdure.runs.execution.turn import member_name
from perdure.runs.journal.entries import decompress
from perdure.snapshots.handle import Snapshot, find_snapshot, list_snapshots
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive, either, sleep
from perdure.storage.twins import awaited, blocking
from perdure.teams.members import ELSEWHERE, check_member
from perdure.teams.parcels import Letter, decode_parcel
from perdure.teams.post import Post
from perdure.teams.protocol import CutHere, contradiction, in_flight
from perdure.teams.register import Register, RowRegister, change
from perdure.teams.snapshots import MessageInFlight, TeamSnapshot
from perdure.teams.views import Started, TeamView
from perdure.threads.checks import check_name
from perdure.threads.context import Handle
from perdure.values.codec import decode

if TYPE_CHECKING:
    from perdure.teams.restoring import TeamRestore
    from perdure.teams.team import Team

T = TypeVar("T")
_log = logging.getLogger("perdure")
_AWAY_S = 1.0  # before a store that is away is asked again


def link(teams: Mapping[str, Team], *, register: Register | None = None) -> LinkedTeam:
    """Make one team of the teams of one name in several stores: `link({"east": east.team("research"), …})`.

    Each store gets the name that it has here. Every member can then be sent to from each of the stores. The first call
    links them; later ones, in any process, find them linked and announce members that are new. `register` is where they
    agree on cuts: by default a row of the first store, or a `NatsRegister`.
    """
    linked = LinkedTeam(teams, register)
    linked._run(linked._link())
    return linked


async def alink(teams: Mapping[str, Team], *, register: Register | None = None) -> LinkedTeam:
    """`link`, awaited."""
    linked = LinkedTeam(teams, register)
    await linked._arun(linked._link())
    return linked


def linked_already(here: Team, there: Team) -> tuple[LinkedTeam, str]:
    """Return the team of two stores that are linked, and the name of the second. Raises NotFound if they are not."""
    stores = [team._run(Post(team).part()).store for team in (here, there)]
    return LinkedTeam(dict(zip(stores, (here, there), strict=True))), stores[1]


@dataclass(frozen=True)
class LinkedSnapshot(Handle):
    """A cut through a team in several stores: one snapshot in each of them."""

    name: str
    cut: int
    stores: Mapping[str, Snapshot]
    _linked: LinkedTeam

    def __post_init__(self) -> None:
        object.__setattr__(self, "_context", self._linked._context)

    @blocking
    def in_flight(self) -> Flow[list[MessageInFlight]]:
        """Return the messages that were sent and not yet taken, in boxes and between stores."""
        return self._linked._in_flight(self)

    ain_flight = awaited(in_flight)

    def state(self, member: str) -> Any:
        """Return the state of a member at the cut. Raises NotFound."""
        run_id = f"{self._linked.name}/{member}"
        for snapshot in self.stores.values():
            if any(info.id == run_id and info.function != ELSEWHERE for info in snapshot.runs()):
                return snapshot.thread(f"run:{run_id}").load().state
        raise NotFound(f"there is no member {member!r} in the cut")


class LinkedTeam(Handle):
    """A team in several stores. `perdure.teams.link` returns it."""

    def __init__(self, teams: Mapping[str, Team], register: Register | None = None) -> None:
        names = {team.name for team in teams.values()}
        if len(teams) < 2 or len(names) != 1:
            raise UsageError("link the teams of one name in two or more stores: {'east': …, 'west': …}")
        self._posts = {check_name(store, "store"): Post(team) for store, team in teams.items()}
        first = next(iter(teams.values()))
        self.name, self._context = first.name, first._context
        self._register: Register = register or RowRegister(first._context, first.name)

    def __repr__(self) -> str:
        return f"<LinkedTeam {self.name!r} in {', '.join(self._posts)}>"

    def _on(self, store: str, flow: Flow[T]) -> Flow[T]:
        """Run a flow in one of the stores."""
        driver = self._posts[store]._context.driver
        return either(lambda: drive(driver, flow), lambda: adrive(driver, flow))

    def _link(self) -> Flow[None]:
        view = yield from change(self._register, self._joined)
        for store, post in self._posts.items():
            yield from self._on(store, post.join(store, view))
        for one, other in combinations(self._posts, 2):
            secret = yield from self._on(one, self._posts[one].secret_with(other))
            yield from self._on(other, self._posts[other].share(one, secret))
        for one, other in permutations(self._posts, 2):
            members = yield from self._on(one, self._posts[one].local_members())
            yield from self._on(other, self._posts[other].announce(members, one))

    def _joined(self, view: TeamView) -> TeamView:
        for store in self._posts:
            view = view.join(store)
        return view

    # --- messages

    @blocking
    def carry(self) -> Flow[int]:
        """Carry what waits between the stores, once in each direction. Return how many messages arrived.

        Raises BatchRefused if a store was put back to an old backup: restore the team to a cut then."""
        return self._carry()

    acarry = awaited(carry)

    def _carry(self) -> Flow[int]:
        view = yield from self._register.read()
        for store in self._posts:
            yield from self._follow(store, view)
        carried = 0
        for source, target in permutations(self._posts, 2):
            if (yield from self._on(source, self._posts[source].has_mail_for(target))):
                carried += yield from self._exchange(source, target)
        return carried

    @blocking
    def run(self, *, until_idle: bool = False, poll_s: float = 0.2) -> Flow[None]:
        """Carry messages until stopped, or with `until_idle` until none waits. It outlasts a store that is away."""
        return self._carry_on(until_idle, poll_s)

    arun = awaited(run)

    def _carry_on(self, until_idle: bool, poll_s: float) -> Flow[None]:
        while True:
            try:
                carried = yield from self._carry()
            except (Busy, Unavailable, OutcomeUnknown) as error:
                message = "no messages of team %s were carried, and it is tried again: %s"
                _log.warning(message, self.name, error, extra=event("team.not_carried"))
                yield from sleep(_AWAY_S)
                continue
            if not carried:
                if until_idle:
                    return
                yield from sleep(poll_s)

    def _exchange(self, source: str, target: str) -> Flow[int]:
        here, there = self._posts[source], self._posts[target]
        before = yield from self._on(source, here.acknowledged_by(target))
        data = yield from self._on(source, here.packing(target))
        answer = yield from self._on(target, there.taking(data))
        yield from self._on(source, here.taking(answer))
        return (yield from self._on(source, here.acknowledged_by(target))) - before

    def _follow(self, store: str, view: TeamView) -> Flow[None]:
        """Let a store reach the cut of the register, as it would on a batch that carries it."""
        post = self._posts[store]
        part = yield from self._on(store, post.part())
        if part.era < view.era or part.restoring:
            raise UsageError(
                f"team {self.name!r} was restored, and store {store!r} was not yet: `restore` of the same cut ends it"
            )
        if part.era == view.era and part.cut < view.cut:
            yield from self._on(store, post.cut(CutHere(view.era, part.cut + 1, view.cut)))

    # --- cuts

    @blocking
    def snapshot(self, name: str | None = None, *, mode: Literal["run", "pause"] = "run") -> Flow[LinkedSnapshot]:
        """Cut through the team in all its stores while it works. What is in flight between them is part of the cut.

        Each store has a snapshot of this name then; the manifest of each names all of them. With `mode="pause"` all
        members stop first, and nothing is in flight between stores: what other frameworks do, to compare with.
        """
        if mode not in ("run", "pause"):
            raise UsageError(f'mode={mode!r}: "run" or "pause"')
        view = yield from self._register.read()
        if set(view.members) != set(self._posts):
            raise UsageError(f"team {self.name!r} is in {', '.join(view.members)}: link all of these to cut them")
        if name is not None:
            check_name(name, "snapshot")
            for store, post in self._posts.items():
                if any(one.name == name for one in (yield from self._on(store, list_snapshots(post._whole)))):
                    raise UsageError(f"store {store!r} has a snapshot {name!r} already; choose another name")
        if mode == "run":
            return (yield from self._cut(name))
        parked = list[tuple[str, str]]()
        try:
            yield from self._park_all(parked)
            yield from self._carry_on(until_idle=True, poll_s=_AWAY_S)
            return (yield from self._cut(name))
        finally:
            for store, run_id in parked:
                yield from self._on(store, self._posts[store].unpark(run_id))

    asnapshot = awaited(snapshot)

    def _cut(self, name: str | None) -> Flow[LinkedSnapshot]:
        view = yield from change(self._register, TeamView.start)
        for store in self._posts:
            yield from self._follow(store, view)
        return (yield from self._completed(view, name or f"{self.name}-cut-{view.cut}"))

    def _park_all(self, parked: list[tuple[str, str]]) -> Flow[None]:
        """Pause all members that are not paused, and add them to `parked`, each before the next one is asked."""
        for store, post in self._posts.items():
            for run_id in (yield from self._on(store, post.local_members(going=True))):
                yield from self._on(store, post.park(run_id))
                parked.append((store, run_id))

    def _completed(self, view: TeamView, name: str) -> Flow[LinkedSnapshot]:
        """Check that the parts of a cut belong together, and write into each which others do."""
        parts = {}
        for store, post in self._posts.items():
            part = yield from self._on(store, post.find_cut(view.era, view.cut))
            if part is None:
                raise NotFound(f"store {store!r} has no snapshot of cut {view.cut}: was the team restored meanwhile?")
            parts[store] = part
        yield from self._check(parts)
        stores = {key: entry for part in parts.values() for key, entry in part.manifest["stores"].items()}
        for store, part in parts.items():
            manifest = {**part.manifest, "stores": stores, "complete": view.cut}
            parts[store] = yield from self._on(store, self._posts[store].complete(part, manifest, name))
        return LinkedSnapshot(name, view.cut, parts, self)

    def _check(self, parts: Mapping[str, Snapshot]) -> Flow[None]:
        saved = {}
        for store, part in parts.items():
            saved[store] = yield from self._on(store, self._posts[store].saved(part))
        if problem := contradiction(saved):
            raise Damaged(f"this cut cannot be gone back to: {problem}")

    def _in_flight(self, snapshot: LinkedSnapshot) -> Flow[list[MessageInFlight]]:
        saved, flying = {}, list[MessageInFlight]()
        for store, part in snapshot.stores.items():
            post = self._posts[store]
            saved[store] = yield from self._on(store, post.saved(part))
            boxes = TeamSnapshot(post._whole, self.name, part)
            flying += yield from self._on(store, boxes._flying())
        for (source, _), frames in in_flight(saved).items():
            codec = self._posts[source]._context.codec
            for letter in (decode_parcel(frame.body) for frame in frames):
                if isinstance(letter, Letter):
                    flying.append(_flying(self.name, letter, snapshot.stores[source], codec))
        return flying

    @blocking
    def get_snapshot(self, name: str) -> Flow[LinkedSnapshot]:
        """Return a cut of all stores by its name. Raises NotFound."""
        return self._find(name)

    aget_snapshot = awaited(get_snapshot)

    def _find(self, name: str) -> Flow[LinkedSnapshot]:
        parts = {}
        for store, post in self._posts.items():
            parts[store] = yield from self._on(store, find_snapshot(post._whole, name))
        [cut, *others] = {int(part.manifest.get("complete", 0)) for part in parts.values()}
        if others or not cut:
            raise NotFound(f"the snapshots {name!r} of these stores are not of one cut: take one of the whole team")
        return LinkedSnapshot(name, cut, parts, self)

    @blocking
    def restore(self, snapshot: LinkedSnapshot | str, *, keys: str | None = None) -> Flow[dict[str, TeamRestore]]:
        """Take the team back to a cut, in all its stores. Return what was done in each.

        If effects ran since, it is refused unless `keys` says how they run again; see `Team.restore`. No store sends
        or takes messages of the other time. After a crash the same call ends it."""
        from perdure.teams.restoring import restore

        cut = snapshot if isinstance(snapshot, LinkedSnapshot) else (yield from self._find(snapshot))
        yield from self._check(cut.stores)
        for store, part in cut.stores.items():  # refused before anything changes, if in any store
            yield from self._on(store, restore(self._posts[store]._whole, self.name, part, keys, dry_run=True))
        view = yield from self._begin_restore(cut)
        results = {}
        for store, part in cut.stores.items():
            post = self._posts[store]
            if (yield from self._on(store, post.begin_restore(view))):
                restoring = restore(post._whole, self.name, part, keys, dry_run=False)
                results[store] = yield from self._on(store, restoring)
                yield from self._on(store, post.end_restore(view, part))
        return results

    arestore = awaited(restore)

    def _begin_restore(self, cut: LinkedSnapshot) -> Flow[TeamView]:
        """Begin a restore in the register, or return the one of this cut that has not reached all stores."""
        view, newest, is_open = (yield from self._register.read()), 0, False
        for store, post in self._posts.items():
            part = yield from self._on(store, post.part())
            newest, is_open = max(newest, part.cut), is_open or part.restoring or part.era < view.era
        if is_open and view.restored is not None and view.restored.cut == cut.cut:
            return view
        era = next(int(part.manifest["team"]["era"]) for part in cut.stores.values())
        started = Started(era, tuple(sorted(cut.stores)))
        return (yield from change(self._register, lambda old: old.restore(cut.cut, newest, started)))

    # --- moving

    @blocking
    def move(self, member: str, to: str) -> Flow[None]:
        """Move a member to another store, between two of its turns, while it works and gets mail.

        Its state goes as a message, behind what it has sent and before what waits for it. Its earlier checkpoints stay
        where they were made. Messages that are on their way to it follow it. Raises Conflict if a turn does not end.
        """
        run_id = f"{self.name}/{check_member(member_name(member))}"
        if to not in self._posts:
            raise UsageError(f"there is no store {to!r} in this team; it has {', '.join(self._posts)}")
        for store, post in self._posts.items():
            if run_id in (yield from self._on(store, post.local_members())):
                if store == to:
                    raise UsageError(f"member {member!r} lives in store {to!r} already")
                yield from self._on(store, post.park(run_id))
                yield from self._on(store, post.send_member(run_id, to))
                yield from self._exchange(store, to)
                return
        raise NotFound(f"there is no member {member!r} in team {self.name!r}")

    amove = awaited(move)


def _flying(team: str, letter: Letter, source: Snapshot, codec: Any) -> MessageInFlight:
    return MessageInFlight(
        None if letter.sender is None else letter.sender.removeprefix(f"{team}/"),
        letter.to.removeprefix(f"{team}/"),
        decode(decompress(letter.value), codec),
        letter.key,
        letter.sent_turn,
        letter.topic.startswith("call:"),
        source.taken_at,
    )
