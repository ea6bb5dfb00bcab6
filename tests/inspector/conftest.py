"""Gives the fixtures of `inspector_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from inspector_fixtures import browser, client, command, inspect, open_page, path, store

__all__ = ["browser", "client", "command", "inspect", "open_page", "path", "store"]
