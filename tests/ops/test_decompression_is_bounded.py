"""What a row claims does not decide how much memory reading it takes: the limit on texts does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from sealed_kit import Raw

import perdure
from perdure.values.compress import zstd
from perdure.values.limits import INFLATED_MAX

SOURCE = Path(perdure.__file__).parent
CLAIMED = 1 << 30
READ = """
import sys
import perdure
with perdure.open(sys.argv[1]) as store:
    assert not store.ops.verify().ok
    try:
        print(store.thread("a").load())
    except perdure.errors.Damaged:
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print("damaged", int(status["VmHWM"].split()[0]) // 1024)  # ru_maxrss would be that of the process before exec
"""


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A frame of some hundred kilobytes that claims and gives a gigabyte."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.content_size_flag: 1})
    compressor.set_pledged_input_size(CLAIMED)
    block = bytes(16 << 20)
    parts = [compressor.compress(block) for _ in range(CLAIMED // len(block))]
    frame = b"".join([*parts, compressor.flush()])
    assert zstd.get_frame_info(frame).decompressed_size == CLAIMED > INFLATED_MAX
    return frame


def test_a_row_that_claims_gigabytes_is_damaged_and_costs_no_memory(tmp_path: Path, bomb: bytes) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("a").save({"n": 1})
    raw = Raw(path)
    raw("UPDATE body SET full_text = ?", (bomb,))
    raw("UPDATE record SET size = ?", (CLAIMED,))
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("damaged "), done.stderr
    assert int(done.stdout.split()[1]) < 300, "megabytes"


def test_all_decompression_passes_through_one_function() -> None:
    calls = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "decompress" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decompress"
    ]
    assert calls == ["values/compress.py"]
