"""Gives the fixtures of `runs_fixtures.py` to all tests of this folder. Nothing else: mypy does not read it."""

from __future__ import annotations

from runs_fixtures import ctrl_c, elsewhere, lab, opened_again, other, store, sync_lab, target, url

__all__ = ["ctrl_c", "elsewhere", "lab", "opened_again", "other", "store", "sync_lab", "target", "url"]
