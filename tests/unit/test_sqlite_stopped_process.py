"""A process that is stopped (SIGSTOP) in the queue of writers, outside of a transaction, does not stop the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

import perdure
from perdure.storage.sqlite.file_lock import LOCK_ENDS, PATIENCE_S

HOLDER = """
import fcntl, os, sys, signal
held = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
for one in held:
    fcntl.flock(one, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("ends", [LOCK_ENDS[:1], LOCK_ENDS[1:], LOCK_ENDS], ids=["front", "waiting", "both"])
def test_a_stopped_process_holds_up_the_others_once_and_for_a_bounded_time(tmp_path: Path, ends: list[str]) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        thread = store.thread("t")
        thread.save({"n": 0})
        stopped = subprocess.Popen([sys.executable, "-c", HOLDER, *(path + end for end in ends)])
        try:
            assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
            begun = monotonic()
            for n in range(1, 9):
                thread.save({"n": n})
            assert monotonic() - begun < 6 * PATIENCE_S  # not once for each save
        finally:
            stopped.send_signal(signal.SIGKILL)
            stopped.wait()
        thread.save({"n": 9})
        assert thread.load().state == {"n": 9}
        with perdure.open(path) as other:  # the queue is as it was
            other.thread("t").update({"n": 5})
