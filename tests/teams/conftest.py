"""Gives the fixtures of `team_kit.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from team_kit import place, store

__all__ = ["place", "store"]
