"""Embedders that are reached over HTTP: OpenAI, Cohere and Voyage, named as "openai:text-embedding-3-small".

A service gets batches of its own size and is asked again when it is busy, after the pause that it names. The key and
the address come from the environment variables that the service's own client reads. No key is part of an error.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from perdure.errors import UsageError

TIMEOUT_S = 30
ANSWER_BYTES_MAX = 64_000_000
PAUSE_S_MAX = 30.0  # a service that asks for a longer pause counts as failed
_BUSY = {408, 409, 429, 500, 502, 503, 504, 529}


class ServiceFailed(Exception):
    """A service did not embed. `retry_after_s` is how long it asked to wait, or None if asking again is useless."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Service(NamedTuple):
    key_variables: tuple[str, ...]
    url_variable: str
    url: str
    path: str
    batch: int
    body: Callable[[str, list[str], bool], dict[str, Any]]
    vectors: Callable[[Any], list[Any]]


def _in_order(answer: Any) -> list[Any]:
    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]


_SERVICES = {
    "openai": _Service(
        ("OPENAI_API_KEY",),
        "OPENAI_BASE_URL",
        "https://api.openai.com/v1",
        "/embeddings",
        128,
        lambda model, texts, queries: {"model": model, "input": texts, "encoding_format": "float"},
        _in_order,
    ),
    "cohere": _Service(
        ("CO_API_KEY", "COHERE_API_KEY"),
        "CO_API_URL",
        "https://api.cohere.com",
        "/v2/embed",
        96,
        lambda model, texts, queries: {
            "model": model,
            "texts": texts,
            "input_type": "search_query" if queries else "search_document",
            "embedding_types": ["float"],
        },
        lambda answer: list(answer["embeddings"]["float"]),
    ),
    "voyage": _Service(
        ("VOYAGE_API_KEY",),
        "VOYAGE_BASE_URL",
        "https://api.voyageai.com/v1",
        "/embeddings",
        128,
        lambda model, texts, queries: {
            "model": model,
            "input": texts,
            "input_type": "query" if queries else "document",
        },
        _in_order,
    ),
}
NAMES = tuple(_SERVICES)


class ServiceEmbedder:
    """Embeds texts by a service, and queries as queries where the service tells them apart."""

    def __init__(self, name: str) -> None:
        provider, _, self.model = name.partition(":")
        service = _SERVICES.get(provider)
        if service is None or not self.model:
            raise UsageError(f'embedder={name!r}: write "local" or SERVICE:MODEL; services are {", ".join(NAMES)}')
        if not any(os.environ.get(variable) for variable in service.key_variables):
            raise UsageError(f"embedder={name!r} needs the environment variable {service.key_variables[0]}")
        self.id = name
        self.batch = service.batch
        self._service = service
        self._url = os.environ.get(service.url_variable, service.url).rstrip("/") + service.path
        if not self._url.startswith(("https://", "http://")):
            raise UsageError(f"{service.url_variable} is the address of a server: https://…")

    def embed_documents(self, texts: list[str]) -> list[Any]:
        """Return the vectors of texts that will be stored."""
        return self._ask(texts, queries=False)

    def embed_query(self, text: str) -> Any:
        """Return the vector of a text that is searched for."""
        return self._ask([text], queries=True)[0]

    def _ask(self, texts: list[str], *, queries: bool) -> list[Any]:
        service = self._service
        key = next(value for variable in service.key_variables if (value := os.environ.get(variable)))
        request = urllib.request.Request(
            self._url,
            json.dumps(service.body(self.model, texts, queries)).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "User-Agent": "perdure"},
        )
        try:
            with _open(request) as answer:
                content = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise ServiceFailed(f"{self._url} answered {error.code}", _pause(error)) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServiceFailed(f"{self._url} cannot be reached: {type(error).__name__}", 0) from error
        if len(content) > ANSWER_BYTES_MAX:
            raise ServiceFailed(f"{self._url} answered more than {ANSWER_BYTES_MAX} bytes", None)
        try:
            return service.vectors(json.loads(content))
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceFailed(f"{self._url} answered something else than vectors", None) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirect would take the key to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _open(request: urllib.request.Request) -> Any:
    return urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S)


def _pause(error: urllib.error.HTTPError) -> float | None:
    """Return how long to wait before the next try. None: the service refused, or asks for too long a pause."""
    if error.code not in _BUSY:
        return None
    try:
        pause_s = float(error.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0
    return pause_s if 0 <= pause_s <= PAUSE_S_MAX else None
