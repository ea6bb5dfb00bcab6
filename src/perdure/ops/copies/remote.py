"""Copies in an object store: a backup is written to a temporary file first, which is then sent there in parts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.errors import UsageError
from perdure.ops.copies.places import Part
from perdure.storage.objects import Objects, Place, check_url, is_object_url, open_place, show_url

_PREFIX = "perdure-copy-"


class RemotePart(Part):
    """A copy on its way to an object store. It appears there when it is whole; a kill leaves nothing there but parts of
    an upload, which buckets remove by a lifecycle rule."""

    def __init__(self, url: str) -> None:
        self._to, self._name = _place_and_name(url)
        self._shown = show_url(url)
        if self._to.size(self._name) is not None:
            raise UsageError(f"{self._shown} exists already: choose another name, such as one with the date in it")
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            super().__init__(Path(self._folder) / "copy", replaces=False)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def place(self) -> str:
        return self._shown

    def keep(self) -> int:
        size = super().keep()
        self._to.put_file(self._name, self.path)
        return size

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def at_hand(place: str | os.PathLike[str]) -> Iterator[Path | None]:
    """A copy in an object store as a file, for as long as the context; None: it is a file already."""
    text = os.fspath(place)
    if not is_object_url(text):
        yield None
        return
    source, name = _place_and_name(text)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        path = Path(folder) / name
        source.get_file(name, path)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place_and_name(url: str) -> tuple[Place, str]:
    path = check_url(url).path.rstrip("/")
    folder, _, name = url.rstrip("/").rpartition("/")
    if not path or not name or url.endswith("/"):
        raise UsageError(
            f"{show_url(url)!r} names no object: give it a name, such as {show_url(url).rstrip('/')}/a.backup"
        )
    return open_place(Objects(folder, timeout_s=120.0)), name
