"""A worker for the coins of `team_kit.py`, to be killed: `python coin_worker.py URL AGENTS`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from team_kit import coin_handler

import perdure

if __name__ == "__main__":
    url, count = sys.argv[1:]
    store = perdure.open(url, lease_s=1)
    store.team("coins").agent(attempts=1000)(coin_handler(int(count)))
    perdure.Worker(store, poll_s=0.02).run()
