"""How long `import perdure` takes: every command line call and every short-lived worker pays it.

Measured inside fresh interpreters around the import alone, best of fifteen, because anything above the best is noise of
the machine. Bytecode is cached, as pip leaves it; the cache is our own, in case the environment forbids writing one. The floor, in turns, is the import of what Perdure stands on (its five dependencies), so the difference
is our own; the peer is a bare interpreter's start, for scale.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.measure import Row, Run, seconds

BAR_MS = 100.0
_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_DEPENDENCIES = f"apsw, msgspec, orjson, blake3, {_ZSTD}"


def startup(run: Run) -> list[Row]:
    ours: list[float] = []
    floor: list[float] = []
    bare: list[float] = []
    _import_ms("perdure", run.folder)  # compiles
    for _ in range(run.count(15, 2)):
        ours.append(_import_ms("perdure", run.folder))
        floor.append(_import_ms(_DEPENDENCIES, run.folder))
        bare.append(seconds(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) * 1000)
    return [
        Row("import perdure", min(ours), "ms", peer=min(bare), floor=min(floor), ratio=min(ours) / min(floor),
            bar=BAR_MS, judged="ours", note="floor: importing its dependencies; peer: starting a bare interpreter")
    ]  # fmt: skip


def _import_ms(modules: str, cache: Path) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", _TIMED.format(modules)]
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return float(done.stdout) * 1000
