"""The file that a run travels in: what is in it, its hash, and every check before anything of it is believed.

    perdure-run 1 ready      one line; "pending" until the source has been fenced
    32 bytes                  BLAKE3 of the rest
    one Zstandard frame       of one MessagePack value: a `Package`

Nothing in it is ever executed: values stay the texts that they are in a store and are decoded by the codec, which
knows only registered classes. The hash finds damage; it is no signature: import files only from whom you would take a
database.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from perdure.errors import PerdureError, UsageError
from perdure.log.ids import ID_MAX, ROOM
from perdure.runs.journal.blobs import blob_hash
from perdure.runs.journal.entries import KIND_NAMES, unpack
from perdure.runs.journal.rows import FINISHED, STATUSES
from perdure.storage.files import open_regular, sync_file, sync_folder
from perdure.threads.checks import check_metadata, check_name, check_note, check_text
from perdure.values.compress import Parameter, decompress_bounded, zstd
from perdure.values.limits import INFLATED_MAX

BYTES_MAX = INFLATED_MAX  # of what is in a file, uncompressed
RUNS_MAX = 100_000
NUMBER_MAX = 1 << 60
FAR_MAX = 1 << 62  # a wait without an end lies between the two
_READY, _PENDING = b"perdure-run 1 ready  \n", b"perdure-run 1 pending\n"
_HEAD = len(_READY)
_HASH_BYTES = 32
_TEXT_MAX = 1 << 20
_OPTIONS: dict[int, int] = {
    Parameter.compression_level: 6,
    Parameter.checksum_flag: 1,
    Parameter.content_size_flag: 1,
    Parameter.enable_long_distance_matching: 1,  # one state after the other, nearly the same
    Parameter.window_log: 27,
}


class AskPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    path: str
    sort: str
    question: str
    terms: str
    asked_at: int
    deadline: int | None
    status: str
    answer: bytes | None


class AnswerPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    path: str
    who: str
    value: bytes
    at: int


class SignalPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    topic: str
    seq: int
    key: str
    value: bytes
    at: int
    received: int


class StatePart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A checkpoint of the thread that keeps the run's states."""

    id: int
    parent: int | None
    kind: str
    at: int
    note: str | None
    metadata: str | None
    text: bytes


class RunPart(msgspec.Struct, forbid_unknown_fields=True):
    """A run: its row, as far as it is not of one store only, and all that belongs to it."""

    id: str
    function: str
    version: str
    input: bytes
    incarnation: bytes
    parent: int | None  # its place among the runs of this file
    parent_path: str | None
    shared_until: int  # rows of the journal up to here were another run's doing
    status: str
    queue: str
    priority: int
    fence: int
    wake_at: int
    request: str | None
    waiting: str | None
    seq: int
    since: int
    created_at: int
    changed_at: int
    keep_until: int | None
    values: dict[str, bytes]
    journal: list[tuple[int, int, bytes]]
    asks: list[AskPart]
    answers: list[AnswerPart]
    signals: list[SignalPart]
    states: list[StatePart] = []

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED


class Package(msgspec.Struct, forbid_unknown_fields=True):
    """A run and those that it has started, parents first."""

    token: bytes  # of this export
    store: str  # where it comes from
    exported_at: int
    runs: list[RunPart]
    blobs: list[bytes]

    @property
    def is_finished(self) -> bool:
        return all(run.is_finished for run in self.runs)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Package).decode


def fingerprint(runs: list[RunPart]) -> bytes:
    """What runs add up to: the same twice means that nothing has changed in between. Their states follow from it."""
    plain = [msgspec.structs.replace(run, states=[]) for run in runs]
    return blake3(_encode(plain)).digest()


# --- writing


def write_pending(package: Package, path: Path) -> int:
    """Write and sync a file that cannot be imported yet. Gives its size. Raises UsageError if it is too large."""
    data = _encode(package)
    if len(data) > BYTES_MAX:
        raise UsageError(
            f"the run takes {len(data):,} bytes, and a file holds at most {BYTES_MAX:,}; nothing was changed"
        )
    body = zstd.compress(data, options=_OPTIONS)
    content = _PENDING + blake3(body).digest() + body
    try:
        path.unlink(missing_ok=True)  # of an export that was killed; never written to: it may be a link
        with open(path, "xb", opener=_private) as file:
            file.write(content)
            sync_file(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; nothing was changed") from error
    return len(content)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # it holds what the run knows


def publish(pending: Path, path: Path) -> None:
    """Make a pending file one that can be imported, under its own name. Safe to repeat after a crash at any point."""
    with open(pending, "r+b") as file:
        file.write(_READY)
        sync_file(file)
    os.replace(pending, path)
    sync_folder(path)


# --- reading


def read_package(path: Path, *, pending: bool = False) -> Package:
    """What a file holds, checked. Raises UsageError for what is no such file, is damaged, or says what cannot be."""
    try:
        with open_regular(path) as file:
            if path.stat().st_size > BYTES_MAX:
                raise _refused(path, f"it has more than {BYTES_MAX:,} bytes")
            content = file.read()
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    head, digest, body = content[:_HEAD], content[_HEAD : _HEAD + _HASH_BYTES], content[_HEAD + _HASH_BYTES :]
    if head == _PENDING and not pending:
        raise _refused(path, "its export was not finished: call export_run again with the same arguments")
    if head not in (_READY, _PENDING):
        raise _refused(path, "it is no exported run, or one of another version")
    if blake3(body).digest() != digest:
        raise _refused(path, "it is damaged: its hash is not that of its content")
    try:
        package = _decode(decompress_bounded(body, BYTES_MAX))
        _check(package)
    except (PerdureError, msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, f"what it says cannot be: {error}") from error
    return package


def _refused(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} cannot be imported: {reason}. Nothing was written")


def _check(package: Package) -> None:
    """Everything that a store relies on. The types were checked when it was decoded."""
    if not 1 <= len(package.runs) <= RUNS_MAX:
        raise UsageError(f"{len(package.runs)} runs")
    _numbers(package.exported_at)
    blobs = {blob_hash(blob) for blob in package.blobs}
    names: set[str] = set()
    for place, run in enumerate(package.runs):
        _check_run(run, place, blobs)
        names.add(run.id)
    if len(names) != len(package.runs):
        raise UsageError("two runs with one id")


def _check_run(run: RunPart, place: int, blobs: set[bytes]) -> None:
    check_name(run.id, "run")
    check_name(run.queue, "queue")
    for text in (run.function, run.version, run.parent_path, run.request, run.waiting):
        _text(text)
    if run.status not in STATUSES or run.status in ("running", "exported"):
        raise UsageError(f"run {run.id!r} has the status {run.status!r}")
    if (run.parent is None) != (place == 0) or (run.parent is not None and not 0 <= run.parent < place):
        raise UsageError(f"run {run.id!r} has no parent before it")
    if len(run.incarnation) != 16 or len(run.input) > 64:
        raise UsageError(f"run {run.id!r} has a key or a digest of the wrong length")
    _numbers(run.shared_until, run.fence, run.seq, run.since, run.created_at, run.changed_at, abs(run.priority))
    _numbers(run.wake_at, run.keep_until or 0, most=FAR_MAX)
    if run.fence < 1:
        raise UsageError(f"run {run.id!r} was never fenced")
    _waiting(run)
    for sort in run.values:
        check_name(sort, "value")
    if "args" not in run.values:
        raise UsageError(f"run {run.id!r} has no arguments")
    _check_journal(run, blobs)
    _check_rest(run)


def _waiting(run: RunPart) -> None:
    if run.waiting is not None:
        try:
            msgspec.json.decode(run.waiting, type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"what run {run.id!r} waits for is not JSON: {error}") from error


def _check_journal(run: RunPart, blobs: set[bytes]) -> None:
    last = run.since
    for seq, kind, body in run.journal:
        if not last < seq <= run.seq:
            raise UsageError(f"the journal of run {run.id!r} is not in order at {seq}")
        last = seq
        if kind not in KIND_NAMES:
            raise UsageError(f"the journal of run {run.id!r} has an entry of a kind that this Perdure does not know")
        entry = unpack(body)
        _text(entry.path)
        _text(entry.name)
        blob = (entry.more or {}).get("blob")
        if blob is not None and blob not in blobs:
            raise UsageError(f"a large result of run {run.id!r} is missing")


def _check_rest(run: RunPart) -> None:
    asked = set()
    for ask in run.asks:
        for text in (ask.path, ask.sort, ask.question, ask.terms):
            _text(text)
        if ask.status not in ("open", "answered", "closed"):
            raise UsageError(f"a question of run {run.id!r} is {ask.status!r}")
        _numbers(ask.asked_at, ask.deadline or 0)
        asked.add(ask.path)
    for answer in run.answers:
        _text(answer.who)
        _numbers(answer.at)
        if answer.path not in asked:
            raise UsageError(f"run {run.id!r} has an answer to a question that was not asked")
    for signal in run.signals:
        _text(signal.topic)
        _text(signal.key)
        _numbers(signal.seq, signal.at)
        if signal.received not in (0, 1):
            raise UsageError(f"run {run.id!r} has a message that is neither received nor not")
    _check_states(run)


def _check_states(run: RunPart) -> None:
    known: set[int] = set()
    for state in run.states:
        if not 0 < state.id < ID_MAX - ROOM or state.id in known:
            raise UsageError(f"a state of run {run.id!r} has an id that cannot be")
        if state.parent is not None and state.parent not in known:
            raise UsageError(f"a state of run {run.id!r} comes before the one that it goes on from")
        known.add(state.id)
        _numbers(state.at)
        check_name(state.kind, "kind")
        check_note(state.note)
        if state.metadata is not None:
            check_metadata(msgspec.json.decode(state.metadata, type=dict[str, Any]))


def _text(text: str | None) -> None:
    if text is not None:
        if len(text) > _TEXT_MAX:
            raise UsageError(f"a text of {len(text):,} characters")
        check_text(text, "a text")


def _numbers(*numbers: int, most: int = NUMBER_MAX) -> None:
    for number in numbers:
        if not 0 <= number <= most:
            raise UsageError(f"the number {number}")
