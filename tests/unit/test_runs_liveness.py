"""Owners of runs: dead only if certain. With real processes, killed, stopped and forked."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.errors import StoreClosed, StoreError
from perdure.runs.engine import liveness
from perdure.runs.engine.liveness import Owner
from perdure.storage import files

linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")

PREAMBLE = """
import os, sys
from perdure.runs.engine.liveness import Owner
owner = Owner(sys.argv[1])
print(owner.text, flush=True)
"""
WAIT = "sys.stdin.readline()\n"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that has an owner of that store; it says its text first."""
    started: list[subprocess.Popen[str]] = []

    def begin(target: object, script: str = WAIT) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PREAMBLE + script, str(target)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        with process:
            pass


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "agent.db"
    path.touch()
    return path


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def owner_files(store: Path) -> list[str]:
    return sorted(path.name for path in store.parent.glob("*-owner-*"))


# SQLite


def test_a_living_owner_is_not_dead_and_a_killed_one_is(store: Path, start: Start) -> None:
    process, observer = start(store), Owner(str(store))
    text = line(process)
    assert not observer.is_dead(text)
    assert len(owner_files(store)) == 1
    kill(process)
    assert observer.is_dead(text)
    assert owner_files(store) == []  # removed by whoever noticed
    assert observer.is_dead(text)


def test_a_stopped_owner_is_alive(store: Path, start: Start) -> None:
    process, observer = start(store), Owner(str(store))
    text = line(process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not observer.is_dead(text)
    process.send_signal(signal.SIGCONT)


def test_a_process_that_exits_removes_its_file(store: Path, start: Start) -> None:
    process, observer = start(store, WAIT), Owner(str(store))
    text = line(process)
    process.communicate("go\n")
    assert process.returncode == 0
    assert owner_files(store) == []
    assert observer.is_dead(text)


def test_a_forked_child_does_not_keep_its_dead_parent_alive(store: Path, start: Start) -> None:
    script = """
if os.fork() == 0:
    print("child", flush=True)
    os.read(0, 1)
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED)
"""
    process, observer = start(store, script), Owner(str(store))
    text = line(process)
    assert line(process) == "child"
    assert not observer.is_dead(text)
    kill(process)  # and only it
    assert observer.is_dead(text)
    os.killpg(process.pid, signal.SIGKILL)  # the child was there all the time, or this fails


def test_a_forked_child_that_exits_or_closes_takes_nothing_from_its_parent(store: Path, start: Start) -> None:
    script = """
child = os.fork()
if child == 0:
    mine = owner.text
    print(mine, flush=True)
    owner.close()
    sys.exit(0)
os.waitpid(child, 0)
print(owner.text, flush=True)
sys.stdin.readline()
"""
    process, observer = start(store, script), Owner(str(store))
    parent, child, again = line(process), line(process), line(process)
    assert parent == again != child
    assert observer.is_dead(child)
    assert not observer.is_dead(parent)


def test_a_forked_child_that_ends_without_ever_asking_leaves_its_parents_file(store: Path, start: Start) -> None:
    script = """
child = os.fork()
if child == 0:
    sys.exit(0)  # with finalizers and exit handlers
os.waitpid(child, 0)
print("on", flush=True)
sys.stdin.readline()
"""
    process, observer = start(store, script), Owner(str(store))
    text = line(process)
    assert line(process) == "on"
    assert len(owner_files(store)) == 1
    assert not observer.is_dead(text)


def test_two_observers_at_once_do_not_take_each_other_for_the_owner(store: Path, start: Start) -> None:
    process, observer = start(store), Owner(str(store))
    text = line(process)
    kill(process)
    with open(f"{store}-owner-{text}") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert observer.is_dead(text)


@linux_only
def test_a_fork_while_another_thread_makes_owners_leaves_no_lock_in_the_child(store: Path, start: Start) -> None:
    script = """
from threading import Thread
texts = []
def make():
    for _ in range(200):
        other = Owner(sys.argv[1])
        texts.append(other.text)
        other.close()
thread = Thread(target=make)
thread.start()
held = 0
while thread.is_alive():
    child = os.fork()
    if child == 0:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        os._exit(any("-owner-" in os.readlink(link) for link in links if os.path.lexists(link)))
    held += os.waitpid(child, 0)[1]
print(held, len(texts), flush=True)
"""
    process = start(store, script)
    line(process)
    assert line(process) == "0 200"


def test_nothing_is_made_before_the_text_is_asked_for(store: Path) -> None:
    owner = Owner(str(store))
    assert owner_files(store) == []
    assert owner.text == owner.text
    assert len(owner_files(store)) == 1
    owner.close()
    owner.close()
    assert owner_files(store) == []
    with pytest.raises(StoreClosed):
        _ = owner.text


def test_an_owner_that_nobody_closed_is_cleaned_up_with_its_object(store: Path) -> None:
    owner = Owner(str(store))
    text = owner.text
    del owner
    assert owner_files(store) == []
    assert Owner(str(store)).is_dead(text)


def test_two_owners_of_one_process_are_two(store: Path) -> None:
    one, two = Owner(str(store)), Owner(str(store))
    first = one.text
    assert first != two.text
    assert not one.is_dead(first)
    assert not two.is_dead(first)
    one.close()
    assert two.is_dead(first)
    assert not one.is_dead(two.text)


def test_the_store_may_be_named_through_a_link(store: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(store)
    owner = Owner(str(link))
    assert not Owner(str(store)).is_dead(owner.text)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_the_file_has_the_permissions_of_the_store(store: Path, mode: int) -> None:
    store.chmod(mode)
    owner = Owner(str(store))
    assert owner.text
    [name] = owner_files(store)
    assert stat.S_IMODE((store.parent / name).stat().st_mode) == mode


def test_what_killed_processes_left_is_swept_by_the_next_owner_and_the_living_stay(store: Path, start: Start) -> None:
    killed, living = start(store), start(store)
    text = line(living)
    line(killed)
    kill(killed)
    assert len(owner_files(store)) == 2
    owner = Owner(str(store))
    names = sorted(f"agent.db-owner-{mine}" for mine in (owner.text, text))
    assert owner_files(store) == names
    assert not owner.is_dead(text)


def test_an_owner_whose_file_was_swept_before_it_was_locked_takes_another(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, share = Owner(str(store)), files.share_like

    def sweep_between(descriptor: int, path: str) -> None:
        monkeypatch.setattr(liveness, "share_like", share)
        share(descriptor, path)
        [name] = owner_files(store)
        swept.append(name.rpartition("-")[2])
        assert observer.is_dead(swept[0])

    swept: list[str] = []
    monkeypatch.setattr(liveness, "share_like", sweep_between)
    owner = Owner(str(store))
    assert owner.text != swept[0]
    assert not observer.is_dead(owner.text)


def test_a_folder_that_does_not_exist_is_an_error_and_says_nothing_about_others(tmp_path: Path) -> None:
    owner = Owner(str(tmp_path / "none" / "agent.db"))
    with pytest.raises(StoreError, match="folder must be writable"):
        _ = owner.text
    assert not owner.is_dead("0" * 32)


HOSTILE = [
    "",
    "x",
    "f:" + "0" * 32,
    "../../x",
    "0" * 31,
    "0" * 33,
    "0" * 32 + "\n",
    "A" * 32,
    "0" * 32 + "/../victim",
    "\uff10" * 32,
    "0" * 10_000_000,
    "\0",
    "../" + "0" * 29,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:40]))
def test_a_hostile_text_is_not_dead_and_no_file_is_touched(
    store: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [Owner(str(store)), Owner()]

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"touched {arguments}")

    for name in ("open", "unlink", "stat"):
        monkeypatch.setattr(os, name, refuse)
    assert not any(owner.is_dead(text) for owner in owners)


def test_a_link_in_place_of_an_owners_file_is_not_followed(store: Path) -> None:
    store.with_name(f"agent.db-owner-{'0' * 32}").symlink_to(store)
    assert not Owner(str(store)).is_dead("0" * 32)
    assert store.exists()


# PostgreSQL, and a store in memory


def test_without_a_file_nothing_is_certain_and_a_forked_child_is_another_owner() -> None:
    owner = Owner()
    text = owner.text
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, owner.text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    texts = {text, os.read(read, 100).decode(), Owner().text}
    os.close(read)
    os.close(write)
    assert len(texts) == 3
    assert owner.text == text
    assert not any(Owner().is_dead(each) for each in texts)
