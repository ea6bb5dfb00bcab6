"""A worker process for tests of streams: `python stream_worker.py URL`. Its step emits as many numbers as it is asked.

Values name the execution by its process, so that a test sees which one a value came from.
"""

from __future__ import annotations

import os
import sys
import time

import perdure


@perdure.step(name="streamed.talk")
def talk(count: int, pause_s: float) -> int:
    for number in range(count):
        perdure.emit({"number": number, "from": os.getpid(), "at": time.time()})
        time.sleep(pause_s)
    return count


@perdure.durable(name="streamed.agent")
def agent(count: int, pause_s: float) -> int:
    return talk(count, pause_s) + talk(count, pause_s)


if __name__ == "__main__":
    with perdure.open(sys.argv[1], lease_s=1.0) as store:
        perdure.Worker(store, poll_s=0.1).run()
