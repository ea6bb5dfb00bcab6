"""Gives the fixtures of `snapshot_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from snapshot_fixtures import store

__all__ = ["store"]
