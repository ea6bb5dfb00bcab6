"""A small client for object stores (S3, GCS, Azure), on obstore: files under names.

`open_objects(url)` gives an `ObjectStore`. Errors are translated here and nowhere else:

    no such object        NotFound
    anything else         Unavailable, with a hint

Must never happen here: a credential in a message. obstore's messages may quote a signed URL, so their text is cut and
its exceptions are not chained as causes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from perdure.errors import ExtraMissing, NotFound, Unavailable, UsageError

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
_HINT = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
_URLS = re.compile(r"\w+://\S+")
_MESSAGE_MAX = 160
_CHUNK_BYTES = 4 << 20
_TIMEOUT_S = 120


class ObjectStore:
    """Files under names below one URL. Blocking; call it in a thread from an event loop."""

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self._api: Any = obstore
        self._store = store
        self.url = url

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url}>"

    def put_file(self, name: str, path: Path, *, create: bool = False) -> None:
        """Store a file, in parts. The object appears when it is complete. `create`: in one part, and only if there is
        none of that name. Raises UsageError, and NotFound if there is no bucket."""
        bucket = urlsplit(self.url).netloc
        with self._translated(name, f"there is no bucket {bucket!r} ({self.url}): create it first"):
            if create:
                self._api.put(self._store, name, path, mode="create", use_multipart=False)
            else:
                self._api.put(self._store, name, path)

    def get_file(self, name: str, path: Path) -> None:
        """Copy an object to a file, in parts. Raises NotFound."""
        with open(path, "wb") as file:
            with self._translated(name):
                parts = iter(self._api.get(self._store, name).stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with self._translated(name):
                    part = next(parts, None)
                if part is None:
                    return
                file.write(part)  # an error of the local disk stays what it is

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            with self._translated(name):
                self._api.head(self._store, name)
        except NotFound:
            return False
        return True

    @contextmanager
    def _translated(self, name: str, missing: str = "") -> Iterator[None]:
        """Raise what happens inside as an error of ours."""
        try:
            yield
        except FileNotFoundError:
            raise NotFound(missing or f"there is no object {name!r} at {self.url}") from None
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                raise UsageError(f"there is an object {name!r} at {self.url} already: choose another name") from None
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> Unavailable:
        kind = type(error).__name__
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return Unavailable(
                f"the object store at {self.url} refused the request ({kind.removesuffix('Error')}): check the "
                "credentials in the environment and their permissions there (get, put)"
            )
        return Unavailable(
            f"the object store at {self.url} is not available ({_message(error)}): check its address and the network, "
            "then try again"
        )


def open_objects(url: str) -> ObjectStore:
    """Open an object store. Credentials come from the environment. Raises UsageError."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ExtraMissing("an object store", "s3") from error
    shown = redacted_url(url)
    check_url(url)
    try:
        return ObjectStore(from_url(url, **_client_options()), shown)
    except Exception as error:
        raise UsageError(f"{shown!r} cannot be opened: {_message(error)}") from None


def is_object_url(text: str) -> bool:
    """Whether a place is in an object store."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _SCHEMES


def split_object_url(url: str) -> tuple[str, str]:
    """The URL of an object as that of its folder and the object's name. Raises UsageError."""
    path = check_url(url).path
    folder, _, name = url.rpartition("/")
    if not path.strip("/") or not name:
        shown = redacted_url(url)
        raise UsageError(f"{shown!r} names no object: give it a name, such as {shown.rstrip('/')}/a.backup")
    return folder, name


def check_url(text: str) -> SplitResult:
    """The parts of an object store's URL. Raises UsageError, which never shows what may be a secret."""
    url, shown = urlsplit(text), redacted_url(text)
    if url.scheme not in _SCHEMES or not url.netloc:
        raise UsageError(f"{shown!r} is no object store: {_HINT}")
    if "@" in url.netloc and not url.scheme.startswith("abfs"):
        raise UsageError(
            f"the URL of {shown!r} has a user or a password in it: give credentials in the environment "
            "(AWS_ACCESS_KEY_ID …, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME …)"
        )
    if url.query or url.fragment:
        raise UsageError(f"{shown!r} has a query, which may hold a secret: give options in the environment")
    return url


def redacted_url(text: str) -> str:
    """A URL without what may be a secret."""
    scheme, separator, rest = text.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _client_options() -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": timedelta(seconds=_TIMEOUT_S), "connect_timeout": timedelta(seconds=5)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    if endpoint.startswith("http://"):  # named explicitly
        options["allow_http"] = True
    # obstore's default is to retry for three minutes
    return {
        "client_options": options,
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=_TIMEOUT_S)},
    }


def _message(error: Exception) -> str:
    return _URLS.sub("…", str(error).partition("\n")[0])[:_MESSAGE_MAX]
