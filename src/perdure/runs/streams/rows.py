"""The statements of the table of emitted values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from perdure.runs.journal import rows
from perdure.runs.tables import EMITTED_BODY
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, Transaction, read

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])
_PAGE = 500
_SWEPT_RUNS_MAX = 100
_SPARED_US = 10_000_000  # a sweep leaves younger rows to their owner
UPTO_MAX = (1 << 62) - 1
_ADD = Sql(
    """INSERT INTO emitted (tenant, run, fence, upto, path, name, attempt, first, at, body)
    VALUES (:tenant, :run, :fence, :upto, :path, :name, :attempt, :first, :at, :body)
    ON CONFLICT (tenant, run, fence, upto) DO NOTHING""",
    seals={"body": EMITTED_BODY},
)
_REMOVE = Sql(
    """DELETE FROM emitted WHERE tenant = :tenant AND run = :run AND fence = :fence AND upto <= :upto
    AND path = :path AND attempt = :attempt"""
)
_AFTER = Sql(
    f"""SELECT upto, path, name, attempt, first, at, body FROM emitted
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND upto > :upto ORDER BY upto LIMIT {_PAGE}""",
    opens={6: EMITTED_BODY.at("run", "fence", 0)},
    tolerant=True,
)
_OLD = Sql(
    f"""SELECT DISTINCT run, fence FROM emitted WHERE tenant = :tenant AND at < :before
    AND run = coalesce(:run, run) LIMIT {_SWEPT_RUNS_MAX}"""
)
_FORGET = Sql("DELETE FROM emitted WHERE tenant = :tenant AND run = :run AND fence = :fence")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One value that the body of a step emitted."""

    number: int  # among the values of the execution
    path: str
    name: str
    attempt: int
    index: int  # among the values of the attempt
    at: int
    text: bytes


class AttemptKey(NamedTuple):
    """The attempt of a step that emits values."""

    tenant: int
    run: int
    fence: int
    path: str
    attempt: int


def add(key: AttemptKey, name: str, upto: int, first: int, at: int, texts: Sequence[bytes]) -> Statement:
    """Return the statement that stores values of an attempt.

    `upto` is the number of the last value, `first` the index of the first one.
    """
    return _ADD(**key._asdict(), name=name, upto=upto, first=first, at=at, body=_encoder.encode(texts))


def remove(key: AttemptKey, upto: int = UPTO_MAX) -> Statement:
    """Return the statement that removes the values of an attempt up to a number."""
    return _REMOVE(**key._asdict(), upto=upto)


def write(statements: Sequence[Statement]) -> Transaction:
    """Return the transaction that runs statements of this module."""

    def program() -> Program[None]:
        yield Batch(*statements, last=True)

    return Transaction(program, write=True, volatile=True)


def chunks_after(tenant: int, run: int, fence: int, upto: int) -> Flow[list[Chunk]]:
    """Return the values of one execution after a number."""

    def program(last: int) -> Program[list[Any]]:
        [page] = yield Batch(_AFTER(tenant=tenant, run=run, fence=fence, upto=last), last=True)
        return page

    chunks: list[Chunk] = []
    last, is_more = upto, True
    while is_more:
        page = yield Transaction(partial(program, last), volatile=True)
        is_more = len(page) == _PAGE
        for last, path, name, attempt, first, at, body in page:
            try:
                texts = _decoder.decode(body)
            except (msgspec.DecodeError, TypeError):  # damaged, or UNREADABLE: its values count as lost
                continue
            for place, text in enumerate(texts):
                number = last - len(texts) + 1 + place
                if number > upto:
                    chunks.append(Chunk(number, path, name, attempt, first + place, at, text))
    return chunks


def sweep(tenant: int, now: int) -> Flow[None]:
    """Remove the values of executions that ended before their owner could remove them."""
    ended = []
    for run, fence in (yield _old(tenant, None, now - _SPARED_US)):
        row = yield from read(partial(rows.numbered, tenant, run))
        if row is None or row.fence != fence or row.status != "running":
            ended.append(_FORGET(tenant=tenant, run=run, fence=fence))
    if ended:
        yield write(ended)


def forget_run(tenant: int, run: int) -> Flow[None]:
    """Remove all values of a run. Read first, because on SQLite a write would create the file of emitted values."""
    while executions := (yield _old(tenant, run, UPTO_MAX)):
        yield write([_FORGET(tenant=tenant, run=run, fence=fence) for _, fence in executions])


def _old(tenant: int, run: int | None, before: int) -> Transaction:
    def program() -> Program[list[Any]]:
        [executions] = yield Batch(_OLD(tenant=tenant, run=run, before=before), last=True)
        return executions

    return Transaction(program, volatile=True)
