"""Agents of the real clients of OpenAI and Anthropic, against a server that speaks both protocols: killed, drilled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_server import ModelServer
from soak import SOAK, spread

import perdure
from perdure.testing.drill import RunDrill, drill
from perdure.testing.processes import ForkServer

AGENT = Path(__file__).parents[2] / "examples" / "model_agent.py"


@pytest.fixture(scope="module")
def agents() -> Iterator[ForkServer]:
    with ForkServer("model_play:script_in") as server:
        yield server


@pytest.fixture
def client_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a drill import the app, and the fork server has what it imports."""
    monkeypatch.setattr("perdure.testing.drill.PLAY", "model_play:play")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelServer]:
    """The model that every client of this test reaches. Bookings are written to `bookings.txt` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    with ModelServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_killed_agent_repeats_no_recorded_call_of_the_model_and_no_booking(
    provider: str, agents: ForkServer, model: ModelServer, tmp_path: Path
) -> None:
    command = (str(tmp_path), model.environment, str(AGENT), provider)
    model.hold_after = 2
    agent = agents.start(*command)
    with perdure.open(tmp_path / "agent.db") as store:
        assert model.held.wait(60)
        events = store.get_run(f"trip-{provider}").stream()
        tokens = (event.value for event in events if event.kind == "chunk" and event.value)
        assert [next(tokens), next(tokens)] == ["You", " fly"]  # while the model still speaks
        agent.kill()
    model.released.set()
    assert list(agents.start(*command).lines()) == ["You fly to Lisbon at 12:40."]
    assert model.turns() == [0, 1, 2, 2]  # the answer that was cut off is the only one that was asked for again
    assert len(Path("bookings.txt").read_text().splitlines()) == 1


def test_the_drill_takes_an_agent_with_a_model_and_calls_the_model_once(
    model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At some of the points, in a soak at all: test_drill.py kills an agent without a model at all of them."""
    killed_at = RunDrill.killed_at
    monkeypatch.setattr(RunDrill, "killed_at", lambda self, server, trials: killed_at(self, server, spread(trials, 6)))
    report = drill(f"{AGENT}:ask_openai", ["Book a flight"], random_kills=2)
    assert report.ok, report.text()
    assert report.points > 15
    assert report.kills >= (report.points if SOAK else 5)  # of six, one is at a random time
    assert model.turns() == [0, 1, 2]


@pytest.mark.usefixtures("client_is_imported")
def test_the_drill_with_real_bookings_and_a_real_client_finds_one_booking_for_each_run(
    model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at = RunDrill.killed_at

    def while_booking(self: RunDrill, fork_server: ForkServer, trials: list[dict[str, Any]]) -> None:
        booking = [trial for trial in trials if trial["kill"][2] == "book" and trial["kill"][4] == "after"]
        killed_at(self, fork_server, trials if SOAK else booking)

    monkeypatch.setattr(RunDrill, "killed_at", while_booking)
    report = drill(f"{AGENT}:ask_anthropic", ["Book a flight"], random_kills=0, real=True)
    assert report.ok, report.text()
    assert report.kills >= 2  # after the intent and after the result
    assert len(Path("bookings.txt").read_text().splitlines()) == report.trials + 1  # and the rehearsal's
    assert SOAK or sorted(model.turns()) == [turn for turn in (0, 1, 2) for _ in range(report.trials + 1)]
