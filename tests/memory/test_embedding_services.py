"""Embedders over HTTP, against a server that speaks their protocols, and models of sentence-transformers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import perdure
from perdure.errors import UsageError
from perdure.memory import embed
from perdure.memory.embed import Embedded, embedding_of
from perdure.storage.program import adrive, drive

KEY = "a-secret-key"
NO_DRIVER: Any = None


class EmbeddingServer(http.server.ThreadingHTTPServer):
    """OpenAI's, Cohere's and Voyage's protocols: a vector counts letters and says whether its text is a query."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refusals: list[tuple[int, dict[str, str]]] = []  # answers to the next requests: status, headers


class _Handler(http.server.BaseHTTPRequestHandler):
    server: EmbeddingServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._answer(401, {}, {"error": "wrong key"})
        elif self.server.refusals:
            status, headers = self.server.refusals.pop(0)
            self._answer(status, headers, {"error": "not now"})
        else:
            texts = body.get("input") or body["texts"]
            query = "query" in body.get("input_type", "")
            vectors = [[text.count("a"), text.count("b") + 0.1, float(query)] for text in texts]
            if self.path == "/v2/embed":
                assert len(texts) <= 96
                self._answer(200, {}, {"embeddings": {"float": vectors}})
            else:  # in any order: the index says which
                rows = [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]
                self._answer(200, {}, {"data": rows[::-1], "model": body["model"]})

    def _answer(self, status: int, headers: dict[str, str], value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, content in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, content)
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddingServer]:
    monkeypatch.setattr(embed, "RETRY_DELAYS_S", (0, 0))
    with EmbeddingServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        addresses = {"OPENAI_BASE_URL": f"{url}/v1", "CO_API_URL": url, "VOYAGE_BASE_URL": f"{url}/v1"}
        for name, value in {**addresses, "OPENAI_API_KEY": KEY, "CO_API_KEY": KEY, "VOYAGE_API_KEY": KEY}.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


def embedded(name: str, *texts: str) -> Embedded:
    embedding = embedding_of(name)
    assert embedding is not None
    return drive(NO_DRIVER, embedding.embed(texts))


@pytest.mark.parametrize(
    ("name", "path", "requests"),
    [
        ("openai:text-embedding-3-small", "/v1/embeddings", 2),
        ("cohere:embed-v4.0", "/v2/embed", 3),
        ("voyage:voyage-3.5", "/v1/embeddings", 2),
    ],
)
async def test_a_service_embeds_items_and_queries(
    server: EmbeddingServer, name: str, path: str, requests: int, tmp_path: Any
) -> None:
    with perdure.open(tmp_path / "agent.db", embedder=name) as store:
        memory = store.memory("users")
        memory.put_many({f"a{number}": {"text": "a" * 20 + f" {number}"} for number in range(200)})
        assert [sent for sent, _ in server.requests] == [path] * requests
        memory.put("b", {"text": "bbbbbbbbbb"})
        assert (await memory.asearch("bb bb", limit=1))[0].key == "b"
        assert store.memory().stats().embedded == 201
    kinds = {"openai": {None}, "cohere": {"search_document", "search_query"}, "voyage": {"document", "query"}}
    assert {body.get("input_type") for _, body in server.requests} == kinds[name.partition(":")[0]]
    assert {body["model"] for _, body in server.requests} == {name.partition(":")[2]}


async def test_a_busy_service_is_asked_again_after_the_pause_that_it_names(server: EmbeddingServer) -> None:
    server.refusals = [(429, {"Retry-After": "0.01"}), (503, {})]
    assert embedded("openai:small", "a").problem == ""
    assert len(server.requests) == 3
    server.refusals = [(500, {})]
    embedding = embedding_of("voyage:small")
    assert embedding is not None
    assert (await adrive(NO_DRIVER, embedding.embed(["b"]))).problem == ""


@pytest.mark.parametrize(
    ("status", "headers", "requests"),
    [(400, {}, 1), (429, {"Retry-After": "3600"}, 1), (302, {"Location": "http://127.0.0.1:9/"}, 1)],
)
def test_a_refusal_is_not_repeated(
    server: EmbeddingServer, status: int, headers: dict[str, str], requests: int
) -> None:
    server.refusals = [(status, headers)] * 3
    vectors, problem = embedded("cohere:small", "a")
    assert vectors == [None]
    assert f"answered {status}" in problem
    assert len(server.requests) == requests


def test_no_error_shows_the_key(server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-wrong-key")
    problem = embedded("openai:small", "a").problem
    assert "answered 401" in problem
    assert "a-wrong-key" not in problem


def test_a_name_without_a_service_or_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOYAGE_API_KEY", raising=False)
    with pytest.raises(UsageError, match="VOYAGE_API_KEY"):
        embedding_of("voyage:small")
    for name in ("openai:", "acme:small", "loca"):
        with pytest.raises(UsageError, match="services are openai, cohere, voyage"):
            embedding_of(name)


class SentenceTransformerLike:
    """What Perdure uses of a SentenceTransformer, which is callable too, but takes tensors."""

    class tokenizer:
        name_or_path = "sentence-transformers/tiny"

    def __call__(self, tensors: Any) -> Any:
        raise AssertionError("a model takes tensors here")

    def encode(self, texts: list[str]) -> Any:
        return numpy.array([[text.count("a"), 1.0] for text in texts])

    def encode_query(self, texts: list[str]) -> Any:
        return -self.encode(texts)


def test_a_model_of_sentence_transformers_is_an_embedder() -> None:
    embedding = embedding_of(SentenceTransformerLike())
    assert embedding is not None
    assert embedding.id == "sentence-transformers:sentence-transformers/tiny"
    [text], _ = drive(NO_DRIVER, embedding.embed(["aa"]))
    [query], _ = drive(NO_DRIVER, embedding.embed(["aa"], queries=True))
    assert text is not None
    assert query is not None
    assert (numpy.frombuffer(text, "<f2") == -numpy.frombuffer(query, "<f2")).all()


def test_a_model_without_a_name_is_refused() -> None:
    model: Any = SentenceTransformerLike()
    model.tokenizer = None
    with pytest.raises(UsageError, match=r"model\.id"):
        embedding_of(model)
