"""A memory put in a durable function, against a plain one and a bare insert with its commit.

In a run the versions and the journal entry are one transaction, so a put in a run is one commit, as a plain one is.
The three are measured in turns inside one run; the plain one runs in an empty context, where there is no run.
"""

from __future__ import annotations

import contextvars
from statistics import median

import orjson

import perdure
from bench.measure import BareTable, Row, Run, in_turns, small_states

PUT_BAR = 2.0
WARM_UP = 3
US = 1_000_000


def memory_in_runs(run: Run) -> list[Row]:
    rounds = run.count(1500, 10)
    values = small_states(rounds + WARM_UP, 200)
    bare = BareTable(run.folder / "bare.db")
    with perdure.open(str(run.folder / "ours.db")) as store:
        inside, outside = store.memory("users", "in a run"), store.memory("users", "plain")
        texts, recorded, plain = map(orjson.dumps, values), enumerate(values), enumerate(values)
        times: list[list[float]] = []

        def put_outside() -> None:
            number, value = next(plain)
            contextvars.Context().run(outside.put, f"fact-{number}", value)

        def put_inside() -> None:
            number, value = next(recorded)
            inside.put(f"fact-{number}", value)

        @perdure.durable(name="bench.memory_in_runs")
        def agent() -> None:
            times.extend(in_turns(rounds, put_inside, put_outside, lambda: bare.insert(next(texts)), warm_up=WARM_UP))

        store.run(agent).result()
    bare.close()
    in_run, outside_s, floor = (median(each) for each in times)
    return [
        Row("memory put in a run", in_run * US, "us", peer=outside_s * US, floor=floor * US, ratio=in_run / outside_s,
            bar=PUT_BAR, note=f"{rounds} puts of 200 B; peer: a plain put; floor: bare apsw insert")
    ]  # fmt: skip
