"""A small client for object stores (S3, GCS, Azure), built on obstore. It copies files to and from named objects.

Must never happen here: a credential in a message. obstore's messages may quote a signed URL. So URLs are cut from their
text, and obstore's exceptions are not chained as causes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_ENDPOINTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURITE_BLOB_STORAGE_URL",
)
_REFUSED = re.compile(r"status code: (40[13] \w+)")


class ObjectStore:
    """The objects below one URL. All methods block: from an event loop, call them in a thread."""

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self._api: Any = obstore
        self._store = store
        self.url = url

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url}>"

    def __str__(self) -> str:
        return self.url

    def put_file(self, name: str, path: Path, *, create: bool = False) -> None:
        """Upload a file in parts. The object appears when it is complete.

        `create`: upload in one part, and raise UsageError if the object exists. Raise NotFound if there is no bucket.
        """
        bucket = urlsplit(self.url).netloc
        with self._translated(name, f"there is no bucket {bucket!r} ({self.url}): create it first"):
            if create:
                self._api.put(self._store, name, path, mode="create", use_multipart=False)
            else:
                self._api.put(self._store, name, path)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one of the same name."""
        with self._translated(name, f"there is no bucket at {self.url}: create it first"):
            self._api.put(self._store, name, data)

    def get(self, name: str) -> bytes:
        """Read an object. Raise NotFound if there is no such object."""
        with self._translated(name):
            return bytes(self._api.get(self._store, name).bytes())

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(NotFound), self._translated(name):
            self._api.delete(self._store, name)

    def get_file(self, name: str, path: Path) -> None:
        """Download an object to a file, in parts. Raise NotFound if there is no such object."""
        with open(path, "wb") as file:
            with self._translated(name):
                parts = iter(self._api.get(self._store, name).stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with self._translated(name):
                    part = next(parts, None)
                if part is None:
                    return
                file.write(part)  # outside of _translated: an error of the local disk is not Unavailable

    def exists(self, name: str) -> bool:
        try:
            with self._translated(name):
                self._api.head(self._store, name)
        except NotFound:
            return False
        return True

    @contextmanager
    def _translated(self, name: str, missing: str = "") -> Iterator[None]:
        """Translate obstore's errors into Perdure's."""
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
        # obstore deletes through the API for many objects, and raises GenericError if that refuses.
        status = _REFUSED.search(str(error))
        if status or kind in ("PermissionDeniedError", "UnauthenticatedError"):
            reason = status[1] if status else kind.removesuffix("Error")
            return Unavailable(
                f"the object store at {self.url} refused the request ({reason}): check the "
                "credentials in the environment and their permissions there (get, put, delete)"
            )
        return Unavailable(
            f"the object store at {self.url} is not available ({_message(error)}): check its address and the network, "
            "then try again"
        )


def open_objects(url: str) -> ObjectStore:
    """Open an object store, with credentials from the environment. Raise UsageError for a URL that cannot be used."""
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
    """Return whether a text is the URL of an object store, by its scheme."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _SCHEMES


def split_object_url(url: str) -> tuple[str, str]:
    """Split an object's URL into its folder's URL and the object's name. Raise UsageError if it names no object."""
    path = check_url(url).path
    folder, _, name = url.rpartition("/")
    if not path.strip("/") or not name:
        shown = redacted_url(url)
        raise UsageError(f"{shown!r} names no object: give it a name, such as {shown.rstrip('/')}/a.backup")
    return folder, name


def check_url(text: str) -> SplitResult:
    """Return the parts of an object store's URL. Raise UsageError if it cannot be used; the message shows no secret."""
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
    """Remove the parts of a URL that may be a secret: user, password, query and fragment."""
    scheme, separator, location = text.partition("://")
    location = location.partition("?")[0].partition("#")[0]
    host, slash, path = location.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _client_options() -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": timedelta(seconds=_TIMEOUT_S), "connect_timeout": timedelta(seconds=5)}
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):  # asked for explicitly
        options["allow_http"] = True
    # By default obstore retries for three minutes.
    return {
        "client_options": options,
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=_TIMEOUT_S)},
    }


def _message(error: Exception) -> str:
    return _URLS.sub("…", str(error).partition("\n")[0])[:_MESSAGE_MAX]
