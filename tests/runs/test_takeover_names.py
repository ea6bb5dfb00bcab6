"""A run that one entry point began is finished by another one: the same errors are caught, the same classes are found.

A script is `__main__` in its own process and `app` in a worker. What the journal calls its classes must mean the same
in both, or an `except` does not match, the run fails and its payment is undone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

APP = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import perdure


class Shop:
    class SoldOut(Exception):
        pass


@perdure.register
@dataclass
class Order:
    item: str


def note(what):
    with Path(os.environ["LEDGER"]).open("a") as file:
        file.write(what + "\\n")


def refund(result):
    note("refunded")


@perdure.step
def find() -> Order:
    return Order("seat")


@perdure.effect(undo=refund)
def pay(order: Order) -> str:
    note("paid")
    return "receipt"


@perdure.step
def reserve(order: Order) -> str:
    raise Shop.SoldOut("none left")


@perdure.durable
def buy() -> str:
    order = find()
    assert isinstance(order, Order)
    pay(order)
    try:
        return reserve(order)
    except Shop.SoldOut as error:
        if "DIE" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"waiting list: {error}"


if __name__ == "__main__":
    with perdure.open(os.environ["PERDURE_STORE"]) as store:
        store.run(buy, id="r")
"""
WORKS = "perdure.Worker(store).run(until_idle=True)"  # with the copy that was imported: it came last
QUEUE = "import app, perdure, os; perdure.open(os.environ['PERDURE_STORE']).start(app.buy, id='r')"
SCRIPT, MODULE, WORKER = ["app.py"], ["-m", "app"], ["-m", "perdure", "worker", "app.py", "--once"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    for folder in (tmp_path, tmp_path / "shop"):
        (folder / "app.py").write_text(APP)
    return tmp_path


def python(place: Path, *arguments: str, die: bool = False, folder: str = ".") -> int:
    """Run Python in a folder of the place: gives how it ended."""
    extra = {
        "PERDURE_STORE": str(place / "agent.db"),
        "LEDGER": str(place / "ledger"),
        **({"DIE": "1"} if die else {}),
    }
    return subprocess.run([sys.executable, *arguments], cwd=place / folder, env={**os.environ, **extra}).returncode


def ended(place: Path) -> tuple[str, str, str]:
    """The run's status, its result, and what was done to the world."""
    with perdure.open(str(place / "agent.db")) as store:
        run = store.get_run("r")
        result = run.result() if run.refresh().status == "done" else ""
        return run.refresh().status, result, (place / "ledger").read_text()


@pytest.mark.parametrize(
    ("begin", "resume", "folders"),
    [
        (SCRIPT, WORKER, (".", ".")),
        (MODULE, ["-m", "perdure", "worker", "../app.py", "--once"], (".", "shop")),
        (["shop/app.py"], ["-m", "shop.app"], (".", ".")),
        (["-m", "shop.app"], WORKER, (".", "shop")),
        (WORKER, SCRIPT, (".", ".")),
    ],
    ids=[
        "script-worker",
        "module-worker elsewhere",
        "file of a package-module",
        "module-file of a package",
        "worker-script",
    ],
)
def test_another_entry_point_finishes_the_run(
    place: Path, begin: list[str], resume: list[str], folders: tuple[str, str]
) -> None:
    if begin is WORKER:
        assert python(place, "-c", QUEUE) == 0
    assert python(place, *begin, die=True, folder=folders[0]) == -signal.SIGKILL
    assert python(place, *resume, folder=folders[1]) == 0
    assert ended(place) == ("done", "waiting list: none left", "paid\n")


@pytest.mark.parametrize("resume", ['store.run(buy, id="r")', WORKS], ids=["the script's copy", "the imported copy"])
def test_of_a_script_that_is_imported_too_each_copy_sees_its_own_classes(place: Path, resume: str) -> None:
    (place / "helper.py").write_text("import app\n")
    twice = APP.replace("if __name__", "import helper\n\nif __name__")
    (place / "app.py").write_text(twice)
    assert python(place, "app.py", die=True) == -signal.SIGKILL
    (place / "app.py").write_text(twice.replace('store.run(buy, id="r")', resume))
    assert python(place, "app.py") == 0
    assert ended(place) == ("done", "waiting list: none left", "paid\n")


def test_a_renamed_error_leaves_the_run_stuck_until_its_name_is_back(place: Path) -> None:
    assert python(place, "app.py", die=True) == -signal.SIGKILL
    renamed = APP.replace("SoldOut", "NoSeats")
    (place / "app.py").write_text(renamed)
    assert python(place, *WORKER) == 0
    assert ended(place) == ("stuck", "", "paid\n")
    with perdure.open(str(place / "agent.db")) as store:
        why = getattr(store.get_run("r").refresh().waiting_for, "text", "")
    assert "SoldOut: none left" in why
    assert "app:Shop.SoldOut" in why
    (place / "app.py").write_text(
        renamed.replace("@perdure.register", "Shop.SoldOut = Shop.NoSeats\n\n\n@perdure.register")
    )
    assert python(place, "-m", "perdure", "run", "resume", "r") == 0
    assert python(place, *WORKER) == 0
    assert ended(place) == ("done", "waiting list: none left", "paid\n")
