"""A team in two stores whose members pass coins to each other. As a program it is one of the processes of that team.

`python team_coins.py east|west|courier EAST_URL WEST_URL` works until it is killed.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FunctionType
from typing import Any

import perdure
from perdure.teams.linked import LinkedSnapshot, LinkedTeam, link

TEAM = "coins"
MEMBERS = {"east": ("e0", "e1"), "west": ("w0", "w1")}
ALL = [name for names in MEMBERS.values() for name in names]
HOPS = 16 if os.environ.get("PERDURE_SOAK") else 6


def pass_on(state: dict[str, Any], message: dict[str, Any]) -> None:
    """Take coins, and pass the oldest three on, to a member that follows from the message."""
    state["coins"] += message["coins"]
    state["seen"] = state.get("seen", 0) + 1
    if message["hops"]:
        coins, state["coins"] = state["coins"][:3], state["coins"][3:]
        target = ALL[(message["hops"] * 7 + message["chain"]) % len(ALL)]
        perdure.send(target, {**message, "coins": coins, "hops": message["hops"] - 1})


def declare(store: perdure.Store, side: str) -> Any:
    team = store.team(TEAM)
    for name in MEMBERS[side]:
        team.agent(state={"coins": []})(FunctionType(pass_on.__code__, globals(), name))
    return team


def open_linked(east: perdure.Store, west: perdure.Store) -> LinkedTeam:
    return link({"east": east.team(TEAM), "west": west.team(TEAM)})


def start(east: perdure.Store, west: perdure.Store) -> tuple[LinkedTeam, Counter[str]]:
    """Make the team, and give each member coins twice."""
    declare(east, "east")
    declare(west, "west")
    linked = open_linked(east, west)
    coins: Counter[str] = Counter()
    for chain in range(2 * len(ALL)):
        name = ALL[chain % len(ALL)]
        some = [f"{chain}.{number}" for number in range(5)]
        coins.update(some)
        side = east if name in MEMBERS["east"] else west
        side.team(TEAM).send(name, {"coins": some, "hops": HOPS, "chain": chain})
    return linked, coins


def coins_of(snapshot: LinkedSnapshot) -> Counter[str]:
    """All coins in a cut: those that members have, and those in flight."""
    coins = Counter(coin for name in ALL for coin in snapshot.state(name)["coins"])
    coins.update(coin for message in snapshot.in_flight() for coin in message.message["coins"])
    return coins


def seen(east: perdure.Store, west: perdure.Store) -> int:
    """How many messages were taken."""
    return sum(member.turn for store in (east, west) for member in store.team(TEAM).members())


EXPECTED_TURNS = 2 * len(ALL) * (HOPS + 1)


def main(role: str, east_url: str, west_url: str) -> None:
    with perdure.open(east_url, lease_s=1) as east, perdure.open(west_url, lease_s=1) as west:
        if role == "courier":
            open_linked(east, west).run(poll_s=0.05)
        else:
            store = east if role == "east" else west
            declare(store, role).work(poll_s=0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
