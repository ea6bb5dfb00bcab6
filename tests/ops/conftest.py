"""Gives the fixtures of `ops_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from ops_fixtures import clock, elsewhere, roles, store, url

__all__ = ["clock", "elsewhere", "roles", "store", "url"]
