"""Copy graphs' threads between Cosmos DB and a Perdure store, or inside Cosmos DB: checkpoint by checkpoint, as text.

Both keep a checkpoint as the same text, so nothing is decoded. The oldest are copied first. So after a kill the same
call copies what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from blake3 import blake3

from perdure.adapters import Encoded, LineCheckpoint, Lines, envelope_text
from perdure.cosmos.lines import CosmosLines
from perdure.errors import Damaged, NotFound, UsageError
from perdure.langgraph.configs import note_of, tags_of
from perdure.langgraph.native import NativeSaver
from perdure.ops import TransferReport

if TYPE_CHECKING:
    from perdure.cosmos.saver import CosmosSaver
    from perdure.langgraph import PerdureSaver

AnyLines = Lines | CosmosLines


def transfer(
    source: CosmosSaver | PerdureSaver,
    target: CosmosSaver | PerdureSaver,
    *,
    threads: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TransferReport:
    """Copy graphs' threads from one saver to another: between Cosmos DB and any store. All of them, or `threads`.

    Ids, states, metadata and pending writes stay the same; every checkpoint is read back and compared. A thread that
    the target has with the same checkpoints is skipped. One with others is refused. After a kill the same call copies
    what is missing. What steps and effects in a graph's nodes recorded is not copied: Cosmos DB keeps threads only.
    `progress` is called with (done, total) threads. In async code, call it with `asyncio.to_thread`.
    """
    for saver in (source, target):
        if not isinstance(saver, NativeSaver):
            raise UsageError(
                f"transfer copies from a CosmosSaver or PerdureSaver to another, not {type(saver).__name__}"
            )
    if isinstance(threads, str):
        raise UsageError(f"threads is a list of thread ids, such as threads=[{threads!r}], not a str")
    start, checkpoints, already = time.monotonic(), 0, list[str]()
    names = _graph_threads(source) if threads is None else list(dict.fromkeys(map(str, threads)))
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        copied = copy_thread(source._lines, name, target._lines, name)
        checkpoints += copied
        if not copied:
            already.append(name)
    return TransferReport(len(names) - len(already), checkpoints, 0, tuple(already), time.monotonic() - start)


def copy_thread(source: AnyLines, thread: str, target: AnyLines, name: str) -> int:
    """Copy a thread's checkpoints and writes under a name. Return how many checkpoints the target did not have."""
    expected = _digests(source, thread)
    if not expected:
        raise NotFound(f"there is no thread {thread!r} of a graph: nothing was copied")
    there = _digests(target, name)
    if not there.keys() <= expected.keys():
        raise UsageError(
            f"there is another thread {name!r} in the target already, or it has changed since: nothing was copied. "
            "Delete that one first"
        )
    for id_, namespace in sorted(expected):
        if there.get((id_, namespace)) != expected[id_, namespace]:
            checkpoint = source.line(thread, namespace).load(id_)
            if checkpoint is not None:
                _put(target, name, checkpoint, expected.keys(), is_new=(id_, namespace) not in there)
    if _digests(target, name) != expected:
        raise Damaged(f"the copy of thread {thread!r} differs, or one of the two has changed since: compare them")
    return len(expected) - len(there)


def _put(target: AnyLines, name: str, one: LineCheckpoint, known: Any, *, is_new: bool) -> None:
    envelope = orjson.loads(envelope_text(one.text) or b"{}")
    # Another serializer may encrypt: then no note or tag shows anything.
    metadata: Mapping[str, Any] = {} if envelope.get("serde") else envelope.get("metadata") or {}
    parent, run = envelope.get("parent"), metadata.get("run_id")
    line = target.line(name, one.namespace, tags_of(metadata))
    if is_new:
        line.save(
            Encoded(one.text),
            id=one.id,
            parent=parent if (parent, one.namespace) in known else None,
            note=note_of(metadata),
            run=None if run is None else str(run),
        )
    if one.writes:
        line.attach_all(one.id, one.writes)


def _digests(lines: AnyLines, thread: str) -> dict[tuple[str, str], bytes]:
    """Return a hash of each checkpoint of a thread with its writes, by id and namespace."""
    try:
        return {(one.id, one.namespace): _digest(one) for one in lines.history(thread=thread)}
    except NotFound:
        return {}


def _digest(one: LineCheckpoint) -> bytes:
    writes = [[write.task, write.idx, write.key, write.path, blake3(write.text).hexdigest()] for write in one.writes]
    return blake3(blake3(one.text).digest() + orjson.dumps(writes)).digest()


def _graph_threads(saver: CosmosSaver | PerdureSaver) -> list[str]:
    if isinstance(saver._lines, CosmosLines):
        return saver._lines.threads()
    names = [info.name for info in saver.store.threads(limit=None)]
    return [name for name in names if next(iter(saver._lines.history(thread=name)), None) is not None]
