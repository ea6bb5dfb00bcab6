"""The real process: the script, closed pipes, terminals, questions, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

CTRL_C = b"\x03"
MODULE = [sys.executable, "-m", "perdure"]


@pytest.fixture
def where(tmp_path: Path) -> Path:
    with perdure.open(str(tmp_path / "agent.db")) as store:
        alice = store.thread("alice", metadata={"user": "[red]alice[/red]"})
        for n in range(3):
            alice.save({"n": n, "text": "x" * 100_000}, note=f"turn {n}")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("PERDURE_STORE", "COLUMNS")}
    return kept | {"TERM": "xterm-256color"} | more


def on_terminal(
    command: list[str], where: Path, *, answer: bytes = b"", env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run on a pseudo-terminal, type the answer once a question is asked: exit code and all that was shown."""
    main_side, process_side = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=where,
        env=environment(**env or {}),
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        start_new_session=True,
    )
    os.close(process_side)
    shown = b""
    try:
        typed = False
        while True:
            if not select.select([main_side], [], [], 1.0)[0]:
                if typed and answer == CTRL_C:  # one between the question and its read is noticed at the next key
                    os.write(main_side, CTRL_C)
                continue
            if not (piece := os.read(main_side, 65_536)):
                break
            shown += piece
            if answer and not typed and b"[y/N]" in shown:
                os.write(main_side, answer)
                typed = True
    except OSError:  # Linux: the other side is closed
        pass
    finally:
        os.close(main_side)
    return process.wait(30), shown.decode()


def test_the_script_is_installed_and_knows_its_version() -> None:
    script = Path(sys.executable).with_name("perdure")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"perdure {perdure.__version__}\n"


def test_a_reader_that_has_enough_is_no_error(where: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*MODULE, "show", "alice"], cwd=where, env=environment(), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_ascii_stdout_still_gets_valid_json(where: Path) -> None:
    with perdure.open(str(where / "agent.db")) as store:
        store.thread("mañana").save({"é": "漢"}, note="ü")
    env = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = subprocess.run([*MODULE, "show", "mañana", "--json"], cwd=where, env=env, capture_output=True, check=True)
    assert json.loads(done.stdout)["state"] == {"é": "漢"}
    done = subprocess.run([*MODULE, "threads"], cwd=where, env=env, capture_output=True, check=True)
    assert b"ma\\xf1ana" in done.stdout


def test_a_narrow_terminal_loses_nothing(where: Path) -> None:
    with perdure.open(str(where / "agent.db")) as store:
        head = store.thread("alice").get_head()
    assert head is not None
    code, shown = on_terminal([*MODULE, "log", "alice"], where, env={"COLUMNS": "30"})
    assert code == 0, shown
    assert all(text in shown for text in (head.id, "step", "state", "turn 2"))


def test_a_terminal_sees_progress(where: Path) -> None:
    code, shown = on_terminal([*MODULE, "store", "verify"], where)
    assert code == 0, shown
    assert "verifying 1/1" in shown
    assert "no problems" in shown


def test_a_terminal_is_asked_before_anything_is_removed(where: Path) -> None:
    command = [*MODULE, "thread", "delete", "alice"]
    code, shown = on_terminal(command, where, answer=b"n\n")
    assert code == 1, shown
    assert "nothing was changed" in shown
    code, shown = on_terminal(command, where, answer=b"y\n")
    assert code == 0, shown
    assert "3 records removed" in shown


def test_ctrl_c_is_130_and_no_traceback(where: Path) -> None:
    """The question is asked in a session of its own, whose terminal turns the key into SIGINT."""
    inner = [*MODULE, "thread", "prune", "alice", "--keep", "1"]
    # Tests that run in the background have SIGINT ignored, and children inherit that.
    take = (
        "import os,sys,fcntl,signal,termios; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    code, shown = on_terminal([sys.executable, "-c", take, *inner], where, answer=CTRL_C)
    assert code == 130, shown
    assert "\r\nperdure: interrupted" in shown  # on a line of its own, not behind the question
    assert "Traceback" not in shown


# A step that hangs, after it has said so through a pipe.
HANGING = """
import os
import threading
import perdure


@perdure.step(name="interrupted-hang")
def hang():
    os.close(os.open("began", os.O_WRONLY))  # waits for whoever reads
    threading.Event().wait(60)


@perdure.durable(name="interrupted-wait")
def wait():
    hang()
"""


def begun(where: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a shell starts it, whose agent hangs in its step."""
    (where / "hanging.py").write_text(HANGING)
    os.mkfifo(where / "began")
    process = subprocess.Popen(
        [*MODULE, *arguments],
        cwd=where,
        env=environment(TMPDIR=str(where)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    with open(where / "began", "rb") as began:
        began.read()
    return process


@pytest.mark.parametrize("options", [[], ["--workers", "1"]])
def test_ctrl_c_ends_a_drill_with_all_its_processes(where: Path, options: list[str]) -> None:
    process = begun(where, "drill", "hanging.py:wait", *options)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)  # also those that it had started have let go of the pipes
    assert (process.returncode, out, err) == (130, "", "perdure: interrupted\n")
    assert not list(where.glob("perdure-drill-*"))


def test_a_worker_says_how_long_it_waits_for_its_runs_after_ctrl_c(where: Path) -> None:
    (where / "hanging.py").write_text(HANGING)
    start = "import perdure, hanging; perdure.open('agent.db').start(hanging.wait, id='hangs')"
    subprocess.run([sys.executable, "-c", start], cwd=where, check=True)
    process = begun(where, "worker", "hanging.py", "--drain", "50s")
    assert process.stderr is not None
    assert "Ctrl-C ends it" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    said = process.stderr.readline()
    assert "1 run has 50 s to finish" in said
    assert "Ctrl-C" in said
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0, out
