"""A handle whose saves become a branch, because another writer has moved the head, says so once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import perdure


def test_a_save_that_becomes_a_branch_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    with perdure.open(str(tmp_path / "a.db")) as store:
        first, second = store.thread("draft"), store.thread("draft")
        first.save({"n": 0})
        second.load()
        first.save({"n": 1})
        assert not caplog.records
        for n in range(3):
            assert not second.save({"n": n}).is_head
        [record] = caplog.records
        assert "'draft'" in record.message
        assert "expect=" in record.message
        assert "docs/how-to/threads.md" in record.message
        second.load()
        first.save({"n": 2})
        second.save({"n": 3})
        assert len(caplog.records) == 2  # it was back on the head in between


def test_a_branch_that_was_asked_for_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread = store.thread("draft")
        old = thread.save({"n": 0})
        thread.save({"n": 1})
        assert not thread.save({"n": 2}, parent=old).is_head
        thread.save({"n": 3})
    assert not caplog.records
