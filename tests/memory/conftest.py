"""Gives the fixtures of `memory_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from memory_fixtures import memory, url

__all__ = ["memory", "url"]
