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
from perdure.storage.objects import ObjectStore, is_object_url, open_objects, redacted_url, split_object_url

_PREFIX = "perdure-copy-"


class RemotePart(Part):
    """A copy on its way to an object store. It appears there when it is whole; a kill leaves nothing there but parts of
    an upload, which buckets remove by a lifecycle rule."""

    def __init__(self, url: str) -> None:
        self._to, self._name = _store_and_name(url)
        self._shown = redacted_url(url)
        if self._to.exists(self._name):
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
    source, name = _store_and_name(text)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        path = Path(folder) / name
        source.get_file(name, path)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store_and_name(url: str) -> tuple[ObjectStore, str]:
    folder, name = split_object_url(url)
    return open_objects(folder), name
