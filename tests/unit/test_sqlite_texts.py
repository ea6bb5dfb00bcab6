"""Statements as SQLite takes them: numbered parameters, and nothing in quotes is touched."""

from __future__ import annotations

import apsw
import pytest

from perdure.storage.program import Sql
from perdure.storage.sqlite.statements import prepare


def test_parameters_are_numbered_by_their_first_use() -> None:
    [made] = prepare(Sql("SELECT :b,  :a,\n        :b -- twice: so :c is none\n"))
    assert made.sql == "SELECT ?1, ?2, ?1"
    assert made.take({"a": 1, "b": 2, "c": 3}) == (2, 1)


def test_what_is_in_quotes_stays_as_it_is() -> None:
    text = """SELECT 'a  :b', 'it''s :b', "of  :b", :b FROM (SELECT 1 AS "of  :b")"""
    [made] = prepare(Sql(text))
    assert made.sql == """SELECT 'a  :b', 'it''s :b', "of  :b", ?1 FROM (SELECT 1 AS "of  :b")"""
    connection = apsw.Connection(":memory:")
    assert connection.execute(made.sql, made.take({"b": 5})).fetchall() == [("a  :b", "it's :b", 1, 5)]


def test_each_of_several_texts_takes_its_own() -> None:
    sql = Sql(sqlite=("INSERT INTO t (a, b) VALUES (:a, :b)", "SELECT a, b FROM t WHERE b = :b"))
    made = prepare(sql)
    assert sql.prepared is made
    params = {"a": 1, "b": 2}
    assert [text.take(params) for text in made] == [(1, 2), (2,)]


def test_a_parameter_that_is_not_given_is_an_error() -> None:
    [two] = prepare(Sql("SELECT :a, :b"))
    with pytest.raises(KeyError, match="b"):
        two.take({"a": 1})
    [none] = prepare(Sql("SELECT 1"))
    assert none.take({"a": 1}) == ()
    [one] = prepare(Sql("SELECT :a"))
    assert one.take({"a": 1, "b": 2}) == (1,)
