"""Every example runs and does what it says, and what the README shows of `make demo` is what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.cosmos_server import KEY, emulator
from installs import Installs, named
from model_server import ModelServer

import perdure
from perdure.cli import main
from perdure.testing.fake_airline import Airline, SoldOut

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_installs: Installs
FRAMEWORKS = [
    "adk",
    "agent_framework",
    "openai_agents",
    "pydantic_ai",
    "strands",
]  # each has an example that is killed and run again
DEMO_S_MAX = 180  # on a machine that does other things too; alone it takes 10


@pytest.fixture(scope="session", autouse=True)
def environments(installs: Installs) -> None:
    """Where the examples run: each with what it tells its reader to install, and nothing else."""
    global _installs
    _installs = installs


def run(name: str, folder: Path, *arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """Run an example in a folder of its own. What it printed."""
    example = EXAMPLES / name
    done = subprocess.run(
        [str(_installs.python(named(example.read_text()))), str(example), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_there_is_a_test_for_every_example() -> None:
    text = Path(__file__).read_text()
    untested = [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in text]
    elsewhere = ["crewai_flow.py"]  # tests/frameworks/test_crewai.py
    assert sorted(untested) == sorted([*(f"{framework}_agent.py" for framework in FRAMEWORKS), *elsewhere])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `make demo` prints. It is run once: it takes a while."""
    folder = tmp_path_factory.mktemp("demo")
    started = time.monotonic()
    output = run("demo.py", folder)
    assert time.monotonic() - started < DEMO_S_MAX
    assert list(folder.iterdir()) == []
    return output


def test_the_demo_shows_everything(demo: str) -> None:
    assert "\x1b" not in demo  # no terminal, no colours
    assert demo.count(f"killed, exit code {-signal.SIGKILL}") == 2
    assert "book_flight: in doubt" in demo
    assert "(flight-1), your hotel Grand Hotel Lisbon (hotel-1)" in demo
    assert "undo book_flight" in demo
    assert "each was done exactly once" in demo
    assert re.search(r"book_flight +done +flight-1 \(reconciled\)", demo)
    assert re.search(r"ok +effects done twice +0$", demo, flags=re.MULTILINE)
    assert "BAD" not in demo
    assert "0 problems" in demo
    kept = re.search(r"perdure inspect (\S+)\s*\Z", demo)
    assert kept is not None
    with perdure.open(kept[1], read_only=True) as store:
        assert store.get_run("trip-Lisbon").status == "done"


def test_the_readme_shows_what_the_demo_prints(demo: str) -> None:
    shown = re.findall(r"^```text make demo\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(shown) == 1
    assert _masked(shown[0]) in _masked(demo)


def _masked(text: str) -> str:
    """Without what differs from run to run: ports, durations, and how many kills at random times hit something."""
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:<port>", text)
    text = re.sub(r"\d+\.\d ms", "<ms>", text)
    return re.sub(r"\b\d+ (\(at|of) \d+", r"<n> \1 <n>", text)


def test_the_airline_keeps_a_ledger_and_books_a_key_once(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "perdure.testing.fake_airline", '--behave={"sold_out": ["Grand Hotel Oslo"]}']
    with subprocess.Popen(line, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        airline = Airline(json.loads(server.stdout.readline())["url"])
        assert [airline.book("flight", "OSL-0715", key="k-1") for _ in range(2)] == ["flight-1", "flight-1"]
        with pytest.raises(SoldOut, match="Grand Hotel Oslo"):
            airline.book("hotel", "Grand Hotel Oslo", key="k-2")
    assert server.returncode == 0


def answer(folder: Path, trip: str, value: str) -> None:
    """As the docstring of examples/travel.py says it."""
    with contextlib.chdir(folder):
        assert main(["answer", trip, value]) == 0


def test_a_travel_agent_asks_and_goes_on_with_the_same_line(tmp_path: Path) -> None:
    asked = run("travel.py", tmp_path, "Lisbon")
    assert "trip-Lisbon asks: Which flight?\n    LIS-0715 at 07:15, 109 EUR" in asked
    assert run("travel.py", tmp_path, "Lisbon") == asked  # nobody has answered yet
    answer(tmp_path, "trip-Lisbon", "LIS-0715 at 07:15, 109 EUR")
    told = run("travel.py", tmp_path, "Lisbon")
    assert "(flight-1), your hotel Grand Hotel Lisbon (hotel-1)" in told
    assert run("travel.py", tmp_path, "Lisbon") == told


def test_a_worker_finishes_what_the_travel_agent_began(tmp_path: Path) -> None:
    run("travel.py", tmp_path, "Lisbon")
    answer(tmp_path, "trip-Lisbon", "LIS-0715 at 07:15, 109 EUR")
    worker = [str(_installs.python()), "-m", "perdure", "worker", str(EXAMPLES / "travel.py"), "--once"]
    done = subprocess.run(worker, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 done\n"), done.stderr
    assert "(flight-1), your hotel Grand Hotel Lisbon (hotel-1)" in run("travel.py", tmp_path, "Lisbon")


def test_a_travel_agent_cancels_the_flight_if_there_is_no_hotel(tmp_path: Path) -> None:
    run("travel.py", tmp_path, "Oslo", "--sold-out")
    answer(tmp_path, "trip-Oslo", "OSL-0715 at 07:15, 166 EUR")
    output = run("travel.py", tmp_path, "Oslo", "--sold-out")
    assert "run 'trip-Oslo' failed: SoldOut: sold out: Grand Hotel Oslo\n    undo book_flight" in output


def test_a_shop_charges_and_ships_once_though_the_answers_are_lost(tmp_path: Path) -> None:
    output = run("stripe_like.py", tmp_path)
    assert output.count("network:  the answer is lost") == 2
    assert "known key, the charge of before: ch_1" in output
    assert "looked up, found 1" in output
    assert "the run is done: {'charge': 'ch_1', 'parcel': 'parcel-1'}\ncharges: 1, parcels: 1" in output
    assert list(tmp_path.iterdir()) == []


def test_one_issue_is_opened_though_the_answer_is_lost_and_undoing_closes_it(tmp_path: Path) -> None:
    output = run("github_issues.py", tmp_path, environment={"GITHUB_TOKEN": ""})
    assert output.count("github: opened") == 2
    assert "network: the answer is lost\n  github: listed 1\nbuild 41: issue #1\n" in output
    assert output.endswith("build 41: issue #1\n  github: #2 is closed\nbuild 42: undone\n")
    assert list(tmp_path.iterdir()) == []


def test_three_services_or_none_although_undoing_is_killed(tmp_path: Path) -> None:
    assert run("saga.py", tmp_path, code=-signal.SIGKILL).endswith("hotel: cancelled\n")
    again = run("saga.py", tmp_path)
    assert again.startswith("  airline: cancelled\nrun 'trip-1' failed: NoCar: no car is left\n")
    assert again.endswith("airline: cancelled 1 time\nhotel: cancelled 1 time\n")


def test_training_that_was_killed_reaches_the_same_weights(tmp_path: Path) -> None:
    assert run("training.py", tmp_path, code=-signal.SIGKILL) == "begins after epoch 0\n"
    again = run("training.py", tmp_path)
    assert again.startswith("begins after epoch 12\nepoch 20, loss 0.0")
    assert again.endswith("same weights as without a kill: True\nsame optimizer: True\n")


def test_sessions_without_memory_go_on_from_the_progress_file(tmp_path: Path) -> None:
    output = run("progress_handoff.py", tmp_path)
    assert [f"session {number}: did: " in output for number in (1, 2, 3)] == [True] * 3
    assert "session 4: blocked: The release key is with Ann" in output
    assert "3. [x] Write the tests" in output
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_was_killed_goes_on(tmp_path: Path) -> None:
    first = run("survives_a_kill.py", tmp_path, code=-signal.SIGKILL)
    second = run("survives_a_kill.py", tmp_path)
    assert first.count("places to see") == 3
    assert (second.count("known already"), second.count("places to see")) == (3, 2)
    with perdure.open(str(tmp_path / "agent.db")) as store:
        assert len(store.thread("trip-42").load().state["found"]) == 5
        assert store.ops.verify().ok


def test_a_team_that_was_killed_and_cut_goes_on(tmp_path: Path) -> None:
    first = run("team.py", tmp_path, code=-signal.SIGKILL)
    second = run("team.py", tmp_path)
    assert first.splitlines() == [f"  searching for {topic}" for topic in ("tides", "moons", "orbits", "comets")]
    assert second.startswith("  searching for eclipses\n"), "what the killed process had searched was recorded"
    before, flying, back, again = (line for line in second.splitlines() if not line.startswith(" "))
    # What the writer had not taken yet follows: it works beside the researcher.
    assert flying.startswith("in flight at the cut: ['orbits', 'comets', 'eclipses'")
    assert (back + flying).count("papers") == 2
    assert again.count("papers") == 5
    assert before.partition(":")[2] == again.partition(":")[2]
    with perdure.open(str(tmp_path / "team.db")) as store:
        assert store.ops.verify().ok


def test_a_graph_on_cosmos_db_that_was_killed_goes_on(tmp_path: Path) -> None:
    with emulator() as url:
        account = {"COSMOS_ENDPOINT": url, "COSMOS_KEY": KEY}
        first = run("cosmos_agent.py", tmp_path, code=-signal.SIGKILL, environment=account)
        second = run("cosmos_agent.py", tmp_path, environment=account)
    assert first == "looking for a flight to Lisbon\nlooking for a hotel for those who arrive by LIS-0715\n"
    assert second == first.splitlines()[1] + "\nthe trip: LIS-0715, Grand Hotel Lisbon\n"


def test_a_state_that_saves_itself_goes_on_after_a_kill(tmp_path: Path) -> None:
    first = run("autosave.py", tmp_path, code=-signal.SIGKILL)
    assert first == "0 chapters were read before\na crash now would cost 2 changes\n"
    assert run("autosave.py", tmp_path) == "8 chapters were read before\n12 chapters have notes\n"
    with perdure.open(str(tmp_path / "autosave.db")) as store:
        assert store.ops.verify().ok


def test_an_agent_learns_over_three_sessions_and_a_kill(tmp_path: Path) -> None:
    output = run("learning_agent.py", tmp_path)
    assert f"killed, exit code {-signal.SIGKILL}" in output
    assert output.count("(the model is called)") == 6, "the answer of the killed process was recorded"
    assert output.count("agent: Near Graz: the Schöckl.") == output.count("agent: Near Oslo: Vettakollen.") == 1
    assert "agent: As it worked before: check_weather, choose_trail." in output
    assert "Episodic: 12 turns in 3 sessions. The user said: I live in Graz." in output
    assert "Semantic: ['The user lives in Graz', 'The user lives in Oslo']" in output
    assert list(tmp_path.iterdir()) == []


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    output = run("two_writers.py", tmp_path)
    assert "ann is the head: True; bob is the head: False" in output
    assert "['Dear all, hello', 'Dear friends']" in output
    assert "moved by another writer" in output
    assert "left is 60" in output
    assert "votes counted: 8" in output


def test_a_bad_deployment_is_looked_into_and_undone(tmp_path: Path) -> None:
    output = run("snapshots.py", tmp_path)
    assert "~ thread ticket-2\n      ~ ['status']: 'new' -> 'failed'\n" in output
    assert "step 2, price -> -120: ~ ['total']: 0 -> -40" in output
    assert "effect mail at step 3 is not recorded, and a sandbox runs no effects" in output
    assert "set back thread ticket-2\nset back item customers/ann\nnow: {'status': 'new'}\nand forth" in output
    assert output.endswith("mails sent: ['You get 160 EUR back']\n")
    assert list(tmp_path.iterdir()) == []


def test_an_agent_with_tools_is_killed_and_books_once(tmp_path: Path) -> None:
    output = run("tool_agent.py", tmp_path)
    assert f"killed, exit code {-signal.SIGKILL}" in output
    assert [f"turn {turn}" in output for turn in (1, 2, 3, 4)] == [True] * 4
    assert output.count("the model is called") == 4
    assert "Error: SoldOut: Grand Hotel Lisbon is sold out" in output
    assert "['LIS-0715', 'Pension Sol']" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_an_agent_with_a_model_books_once_however_often_it_is_run(tmp_path: Path, provider: str) -> None:
    with ModelServer() as model:
        for _ in range(2):
            output = run("model_agent.py", tmp_path, provider, environment=model.environment)
            assert output == "You fly to Lisbon at 12:40.\n"
        assert model.turns() == [0, 1, 2]
    assert len((tmp_path / "bookings.txt").read_text().splitlines()) == 1


def test_many_agents_share_a_store(tmp_path: Path) -> None:
    assert "50 agents saved 500 turns; 500 checkpoints verified: ok=True" in run("async_agents.py", tmp_path)


def test_old_classes_are_upgraded_and_unstorable_values_named(tmp_path: Path) -> None:
    output = run("custom_types.py", tmp_path)
    assert "upgraded: Trip(city='Lisbon', country='PT'" in output
    assert "price in cents: 41900" in output
    assert 'refused, nothing written: state["plan"][0]["then"]' in output


def test_a_langgraph_chat_travels_in_time_and_stays_small(tmp_path: Path) -> None:
    output = run("langgraph_chat.py", tmp_path)
    assert "6 checkpoints, the newest first" in output
    assert "another way: ['Hello', 'To Oslo, please']" in output
    assert "threads of alice: ['alice-001', 'long']" in output
    in_full, stored = (int(size.replace(",", "")) for size in re.findall(r"([\d,]+) kB$", output, flags=re.MULTILINE))
    assert in_full > 20 * stored
    shown = re.findall(r"perdure (show|log) (.*)", output)
    assert [command for command, _ in shown] == ["show", "log"]
    with contextlib.chdir(tmp_path):
        assert [main([command, *arguments.split()]) for command, arguments in shown] == [0, 0]
    with perdure.open(str(tmp_path / "chat.db")) as store:
        assert store.ops.verify().ok


def test_an_agent_of_langchain_is_killed_and_books_once(tmp_path: Path) -> None:
    output = run("create_agent.py", tmp_path)
    assert output.count("the model sees: [('book', ['flight'])]") == 2
    assert "killed\n" in output
    assert "Done: booked LIS-0715.\nended with 0\nthe airline booked: ['LIS-0715']" in output
    assert list(tmp_path.iterdir()) == []


def test_a_graph_whose_interrupt_was_answered_is_resumed_though_the_worker_is_killed(tmp_path: Path) -> None:
    output = run("langgraph_inbox.py", tmp_path).splitlines()
    assert output[2:] == ["the worker is killed, after it booked", "the graph says: booked LH400", "bookings: 1"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_agent_of_a_framework_is_killed_after_it_paid_and_goes_on(tmp_path: Path, framework: str) -> None:
    first = run(f"{framework}_agent.py", tmp_path, code=-signal.SIGKILL)
    second = run(f"{framework}_agent.py", tmp_path)
    assert (first + second).splitlines() == [
        *(f"the model is called after {results} results" for results in range(3)),
        "Your room is booked: paid.",
        "payments: 1",
    ]


def test_transcripts_of_claude_are_kept_though_the_process_is_killed(tmp_path: Path) -> None:
    assert run("claude_agent_session.py", tmp_path, code=-signal.SIGKILL) == "entries before: 0\n"
    told = "entries before: 2\nentries after: 3\nsessions: ['A night in Lisbon, please']\n"
    assert run("claude_agent_session.py", tmp_path) == told


def test_a_chat_of_llama_index_that_was_killed_goes_on(tmp_path: Path) -> None:
    assert run("llama_index_chat.py", tmp_path, code=-signal.SIGKILL) == "messages before: 0\n"
    told = "messages before: 2\n['A night in Lisbon, please', 'I found Pension Sol.', 'Book it.']\n"
    assert run("llama_index_chat.py", tmp_path) == told


def test_an_application_of_burr_that_was_killed_goes_on(tmp_path: Path) -> None:
    assert run("burr_application.py", tmp_path, code=-signal.SIGKILL) == "searching\n"
    told = "booked: Pension Sol in Lisbon\n['1 book completed', '0 search completed']\n"
    assert run("burr_application.py", tmp_path) == told


def test_a_workflow_of_the_agent_framework_that_was_killed_goes_on(tmp_path: Path) -> None:
    assert run("agent_framework_workflow.py", tmp_path, code=-signal.SIGKILL) == "searching in Lisbon\nbooking\n"
    assert run("agent_framework_workflow.py", tmp_path) == "booking\nbooked: Pension Sol\n"


def test_a_langgraph_agent_remembers_finds_by_meaning_and_forgets(tmp_path: Path) -> None:
    for _ in range(2):
        output = run("langgraph_memory.py", tmp_path)
        assert "ai: I know: I prefer dark mode, I am a software engineer, I love hiking in the mountains\n" in output
        assert "bob: What do you know about me?\n         ai: I know nothing yet!" in output
        assert "outdoor activities?\n         ai: I know: I love hiking in the mountains\n" in output
        assert "ai: Forgotten: I am a software engineer" in output
        assert "ai: I know: I prefer dark mode, I love hiking in the mountains\n" in output
        assert "step 10: 8 messages, next: -" in output
    with perdure.open(str(tmp_path / "memory.db")) as store:
        assert {item.value["fact"] for item in store.memory("users", "alice").list()} == {
            "I prefer dark mode",
            "I love hiking in the mountains",
        }
        assert store.ops.verify().ok
