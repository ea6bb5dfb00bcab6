"""Objects as files of a folder, for a store whose large values are on a disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

from perdure.errors import NotFound, Unavailable, UsageError
from perdure.storage.files import replacing, sync_folder
from perdure.storage.objects import is_object_url, open_objects


class Objects(Protocol):
    """Where objects are. A name never gets another content, so that no reader can see half of one."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None: ...


class ObjectFolder:
    """A folder of objects, that only its owner may read. The folder must exist: it may be a mount."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise UsageError(f"objects={str(path)!r}: there is no such folder; create it first")

    def __str__(self) -> str:
        return str(self.path)

    def put(self, name: str, data: bytes) -> None:
        """Write an object. It is on the disk when this returns."""
        target = self.path / name
        try:
            for folder in reversed([one for one in target.parents if self.path in one.parents]):
                if not folder.is_dir():
                    folder.mkdir(0o700, exist_ok=True)
                    sync_folder(folder)
            number, draft = tempfile.mkstemp(prefix=".part-", dir=target.parent)
            with replacing(target, Path(draft), os.fdopen(number, "wb")) as file:
                file.write(data)
        except OSError as error:
            raise Unavailable(f"{target} cannot be written ({error}): nothing was saved; check the folder") from error

    def get(self, name: str) -> bytes:
        """Read an object. Raises NotFound."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no file {name} in {self.path}: restore it from a backup of the folder") from None
        except OSError as error:
            raise Unavailable(f"{self.path / name} cannot be read ({error})") from error

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        (self.path / name).unlink(missing_ok=True)


def objects_at(place: str | os.PathLike[str]) -> Objects:
    """Open the objects at a URL or in a folder. Raises UsageError."""
    text = os.fspath(place)
    if is_object_url(text):
        return open_objects(text)
    if "://" in text:
        raise UsageError(f"objects={text.partition('://')[0]}://…: a folder, or s3://, gs:// or az://")
    return ObjectFolder(Path(text).absolute())
