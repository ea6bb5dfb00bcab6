"""A value whose `repr` raises (Python writes no int of more than 4,300 digits) stops neither a run nor a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import perdure
from perdure.cli import main
from perdure.values.safe_repr import shown

HUGE = 16**4000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "agent.db"))
    with perdure.open(str(tmp_path / "agent.db")) as opened:
        yield opened


def test_what_cannot_be_shown_is_named_by_its_type() -> None:
    assert shown({"a": [1, "b"]}) == "{'a': [1, 'b']}"
    assert shown("x" * 100, 10) == "'xxxxxxxx…"
    assert shown(HUGE) == f"<int of {HUGE.bit_length()} bits>"
    assert shown({"a": HUGE}) == "<dict>"


def test_an_effect_with_such_an_argument_is_put_to_a_person_and_settled(store: perdure.Store) -> None:
    @perdure.effect(name="huge.pay")
    def pay(amount: int) -> str:
        raise TimeoutError("no answer")

    @perdure.durable(name="huge.agent")
    def agent(amount: int) -> str:
        return pay(amount)

    assert store.run(agent, HUGE, id="r").status == "waiting"
    [ask] = store.questions("r")
    assert f"amount=<int of {HUGE.bit_length()} bits>" in ask.text
    store.get_run("r").resolve(str(ask.step), done="paid")
    assert store.run(agent, HUGE, id="r").result() == "paid"


def test_the_commands_show_it(store: perdure.Store, capsys: pytest.CaptureFixture[str]) -> None:
    @perdure.step(name="huge.look")
    def look(number: int) -> dict[Any, Any]:
        return {"number": number, number: [number]}

    @perdure.durable(name="huge.looks")
    def agent(number: int) -> Any:
        perdure.state()["number"] = number
        return look(number)

    store.run(agent, HUGE, id="r").result()
    thread = store.thread("t")
    empty = numpy.empty((10**12, 0))
    thread.save({"a": HUGE, "items": empty})
    thread.save({"a": HUGE + 1, HUGE: 1, "items": empty[1:]})
    for command in (
        ["show", "t"],
        ["diff", "t", "head~1", "head"],
        ["steps", "r"],
        ["run", "show", "r"],
        ["run", "tail", "r"],
    ):
        for extra in ([], ["--json"]):
            assert main([*command, *extra]) == 0, command
    capsys.readouterr()
    assert main(["show", "t", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert state["a"] == hex(HUGE + 1)
    assert state["items"] == {"<type>": "ndarray", "dtype": "float64", "shape": [10**12 - 1, 0], "items": []}
