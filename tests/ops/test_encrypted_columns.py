"""Every statement of Perdure that touches a secret column says so: what it does not say is stored in the clear."""

from __future__ import annotations

import re

import pytest
from sealed_kit import encrypted_columns
from statements import named_statements

from perdure.runs.tables import ARGS
from perdure.storage.program import Sql

COLUMNS = [*encrypted_columns(), ARGS]
TABLES = {column.label.partition(".")[0] for column in COLUMNS}

# What sees cells as they are stored, on purpose: beginnings of the statements, without runs of blanks.
_RAW = (
    "INSERT INTO write (tenant, thread, space, id, task, idx, key, path, base, value) SELECT tenant, CAST(:target",
    "SELECT key, value FROM tag WHERE tenant = :tenant AND thread = :thread",  # only which keys there are
    "SELECT key, value, thread FROM tag WHERE tenant = :tenant LIMIT",  # to be set aside as they are
    "UPDATE run SET fence = coalesce(CAST(:fence AS bigint), fence) + :jump, owner = NULL",  # waiting stays, or goes
)


def statements() -> list[Sql]:
    return [sql for _, sql in named_statements()]


def said(sql: Sql) -> set[str]:
    return {cell.label for _, cell in sql.seals} | {cell.label for _, cell in sql.opens}


def touched(text: str, table: str, column: str) -> bool:
    """Whether a statement reads or writes a column of a table as it stands."""
    if table not in text or column not in text:
        return False
    text = re.sub(r"'[^']*'", "''", " ".join(text.split()))
    text = re.sub(r"_past\b", "", text)  # the same columns
    text = re.sub(r"(length|substr)\([^()]*\)", "0", text)
    text = re.sub(rf"(\w+\.)?{column} (IS (NOT )?NULL|= NULL)", "1 = 1", text)
    aliases = re.findall(rf"\b(?:FROM|JOIN|UPDATE|INTO) {table}\b(?: AS)? ?(\w*)", text)
    if not aliases:
        return False
    names = {alias for alias in aliases if alias and alias.islower()} | {table}
    if any(re.search(rf"\b{name}\.{column}\b", text) for name in names):
        return True
    others = set(re.findall(r"\b(?:FROM|JOIN|UPDATE|INTO) (\w+)", text)) - {table}
    others = {other for other in others if other in TABLES}
    return not others and re.search(rf"(?<![:\w.]){column}\b", text) is not None


def test_every_statement_says_what_is_secret() -> None:
    missing: list[str] = []
    found = statements()
    assert len(found) > 250
    for sql in found:
        text = " ".join(sql.postgres.split())
        if text.startswith(_RAW) or "_past p" in text:  # rows of the past come back as they are
            continue
        missing += [
            f"{column.label}: {text[:150]}"
            for column in COLUMNS
            if column.label not in said(sql) and touched(text, *column.label.split("."))
        ]
    # A question is opened without an answer.
    missing = [one for one in missing if not one.startswith("ask.answer: INSERT INTO ask (") or ":answer" in one]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("kind", ["seals", "opens"])
def test_cells_are_identified_by_what_their_table_says(kind: str) -> None:
    known = {(column.label, len(column.by), column.kind) for column in COLUMNS}
    labels = {label for label, *_ in known}
    for sql in statements():
        for _, cell in getattr(sql, kind):
            assert cell.label not in labels or (cell.label, len(cell.by), cell.kind) in known, (cell, sql.postgres)


def test_a_statement_that_says_nothing_would_be_found() -> None:
    assert touched("SELECT note FROM record WHERE id = :id", "record", "note")
    assert touched("SELECT r.note FROM record r JOIN body b ON b.id = r.body", "record", "note")
    assert touched("UPDATE body SET diff = :diff WHERE id = :id", "body", "diff")
    assert touched("INSERT INTO journal (tenant, body) VALUES (:tenant, :body)", "journal", "body")
    assert not touched("SELECT b.salt FROM record r JOIN body b ON b.id = r.body", "record", "salt")
    assert not touched("SELECT sum(length(value)) FROM write", "write", "value")
