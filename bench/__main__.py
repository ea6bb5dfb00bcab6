"""`python -m bench [NAME …]`: run the benchmarks and print one table, our figure beside a peer and a floor.

Exit code 1 if a bar is missed. `--quick` only proves that the scripts run: its figures mean nothing, so no bar is
judged. Files go to a folder on a disk (see `--folder`): in memory an fsync costs nothing and the ratios of durable
saves would be meaningless.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.adapters import adapters
from bench.backup import backup
from bench.bulk import bulk
from bench.calls import calls
from bench.compaction import compaction
from bench.encryption import encryption
from bench.forks import forks, siblings
from bench.inspector import inspector
from bench.langgraph import langgraph, langgraph_delta, langgraph_postgres, langgraph_short
from bench.langgraph_store import langgraph_store
from bench.listings import listings
from bench.loads import workload
from bench.measure import Benchmark, Row, Run
from bench.memory import memory
from bench.memory_in_runs import memory_in_runs
from bench.memory_search import memory_search
from bench.postgres import postgres
from bench.precision import precision
from bench.processes import processes
from bench.retrieval import retrieval
from bench.runs import runs
from bench.runs_claims import runs_claims
from bench.runs_postgres import runs_postgres
from bench.savers import savers
from bench.saves import append, cold, later, small
from bench.scale import scale
from bench.schedules import schedules
from bench.search import search
from bench.search_large import search_large
from bench.search_postgres import search_postgres
from bench.second_agent import second_agent
from bench.sizes import sizes
from bench.snapshot_restore import snapshot_restore
from bench.snapshots import snapshots
from bench.startup import startup
from bench.steps import steps
from bench.streams import streams
from bench.teams import teams
from bench.teams_protocols import teams_protocols


def cosmos(run: Run) -> list[Row]:
    from bench.cosmos import cosmos  # Azure's client takes long to import

    return cosmos(run)


BENCHMARKS: dict[str, Benchmark] = {
    "workload": workload,
    "compaction": compaction,
    "backup": backup,
    "encryption": encryption,
    "sizes": sizes,
    "calls": calls,
    "small": small,
    "append": append,
    "cold": cold,
    "later": later,
    "savers": savers,
    "processes": processes,
    "fork": forks,
    "forks": siblings,
    "postgres": postgres,
    "listings": listings,
    "inspector": inspector,
    "bulk": bulk,
    "adapters": adapters,
    "steps": steps,
    "schedules": schedules,
    "memory": memory,
    "memory-in-runs": memory_in_runs,
    "import": startup,
    "streams": streams,
    "teams": teams,
    "second-agent": second_agent,
    "scale": scale,
    "langgraph": langgraph,
    "langgraph-short": langgraph_short,
    "langgraph-delta": langgraph_delta,
    "langgraph-postgres": langgraph_postgres,
    "langgraph-store": langgraph_store,
    "cosmos": cosmos,
    "runs": runs,
    "runs-postgres": runs_postgres,
    "runs-claims": runs_claims,
    "retrieval": retrieval,
    "memory-search": memory_search,
    "precision": precision,
    "search": search,
    "search-large": search_large,
    "search-postgres": search_postgres,
    "snapshots": snapshots,
    "snapshot-restore": snapshot_restore,
    "teams-protocols": teams_protocols,
}
_LAYOUT = "{:<37}{:>16}{:>10}{:>10}{:>9}  {:<12}{:<6}{}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(_LAYOUT.format("what", "ours", "peer", "floor", "ratio", "bar", "", ""))
    rows: list[Row] = []
    start = time.perf_counter()
    for name in options.names or BENCHMARKS:
        for row in _run(BENCHMARKS[name], options):
            rows.append(row)
            print(_line(row, options.quick), flush=True)
    missed = [row.name.strip() for row in rows if row.passed is False and not options.quick]
    print(f"\n{len(rows)} rows in {time.perf_counter() - start:.0f} s" + _ending(missed, options.quick))
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too")
    parser.add_argument("--quick", action="store_true", help="a smoke run: seconds, not minutes; judges nothing")
    parser.add_argument("--folder", type=Path, help="where to put files (default: /var/tmp, which is on a disk)")
    parser.add_argument("--locomo", type=Path, metavar="FILE", help="the data of LoCoMo, which may not be shipped")
    parser.add_argument("--beam", type=Path, metavar="FOLDER", help="the git directory of a copy of BEAM's repository")
    parser.add_argument("--beam-size", default="100K", help="which conversations of BEAM (default: 100K)")
    return parser


def _run(benchmark: Benchmark, options: argparse.Namespace) -> list[Row]:
    """Run one benchmark in a folder of its own, and leave nothing behind."""
    on_disk = Path("/var/tmp")  # /tmp is in memory on many systems
    folder = Path(
        tempfile.mkdtemp(prefix="perdure-bench-", dir=options.folder or (on_disk if on_disk.is_dir() else None))
    )
    try:
        return benchmark(Run(folder, options.quick, options.locomo, options.beam, options.beam_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _line(row: Row, quick: bool) -> str:
    bar = ""
    if row.bar is not None:
        unit = f" {row.unit}" if row.judged == "ours" else ""
        bar = f"{'<=' if row.sense == 'at most' else '>='} {row.bar:g}{unit}"
    verdict = "" if row.passed is None or quick else ("PASS" if row.passed else "FAIL")
    figures = [_figure(row.peer), _figure(row.floor), "" if row.ratio is None else f"{row.ratio:.3g}"]
    return _LAYOUT.format(row.name, f"{_figure(row.ours)} {row.unit}", *figures, bar, verdict, row.note).rstrip()


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ending(missed: list[str], quick: bool) -> str:
    if quick:
        return "; a smoke run, nothing judged"
    return f"; missed: {', '.join(missed)}" if missed else "; every bar is met"


if __name__ == "__main__":
    sys.exit(main())
