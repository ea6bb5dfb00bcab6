"""The commands about teams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runs_kit import Run, lines

import perdure


@pytest.fixture
def team(store: perdure.Store) -> perdure.teams.Team:
    made = store.team("research")

    @made.agent(attempts=1, capacity=9)
    def researcher(state: Any, message: Any) -> None:
        state["n"] = state.get("n", 0) + message["n"]
        perdure.send("writer", state["n"])

    @made.agent
    def writer(state: Any, message: Any) -> None:
        state["last"] = message

    for message in ({"n": 1}, {"n": 2}, {"bad": 1}):
        made.send("researcher", message)
    made.work(until_idle=True)
    return made


def test_teams_and_their_members_are_listed(run: Run, team: perdure.teams.Team) -> None:
    _, out, _ = run("teams")
    assert out.splitlines()[1].split()[:4] == ["research", "2", "0", "1"]
    _, out, _ = run("team", "show", "research")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["researcher", "waiting", "3", "0", "1", "0"],
        ["writer", "waiting", "2", "0", "0", "0"],
    ]
    assert [one["name"] for one in lines(run("team", "show", "research", "--json")[1])] == ["researcher", "writer"]
    code, _, err = run("team", "show", "nothing")
    assert (code, "perdure teams" in err) == (3, True)
    assert "`perdure teams`" in run("team", "ls")[2]


def test_a_dead_letter_is_looked_at_corrected_and_sent_again(run: Run, team: perdure.teams.Team) -> None:
    [letter] = lines(run("team", "dead", "research", "--json")[1])
    assert (letter["member"], letter["message"], letter["error"]) == ("researcher", {"bad": 1}, "KeyError: 'n'")
    assert "KeyError: 'n'" in run("team", "dead", "research")[1]
    assert run("team", "dead", "research", "--message", "1")[0] == 2
    done = run("team", "dead", "research", "--resend", letter["key"][:8], "--message", '{"n": 4}')
    assert done == (0, "sent again to research/researcher\n", "")
    team.work(until_idle=True)
    assert run("team", "dead", "research") == (0, "", "perdure: no dead letters\n")
    assert run("team", "dead", "research", "--drop", letter["key"])[0] == 3


def test_a_team_is_cut_rewound_and_restored(run: Run, team: perdure.teams.Team) -> None:
    assert run("team", "send", "research", "researcher", '{"n": 3}') == (0, "sent to research/researcher\n", "")
    _, out, _ = run("team", "snapshot", "research", "cut")
    assert out == 'took snapshot cut; 1 message in flight\n    outside to researcher: {"n": 3}\n'
    code, out, err = run("team", "rewind", "research", "researcher", "--turn", "1", "--dry-run")
    assert (code, len(out.splitlines())) == (0, 2)
    assert "writer goes back from turn 2 to turn 1" in out
    assert "2 messages wait again, 1 were never sent now" in err
    done = json.loads(run("team", "rewind", "research", "researcher", "--turn", "1", "--json")[1])
    assert [(fall["member"], fall["to"]) for fall in done["falls"]] == [("researcher", 1), ("writer", 1)]
    assert "would go back" in run("team", "restore", "research", "cut", "--dry-run")[2]
    back = run("team", "restore", "research", "cut")
    assert back[:2] == (0, "2 members of research went back to cut\n")
    assert [one.turn for one in team.members()] == [3, 2]
