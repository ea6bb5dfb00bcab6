"""The LangGraph benchmarks by name. LangGraph is imported by those who run them: it takes a second and much memory."""

from __future__ import annotations

from bench.measure import Row, Run


def langgraph(run: Run) -> list[Row]:
    from bench import langgraph_sqlite

    return langgraph_sqlite.langgraph(run)


def langgraph_short(run: Run) -> list[Row]:
    from bench import langgraph_sqlite

    return langgraph_sqlite.langgraph_short(run)


def langgraph_delta(run: Run) -> list[Row]:
    from bench import langgraph_sqlite

    return langgraph_sqlite.langgraph_delta(run)


def langgraph_postgres(run: Run) -> list[Row]:
    from bench import langgraph_postgres

    return langgraph_postgres.langgraph_postgres(run)
