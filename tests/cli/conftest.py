"""Gives the fixtures of `cli_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from cli_fixtures import app, doubt, run, store, where

__all__ = ["app", "doubt", "run", "store", "where"]
