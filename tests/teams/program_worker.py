"""A worker for the team of `team_program.py`, to be killed: `python program_worker.py URL TENANT FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from team_program import program_team

import perdure

if __name__ == "__main__":
    url, tenant, folder = sys.argv[1:]
    store = perdure.open(url, tenant=tenant, lease_s=1)
    program_team(store, Path(folder), 1000)
    perdure.Worker(store, poll_s=0.02).run()
