"""`kill -9` at every named point of every kind of call: on SQLite and PostgreSQL, sync and async.

The table below says for each kind of call which points there are, and what a death at each of them may lead to. A child
runs the agent and kills itself there; another one runs the same line again. Then this must hold:

    no intent                 it runs
    intent, no completion     reconcile, or else the policy: it is never repeated by guess
    completion                never again

and with it: the result is that of an undisturbed run, no step whose end is recorded ran again, the journal adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crash_agents
import pytest
from crash_agents import Line, World
from databases import new_database
from lab import MODES, PLACES
from soak import SOAK, spread

from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ForkServer

Points = list[str]
Acts = dict[str, int | range]


# --- the points of a call


def body(name: str, acts: Points, *, number: int = 1) -> Points:
    """A body, and what it does to the outside world ("act #number")."""
    done = [point for act in acts for point in (f"before act of {act}", f"after act of {act}")]
    return [f"before body of {name} #{number}", *done, f"after body of {name} #{number}"]


def commit(kind: str, name: str, number: int = 1) -> Points:
    return [f"before {kind} of {name} #{number}", f"after {kind} of {name} #{number}"]


def step(name: str) -> Points:
    return [*body(name, [f"{name} #1"]), *commit("done", name)]


def effect(name: str, act: str, number: int = 1) -> Points:
    return [*commit("intent", name, number), *body(name, [act], number=number), *commit("done", name, number)]


def parked(agent: str, name: str) -> Points:
    """A call that parks the run, and is answered by somebody."""
    waits = [*commit("wait", name), *commit("park", agent)]
    return [*waits, f"after claim of {agent} #2", *commit("done", name)]


def whole(agent: str, inside: Points) -> Points:
    return [f"after claim of {agent} #1", *inside, *commit("finish", agent)]


# --- what a death leads to


@dataclass(frozen=True)
class Kind:
    """A row of the matrix."""

    points: Points
    acts: Callable[[str], Acts]  # how often what was done, after a death at this point
    outcome: Any = None
    status: str = "done"
    asks: Callable[[str], list[str]] = lambda point: []  # who was asked
    outcome_at: dict[str, Any] = field(default_factory=dict)  # where it is another one
    ran_before: tuple[str, ...] = ("first", "last")
    elsewhere: tuple[str, ...] = ()  # points that another row has
    heard: Any = None
    modes: tuple[str, ...] = MODES


def between(points: Points, first: str, last: str) -> set[str]:
    return set(points[points.index(first) : points.index(last) + 1])


def once(*names: str) -> Callable[[str], Acts]:
    return lambda point: dict.fromkeys(names, 1)


def again_at(where: set[str], **names: int) -> Callable[[str], Acts]:
    """So often; once more after a death where it was done and that is not recorded."""
    return lambda point: {name: times + (point in where) for name, times in names.items()}


BOOK = effect("book", "book #1")
DOUBT = between(BOOK, "after intent of book #1", "before done of book #1")
DONE_IN_DOUBT = between(BOOK, "after act of book #1", "before done of book #1")
FLAKY = [
    *body("flaky", ["flaky #1"], number=1),
    *commit("failed", "flaky", 1),
    *body("flaky", ["flaky #2"], number=2),
    *commit("failed", "flaky", 2),
    *body("flaky", ["flaky #3"], number=3),
    *commit("done", "flaky"),
]
CAUGHT = [
    *step("look_up"),
    *effect("charge", "charge visa #1", 1),
    *effect("charge", "charge amex #1", 2),
]
UNSURE = [
    *commit("intent", "book"),
    *body("book", ["try #1"], number=1),
    *commit("failed", "book", 1),
    *body("book", ["try #2"], number=2),
    *commit("failed", "book", 2),
    *body("book", ["try #3", "book #1"], number=3),
    *commit("done", "book"),
]
BRANCHES = [
    *(point for number in (1, 2) for point in commit("intent", "book", number)),
    *(point for number in (1, 2) for point in commit("body", "book", number)),
    *(point for side in ("left", "right") for point in commit("act", f"book {side}")),
    *(point for number in (1, 2) for point in commit("done", "book", number)),
    *step("middle"),
]
PARALLEL = Kind(
    whole("parallel_agent", BRANCHES),
    lambda point: {"book left": 1, "book right": 1, "middle": range(1, 3)},
    ["first", ["booked left", "middle", "booked right"], "last"],
)
CHILD = [
    *commit("spawn", "perdure.spawn:below"),
    *commit("park", "child_agent"),
    *whole("below", [*effect("book", "book below #1"), *step("middle")]),
    "after claim of child_agent #2",
    *commit("done", "perdure.result"),
]
MIDDLE_TWICE = between(step("middle"), "after act of middle #1", "before done of middle #1")


def undone(agent: str) -> Points:
    return whole(
        agent,
        [
            *commit("value", "perdure.undo"),
            *effect("undo book", "cancel hotel #1", 1),
            *effect("undo book", "cancel flight #1", 2),
        ],
    )


def undo_in_doubt(point: str) -> list[str]:
    doubts = set[str]()
    for number, item in ((1, "hotel"), (2, "flight")):
        name, act = f"undo book #{number}", f"cancel {item} #1"
        points = effect("undo book", act, number)
        doubts |= between(points, f"after intent of {name}", f"before done of {name}")
    return ["doubt"] if point in doubts else []


BOOKED_BOTH = (*effect("book", "book flight #1", 1), *effect("book", "book hotel #1", 2))
UNDONE = once("book flight", "book hotel", "cancel flight", "cancel hotel")
BOOKED = ["first", "booked LH400", "last"]
IN_DOUBT = ["first", "in doubt at 2", "last"]


def doubtful(agent: str, **options: Any) -> Kind:
    """An effect, killed at each of its points."""
    return Kind(whole(f"{agent}_agent", BOOK), outcome=BOOKED, **{"acts": once("book"), **options})


MATRIX: dict[str, Kind] = {
    "plain": Kind(
        whole("plain_agent", [*step("first"), *step("work"), *step("last")]),
        lambda point: {
            name: 1 + (point in between(step(name), f"after act of {name} #1", f"before done of {name} #1"))
            for name in ("first", "work", "last")
        },
        ["first", "worked", "last"],
        ran_before=(),
    ),
    "retried": Kind(
        whole("retried_agent", FLAKY),
        again_at(between(FLAKY, "after act of flaky #3", "before done of flaky #1"), flaky=3),
        ["first", "flaky, but done", "last"],
    ),
    "caught": Kind(
        whole("caught_agent", CAUGHT),
        lambda point: {
            "look_up": 1 + (point in between(CAUGHT, "after act of look_up #1", "before done of look_up #1")),
            # Refused twice: the first time nothing was charged.
            "charge visa": 1 + (point in between(CAUGHT, "after act of charge visa #1", "before done of charge #1")),
            "charge amex": 1,
        },
        ["first", [404, "charged amex"], "last"],
    ),
    "values": Kind(
        whole("values_agent", [*commit("value", "perdure.random"), *step("seen")]),
        again_at(between(step("seen"), "after act of seen #1", "before done of seen #1"), seen=1),
        ["first", True, "last"],
    ),
    "asked": doubtful("asked", asks=lambda point: ["doubt"] if point in DOUBT else []),
    "reconciled": doubtful("reconciled"),
    "not_sure": doubtful("not_sure", asks=lambda point: ["doubt"] if point in DOUBT else []),
    "repeated": doubtful("repeated", acts=again_at(DONE_IN_DOUBT, book=1)),
    "given_up": doubtful(
        "given_up",
        acts=lambda point: {"book": 0 if point in DOUBT - DONE_IN_DOUBT else 1},
        outcome_at=dict.fromkeys(DOUBT, IN_DOUBT),
    ),
    "retried_effect": Kind(
        whole("retried_effect_agent", UNSURE), lambda point: {"book": 1, "try": range(3, 5)}, BOOKED
    ),
    "approved": Kind(
        whole("approved_agent", [*parked("approved_agent", "perdure.approve"), *BOOK]),
        once("book"),
        BOOKED,
        asks=lambda point: ["approval"],
    ),
    "ask": Kind(
        whole("ask_agent", parked("ask_agent", "perdure.ask")),
        once(),
        ["first", 7, "last"],
        asks=lambda point: ["question"],
    ),
    "sleep": Kind(whole("sleep_agent", parked("sleep_agent", "perdure.sleep")), once(), ["first", None, "last"]),
    "sleep_short": Kind(
        whole("sleep_agent", [*commit("wait", "perdure.sleep"), *commit("done", "perdure.sleep")]),
        once(),
        ["first", None, "last"],
    ),
    "receive": Kind(
        whole(
            "receive_agent",
            [
                *parked("receive_agent", "perdure.receive"),
                *commit("wait", "perdure.receive", 2),
                *commit("done", "perdure.receive", 2),
            ],
        ),
        once(),
        ["first", ["a message", "nothing"], "last"],
    ),
    "parallel": PARALLEL,
    "tasks_of_its_own": Kind(
        whole("tasks_of_its_own_agent", BRANCHES), PARALLEL.acts, PARALLEL.outcome, modes=("async",)
    ),
    "child": Kind(
        whole("child_agent", CHILD),
        lambda point: {"book below": 1, "middle": 2 if point in MIDDLE_TWICE else 1},
        ["first", ["booked below", "middle"], "last"],
    ),
    "send": Kind(
        whole("send_agent", commit("done", "perdure.send")),
        once(),
        ["first", None, "last"],
        heard=["hello", "nothing"],
    ),
    "undo": Kind(
        undone("undo_cancel_agent"),
        UNDONE,
        "RunFailed: sold out",
        "failed",
        ran_before=(),
        elsewhere=BOOKED_BOTH,
    ),
    "undo_asked": Kind(
        undone("undo_cancel_asked_agent"),
        UNDONE,
        "RunFailed: sold out",
        "failed",
        asks=undo_in_doubt,
        ran_before=(),
        elsewhere=BOOKED_BOTH,
    ),
    "cancelled": Kind(
        whole(
            "cancelled_agent",
            [
                *parked("cancelled_agent", "perdure.ask")[:-2],  # nobody answers
                *commit("value", "perdure.undo"),
                *effect("undo book", "cancel hotel #1", 1),
            ],
        ),
        UNDONE,
        "RunCancelled: run was cancelled, and what it did was undone",
        "cancelled",
        asks=lambda point: ["question"],
        ran_before=(),
        elsewhere=(*BOOKED_BOTH, *effect("undo book", "cancel flight #1", 2)),
    ),
    "rounds": Kind(
        whole(
            "rounds_agent",
            [
                *effect("pay", "pay 1 #1", 1),
                "after claim of rounds_agent #2",
                *effect("pay", "pay 2 #1", 2),
                "after claim of rounds_agent #3",
                *effect("pay", "pay 3 #1", 3),
            ],
        ),
        once("pay 1", "pay 2", "pay 3"),
        6,
        ran_before=(),
    ),
}

# On PostgreSQL `make test` has a row of each kind of statement, and some points of it; the order of commits is the same
# on both databases.
POSTGRES_POINTS = 9
ON_POSTGRES = (
    "plain",
    "caught",
    "reconciled",
    "approved",
    "receive",
    "tasks_of_its_own",
    "child",
    "undo_asked",
    "rounds",
)
ROWS = [
    (place, mode, name)
    for place in PLACES
    for name, kind in MATRIX.items()
    for mode in MODES
    if mode in kind.modes and (SOAK or place == "sqlite" or name in ON_POSTGRES)
]

# --- killing


@dataclass
class Row:
    """What became of a row of the matrix: of each of its deaths, and of a run that nobody disturbed."""

    undisturbed: dict[str, Any]
    survived: list[str] = field(default_factory=list)  # points that were not reached
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, list[Line]] = field(default_factory=dict)


class Yard:
    """Where rows are killed: a database of each kind, and a process that forks the children."""

    def __init__(self, fork_server: ForkServer, folder: Path, urls: dict[str, str]) -> None:
        self._fork_server, self._folder, self._urls = fork_server, folder, urls

    def killed(self, place: str, mode: str, name: str) -> Row:
        """First every death of a row, then every resumption: by then there is hardly a deadline to be waited for."""
        url, outside = self._urls[place], str(self._folder / f"{place}-{mode}-{name}.jsonl")
        common, start = (url, outside, mode, name), self._fork_server.start
        [undisturbed] = start("live", *common, f"{name}-{mode}", None).lines()
        row = Row(undisturbed)
        points = MATRIX[name].points if place == "sqlite" else spread(MATRIX[name].points, POSTGRES_POINTS)
        ids = {point: f"{name}-{mode}-{number}" for number, point in enumerate(points)}
        for point, run_id in ids.items():
            row.survived += [point for _ in start("live", *common, run_id, point).lines()]
        by_id = {end["run"]: end for end in start("resume", *common, list(ids.values())).lines()}
        world = World(outside)
        for point, run_id in ids.items():
            row.ends[point], row.lines[point] = by_id[run_id], world.lines(run_id)
        return row


@pytest.fixture(scope="module")
def yard(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("matrix")
    name = new_database(postgres_server)
    urls = {"sqlite": str(folder / "matrix.db"), "postgres": postgres_server.url(name)}
    with ForkServer("crash_agents:child") as fork_server:
        yield Yard(fork_server, folder, urls)
    postgres_server.drop_database(name)


def test_nothing_is_missing_in_the_matrix() -> None:
    """Each kind of call that the promise names, on each database, in each mode, at each of the six places."""
    kinds = {name for _, _, name in ROWS}
    assert kinds == set(crash_agents.agents("sync")) | {"sleep_short"}
    for name in kinds - {"tasks_of_its_own"}:
        places = PLACES if SOAK or name in ON_POSTGRES else ("sqlite",)
        assert {(place, mode) for place, mode, row in ROWS if row == name} == {(p, m) for p in places for m in MODES}
    for name in (
        "asked",
        "reconciled",
        "not_sure",
        "repeated",
        "given_up",
        "caught",
        "undo",
        "parallel",
        "child",
        "approved",
    ):
        reached = {point.partition(" of ")[0] for point in MATRIX[name].points}
        for place in ("before intent", "after intent", "before act", "after act", "before done", "after done"):
            assert place in reached, (name, place)


@pytest.mark.parametrize(("place", "mode", "name"), ROWS)
def test_killed_at_every_point_of(yard: Yard, place: str, mode: str, name: str) -> None:
    kind, row = MATRIX[name], yard.killed(place, mode, name)
    check_points(name, kind, row.undisturbed)
    assert row.survived == []
    for point in row.ends:
        try:
            check_end(kind, point, row.ends[point], row.lines[point])
        except AssertionError as error:
            error.add_note(f"killed at: {point}")
            raise
    if name == "values":  # what was drawn before a death is the same after it
        for point, lines in row.lines.items():
            assert len({line.value for line in lines if line.name == "seen"}) == 1, point


def check_points(name: str, kind: Kind, undisturbed: dict[str, Any]) -> None:
    """The matrix has every point of an undisturbed run."""
    others = {*kind.elsewhere, *(point for step_name in kind.ran_before for point in step(step_name))}
    reached = [point for point in undisturbed["reached"] if point not in others and "listener" not in point]
    if name == "send":
        reached = [point for point in reached if "perdure.receive" not in point]  # the listener's
    assert sorted(reached) == sorted(kind.points)
    assert (undisturbed["status"], undisturbed["outcome"]) == (kind.status, kind.outcome)


def check_end(kind: Kind, point: str, end: dict[str, Any], lines: list[Line]) -> None:
    assert (end["status"], end["outcome"]) == (kind.status, kind.outcome_at.get(point, kind.outcome))
    counts = Counter(line.name for line in lines)
    for act, wanted in {**dict.fromkeys(kind.ran_before, 1), **kind.acts(point)}.items():
        assert counts[act] in (wanted if isinstance(wanted, range) else (wanted,)), (act, counts)
    assert end["asks"] == kind.asks(point)
    assert end["heard"] == kind.heard
    check_journal(end, lines)


def check_journal(end: dict[str, Any], lines: list[Line]) -> None:
    """What was recorded did not run again, each call has one end, and one key for all of its attempts."""
    recorded = {(run, path) for run, path in end["recorded"]}
    again = [line for line in lines if line.pid == end["pid"] and (line.run, line.path) in recorded]
    # An agent that began anew has new calls at old places.
    assert not [line for line in again if not line.name.startswith("pay ")]
    assert end["ended_twice"] == []
    paths = [path for path, *_ in end["steps"]]
    assert len(paths) == len(set(paths))
    ends = {"done", "failed", "waiting"} if end["status"] == "cancelled" else {"done", "failed"}
    assert {status for _, _, _, status, _, _ in end["steps"]} <= ends
    keys = {path: key for path, _, kind, _, _, key in end["steps"] if kind in ("effect", "undo")}
    for line in lines:
        if line.key and "/" not in line.run and not line.name.startswith("pay "):
            assert line.key == keys[line.path]
