"""An object store, as far as it is needed here: bytes under names. S3, GCS, Azure, a folder; through obstore.

Several names at a time, blocking or async: a request to a far store takes as long as a hundred commits, so they go out
side by side. What goes wrong is translated here and nowhere else:

    not there             ObjectMissing; may be an answer, not an error: who asks decides
    other bytes           Damaged: the size or the hash is not what the row says
    anything else         Unavailable, with what to do

Must never happen here: a credential in a message. What obstore says may quote a URL with a signature in it, so its
text is cut and its exceptions are not passed on as causes.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from perdure.errors import Damaged, ObjectMissing, Unavailable, UsageError
from perdure.storage.far_cells import Wanted, digest_of
from perdure.storage.files import sync_path

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
R = TypeVar("R")
DAY_S = 86_400.0
_SIDE_BY_SIDE = 16
_SCHEMES = {"s3": "S3", "s3a": "S3", "gs": "Google", "az": "Azure", "abfs": "Azure", "abfss": "Azure", "file": "folder"}
_HINT = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder"
_URLS = re.compile(r"\w+://\S+")
_SAID_MAX = 160
_DELETED_AT_ONCE = 500


@dataclass(frozen=True)
class Objects:
    """Where cold data is moved to (`open(objects=…)`), and when.

    `place` is a URL, or a store of `obstore.store` with credentials of your own. What nobody has written to for
    `cold_s` seconds and has at least `min_bytes` is moved by `store.compact()`. What nothing needs any more stays
    there for `keep_s` seconds: as long as you may restore a backup that still needs it.
    """

    place: str | ObjectStore
    cold_s: float = 7 * DAY_S
    min_bytes: int = 8192
    keep_s: float = 7 * DAY_S
    timeout_s: float = 30.0


class Place:
    """An object store at a place."""

    def __init__(self, store: ObjectStore, shown: str) -> None:
        self._store = store
        self._folder = _folder_of(store)
        self.shown = shown

    def __repr__(self) -> str:
        return f"<objects at {self.shown}>"

    # --- blocking

    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, bytes | ObjectMissing | Damaged]:
        """What is stored under some names, checked; what is missing or damaged comes as the error."""
        return dict(zip([w.name for w in wanted], self._each(self._get, wanted), strict=True))

    def put(self, named: Mapping[str, bytes]) -> None:
        """Store bytes under names; they are there for good when this returns."""
        self._each(self._put, list(named.items()))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. One that is not there is no error."""
        for some in _pages(names):
            try:
                self._obs().delete(self._store, some)
            except FileNotFoundError:
                self._each(self._remove, some)
            except Exception as error:
                raise self._failed(error) from None

    def missing(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Which of these are not there, or not as large as they must be. Reads none of them."""
        return [one for one, there in zip(wanted, self._each(self._head, wanted), strict=True) if not there]

    def put_file(self, name: str, path: Path) -> None:
        """Store a file, in parts. It appears when it is whole."""
        try:
            self._obs().put(self._store, name, path)
            self._sync(name)
        except Exception as error:
            raise self._failed(error) from None

    def get_file(self, name: str, path: Path) -> None:
        """Bring an object to a file, part by part."""
        try:
            with open(path, "wb") as file:
                for part in self._obs().get(self._store, name).stream(min_chunk_size=4 << 20):
                    file.write(part)
        except FileNotFoundError:
            raise self.lost(name) from None
        except OSError:
            raise  # the disk here
        except Exception as error:
            raise self._failed(error) from None

    def size(self, name: str) -> int | None:
        """How large an object is; None: there is none."""
        try:
            return int(self._obs().head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(error) from None

    # --- async

    async def afetch(self, wanted: Sequence[Wanted]) -> dict[str, bytes | ObjectMissing | Damaged]:
        """`fetch`, awaited."""
        return dict(zip([w.name for w in wanted], await self._aeach(self._aget, wanted), strict=True))

    async def aput(self, named: Mapping[str, bytes]) -> None:
        """`put`, awaited."""
        if self._folder is not None:  # it waits for the disk
            await asyncio.to_thread(self.put, named)
        else:
            await self._aeach(self._aput, list(named.items()))

    async def aremove(self, names: Sequence[str]) -> None:
        """`remove`, awaited."""
        await asyncio.to_thread(self.remove, names)

    async def amissing(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """`missing`, awaited."""
        found = await self._aeach(self._ahead, wanted)
        return [one for one, there in zip(wanted, found, strict=True) if not there]

    # --- one of them

    def _get(self, wanted: Wanted) -> bytes | ObjectMissing | Damaged:
        try:
            found = self._obs().get(self._store, wanted.name)
            data = bytes(found.bytes()) if found.meta["size"] == wanted.size else b""
        except FileNotFoundError:
            return self.lost(wanted.name)
        except Exception as error:
            raise self._failed(error) from None
        return self._checked(wanted, data)

    async def _aget(self, wanted: Wanted) -> bytes | ObjectMissing | Damaged:
        try:
            found = await self._obs().get_async(self._store, wanted.name)
            data = bytes(await found.bytes_async()) if found.meta["size"] == wanted.size else b""
        except FileNotFoundError:
            return self.lost(wanted.name)
        except Exception as error:
            raise self._failed(error) from None
        return self._checked(wanted, data)

    def _put(self, item: tuple[str, bytes]) -> None:
        try:
            self._obs().put(self._store, item[0], item[1])
            self._sync(item[0])
        except Exception as error:
            raise self._failed(error) from None

    async def _aput(self, item: tuple[str, bytes]) -> None:
        try:
            await self._obs().put_async(self._store, item[0], item[1])
        except Exception as error:
            raise self._failed(error) from None

    def _remove(self, name: str) -> None:
        try:
            self._obs().delete(self._store, name)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._failed(error) from None

    def _head(self, wanted: Wanted) -> bool:
        return self.size(wanted.name) == wanted.size

    async def _ahead(self, wanted: Wanted) -> bool:
        try:
            return bool((await self._obs().head_async(self._store, wanted.name))["size"] == wanted.size)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._failed(error) from None

    # --- and the rest

    def _obs(self) -> Any:
        import obstore

        return obstore

    def _each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) <= 1 or self._folder is not None:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(items)), "perdure-objects") as threads:
            return list(threads.map(work, items))

    async def _aeach(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        room = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def one(item: T) -> Any:
            async with room:
                return await work(item)

        return await asyncio.gather(*map(one, items))

    def _sync(self, name: str) -> None:
        """A folder's file is on the disk only when it and its folders are synced: obstore does not."""
        if self._folder is None:
            return
        path = self._folder / name
        for each in (path, *path.parents):
            sync_path(each)
            if each == self._folder:
                break

    def _checked(self, wanted: Wanted, data: bytes) -> bytes | Damaged:
        if len(data) == wanted.size and digest_of(data) == wanted.digest:
            return data
        return Damaged(
            f"object {wanted.name} at {self.shown} is not what was put there: it was changed or cut short. Bring back "
            "an older version of it, or restore the objects from a copy"
        )

    def lost(self, name: str) -> ObjectMissing:
        return ObjectMissing(
            f"object {name} is not at {self.shown}, where the store has put it. Is it the right place (objects=)? If "
            "it is, bring the object back from a copy or an older version of it",
            name=name,
            place=self.shown,
        )

    def _failed(self, error: Exception) -> Unavailable:
        kind = type(error).__name__
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return Unavailable(
                f"the object store at {self.shown} refused us ({kind.removesuffix('Error')}): check its credentials, "
                "which come from the environment, and what they may do there (get, put, list, delete)"
            )
        said = _URLS.sub("…", str(error).partition("\n")[0])[:_SAID_MAX]
        return Unavailable(
            f"the object store at {self.shown} cannot be used now ({said}): check its address and the network, then "
            "try again; nothing was lost"
        )


def open_place(objects: Objects) -> Place:
    """The object store that is meant. Raises UsageError."""
    try:
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise UsageError("object stores need the extra `s3`: pip install 'perdure[s3]'") from error
    if not isinstance(objects.place, str):
        return Place(objects.place, _shown_store(objects.place))
    if objects.place.rstrip("/") == "memory:":
        return Place(MemoryStore(), "memory://")
    url, shown = check_url(objects.place), show_url(objects.place)
    options: dict[str, Any] = {"mkdir": True} if url.scheme == "file" else _patience(objects.timeout_s)
    try:
        return Place(from_url(objects.place, **options), shown)
    except Exception as error:
        said = _URLS.sub("…", str(error).partition("\n")[0])[:_SAID_MAX]
        raise UsageError(f"objects={shown!r} cannot be used: {said}") from None


def _patience(timeout_s: float) -> dict[str, Any]:
    """obstore would try for three minutes."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=5)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    if endpoint.startswith("http://"):  # who names such an address means it
        options["allow_http"] = True
    return {
        "client_options": options,
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=timeout_s)},
    }


def is_object_url(text: str) -> bool:
    """Whether a place of a copy is in an object store; a path or a file:// URL is a file."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _SCHEMES and scheme != "file"


def check_url(text: str) -> Any:
    """A URL of an object store, taken apart. Raises UsageError, which never shows what may be a secret."""
    url = urlsplit(text)
    if url.scheme not in _SCHEMES or (url.scheme != "file" and not url.netloc):
        raise UsageError(f"{show_url(text)!r} is no object store: {_HINT}")
    if "@" in url.netloc and not url.scheme.startswith("abfs"):
        raise UsageError(
            f"the URL of {show_url(text)!r} has a user or a password in it: give credentials in the environment "
            "(AWS_ACCESS_KEY_ID …, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME …)"
        )
    if url.query or url.fragment:
        raise UsageError(f"{show_url(text)!r} has a query, which may hold a secret: give options in the environment")
    if url.scheme == "file" and (url.netloc or not unquote(url.path).startswith("/")):
        raise UsageError(f"{show_url(text)!r} names no folder: file:///absolute/folder")
    return url


def show_url(text: str) -> str:
    """A URL without what may be a secret."""
    scheme, separator, rest = text.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _folder_of(store: Any) -> Path | None:
    return Path(store.prefix) if type(store).__name__ == "LocalStore" and store.prefix is not None else None


def _shown_store(store: Any) -> str:
    folder = _folder_of(store)
    if folder is not None:
        return f"file://{folder}"
    name, config = type(store).__name__, getattr(store, "config", None) or {}
    host = config.get("bucket") or config.get("container_name") or ""
    return f"{name}({'/'.join(filter(None, (str(host), str(getattr(store, 'prefix', None) or ''))))})"


def _pages(names: Sequence[str]) -> list[list[str]]:
    return [list(names[at : at + _DELETED_AT_ONCE]) for at in range(0, len(names), _DELETED_AT_ONCE)]
