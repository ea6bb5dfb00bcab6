"""`perdure.subtask`: a child run whose bounded result goes into the parent."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

import perdure


def test_a_subtask_gives_its_result_once_and_cuts_a_long_text(lab: Lab) -> None:
    @lab.durable(name="subtasks.read")
    async def read(size: int) -> Any:
        lab.ran.append(size)
        return "tide " * size if size else {"all": list(range(5000))}

    @lab.durable(name="subtasks.parent")
    async def parent(size: int) -> Any:
        found = await lab(perdure.subtask(read, size, limit_tokens=100))
        return [found, await lab(perdure.subtask(read, 3))]

    assert lab.run(parent, 10, id="small").result() == ["tide " * 10, "tide " * 3]
    assert lab.ran == [10, 3]
    long, _ = lab.run(parent, 500, id="long").result()
    kept = "tide " * 49 + "tide"  # 100 tokens by the estimate, which counts two for a word of four letters
    assert long == f"{kept}… ({500 * 5 - len(kept):,} more characters: the result of run long/1)"
    assert lab.store.get_run("long/1").result() == "tide " * 500
    with pytest.raises(perdure.RunStuck, match="let it return a summary"):
        lab.run(parent, 0, id="large").result()
