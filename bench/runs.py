"""Durable runs on a file, beside DBOS and a loop of bare commits: steps, effects, resuming, sizes, forks.

The floor is what any library on SQLite has to do at least: one INSERT of 100 bytes per commit, in WAL mode with
synchronous=FULL. An effect has two commits, so half of that is its ceiling. The peer is DBOS with its file in WAL mode,
whose steps stand for effects too: it has no intents. Contenders are processes of their own (`bench.runs_contenders`);
they work in turns, and the best of a few rounds counts, since neighbours can only make a round slower.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.measure import KB, BareTable, Row, Run, seconds
from bench.runs_contenders import DBOS, OURS, Contender, stored_bytes

EFFECTS_BAR = 0.33
EFFECTS_PEER_BAR = 2.8
STEPS_BAR = 0.65
STEPS_PEER_BAR = 5.0
RESUME_BAR = 10.0
SIZE_BAR = 1.0
FORK_BAR = 0.01
RECORD = b"x" * 100
LONG_RUN = 10_000
FORKED_RUN = 1000
FORKS = {OURS: 100, DBOS: 3}  # of which the mean is taken: databases grow by pages


def runs(run: Run) -> list[Row]:
    return [*_rates(run), *_resume(run), *sizes(run, str(run.folder / "ours.db"), str(run.folder / "dbos.db"), "")]


def best_in_turns(rounds: int, actions: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The best rate of each, measured one after the other, round by round, after one round that does not count."""
    best = dict.fromkeys(actions, 0.0)
    for number in range(-1, rounds):
        for name, action in actions.items():
            rate = action()
            if number >= 0:
                best[name] = max(best[name], rate)
    return best


def _rates(run: Run) -> list[Row]:
    bare = BareTable(run.folder / "bare.db")
    commits, effects, steps = run.count(3000, 20), run.count(1000, 10), run.count(2000, 10)
    peer_steps = run.count(500, 10)
    with (
        Contender(OURS, str(run.folder / "rates-ours.db")) as ours,
        Contender(DBOS, str(run.folder / "rates-dbos.db")) as dbos,
    ):
        best = best_in_turns(
            run.count(3, 1),
            {
                "bare": lambda: commits / seconds(lambda: _insert(bare, commits)),
                "effects": lambda: ours.rate("effects", effects),
                "steps": lambda: ours.rate("steps", steps),
                "dbos": lambda: dbos.rate("steps", peer_steps),
            },
        )
    bare.close()
    floor, peer = best["bare"], best["dbos"]
    return [
        Row("SQLite runs: effects", best["effects"], "/s", peer, floor, best["effects"] / floor, EFFECTS_BAR,
            "at least", note="floor: bare commits, of which an effect has two; ratio: to the floor"),
        Row("  beside DBOS steps", best["effects"], "/s", peer, None, best["effects"] / peer, EFFECTS_PEER_BAR,
            "at least", note="DBOS has no intents; its file is in WAL mode"),
        Row("SQLite runs: plain steps", best["steps"], "/s", peer, floor, best["steps"] / floor, STEPS_BAR, "at least",
            note="ratio: to the floor"),
        Row("  beside DBOS", best["steps"], "/s", peer, None, best["steps"] / peer, STEPS_PEER_BAR, "at least"),
    ]  # fmt: skip


def _insert(bare: BareTable, count: int) -> None:
    for _ in range(count):
        bare.insert(RECORD)


def _resume(run: Run) -> list[Row]:
    """A long run whose process was killed, to its first new step, in a new process; imports are not counted.

    For DBOS neither is starting it, nor the wait until its queue is polled: only the function, from its first line.
    """
    count = run.count(LONG_RUN, 50)
    took: dict[str, list[float]] = {OURS: [], DBOS: []}
    for module, options in ((OURS, ("normal",)), (DBOS, ())):
        for number in range(run.count(2, 1)):
            location = str(run.folder / f"long-{number}-{module}.db")
            builder = Contender(module, location, *options)
            builder.ask("build", count, "long")
            builder.kill()
            with Contender(module, location) as other:
                took[module].append(other.ask("resume", count, "long"))
    ours, peer = min(took[OURS]), min(took[DBOS])
    return [
        Row(f"SQLite runs: resume of {count:,} steps", ours * 1000, "ms", peer * 1000, None, peer / ours, RESUME_BAR,
            "at least", note="a new process after SIGKILL, from the call to the first new step")
    ]  # fmt: skip


def sizes(run: Run, ours_at: str, dbos_at: str, where: str) -> list[Row]:
    """What a step with a small result takes, and what a fork adds to a run with results of 1 kB."""
    count, forked = run.count(2000, 400), run.count(FORKED_RUN, 100)
    kept = forked * 9 // 10
    step: dict[str, float] = {}
    added: dict[str, tuple[float, float]] = {}
    took_ms: dict[str, float] = {}
    for module, location in ((OURS, ours_at), (DBOS, dbos_at)):
        with Contender(module, location) as contender:
            contender.ask("steps", 1)
            empty = stored_bytes(location)
            contender.ask("steps", count)
            stepped = stored_bytes(location)
            contender.ask("texts", forked, "original")
            original = stored_bytes(location)
            took_ms[module] = min(contender.ask("fork", "original", kept) for _ in range(FORKS[module])) * 1000
            added[module] = (stored_bytes(location) - original) / FORKS[module], original - stepped
            step[module] = (stepped - empty) / count
    (ours, whole), (peer, peer_whole) = added[OURS], added[DBOS]
    return [
        Row(f"{where or 'SQLite runs'}: bytes per step", step[OURS], "B", step[DBOS], None, step[OURS] / step[DBOS],
            SIZE_BAR, note=f"{count:,} steps with a small result; without free room"),
        Row(f"  fork at {kept} of {forked:,} adds", ours / KB, "kB", peer / KB, None, ours / whole, FORK_BAR,
            note=f"of {whole / KB:,.0f} kB (1 kB results); DBOS {peer / peer_whole:.0%} of {peer_whole / KB:,.0f} kB; "
            f"{took_ms[OURS]:.1f} ms, DBOS {took_ms[DBOS]:.1f} ms"),
    ]  # fmt: skip
