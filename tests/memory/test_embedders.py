"""Embedders: the local model, functions of all sorts, and what happens when one fails."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from perdure.errors import UsageError
from perdure.memory import embed
from perdure.memory.embed import BATCH, KNOWN_MAX, Embedded, Embedding, embedding_of
from perdure.storage.program import adrive, drive

NO_DRIVER: Any = None


def embedded(embedder: object, *texts: str) -> Embedded:
    embedding = embedder if isinstance(embedder, Embedding) else embedding_of(embedder)
    assert embedding is not None
    return drive(NO_DRIVER, embedding.embed(texts))


def numbers(vector: bytes | None) -> list[float]:
    assert vector is not None
    return [float(each) for each in numpy.frombuffer(vector, "<f2")]


def letters(texts: Sequence[str]) -> list[list[float]]:
    return [[text.count("a"), text.count("b")] for text in texts]


async def async_letters(texts: Sequence[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return letters(texts)


class LangChainLike:
    model = "small"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return letters(texts)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return letters(texts)


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "RETRY_DELAYS_S", (0, 0))


def test_the_local_model_knows_what_words_mean() -> None:
    texts = ("Alice loves hiking in the mountains", "Alice prefers dark mode", "outdoor activities", "")
    vectors, problem = embedded("local", *texts)
    assert not problem
    assert vectors[3] is None
    hiking, mode, outdoor = (numpy.array(numbers(vector)) for vector in vectors[:3])
    assert hiking @ outdoor > mode @ outdoor
    assert [float(numpy.linalg.norm(each)) for each in (hiking, mode)] == pytest.approx([1, 1], abs=1e-3)


def test_the_local_model_imports_nothing_of_its_wheel() -> None:
    code = """if True:
        import sys
        from perdure.memory.embed import embedding_of
        from perdure.storage.program import drive
        drive(None, embedding_of("local").embed(["fish"]))
        print(sorted({"wordllama", "requests", "huggingface_hub", "pydantic"} & set(sys.modules)))
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.parametrize("embedder", [letters, async_letters, lambda texts: async_letters(texts), LangChainLike()])
async def test_any_function_is_called_blocking_and_from_an_event_loop(embedder: Any) -> None:
    embedding = Embedding(embedder)
    blocking = drive(NO_DRIVER, embedding.embed(["a", "aaabbbb"]))
    assert [numbers(vector) for vector in blocking.vectors] == [[1, 0], pytest.approx([0.6, 0.8], abs=1e-3)]
    assert await adrive(NO_DRIVER, Embedding(embedder).embed(["a", "aaabbbb"])) == blocking
    assert embedding.dimension == 2


def test_a_vector_belongs_to_a_named_model() -> None:
    assert Embedding(letters).id.endswith("test_embedders.letters")
    assert Embedding(LangChainLike()).id.endswith("test_embedders.LangChainLike:small")
    short = LangChainLike()
    short.dimensions = 256  # type: ignore[attr-defined]
    assert Embedding(short).id.endswith("test_embedders.LangChainLike:small:256")
    local = embedding_of("local")
    assert local is not None
    assert (local.id, local.dimension, local.floor) == ("wordllama-l2-supercat-256", 256, 0.21)


def test_texts_go_in_batches_and_none_is_embedded_twice() -> None:
    calls: list[list[str]] = []

    def count(texts: list[str]) -> list[list[float]]:
        calls.append(texts)
        return letters(texts)

    embedding = Embedding(count)
    texts = [f"a{number}" for number in range(BATCH + 10)]
    assert len(embedded(embedding, *texts, *texts, " ").vectors) == 2 * len(texts) + 1
    assert [len(call) for call in calls] == [BATCH, 10]
    embedded(embedding, *texts)
    assert len(calls) == 2
    embedded(embedding, *(f"b{number}" for number in range(KNOWN_MAX)))
    embedded(embedding, texts[0])
    assert calls[-1] == [texts[0]], "only so many are kept"


def test_a_passing_failure_is_retried_and_a_lasting_one_reported() -> None:
    attempts = 0

    def fails(texts: list[str]) -> list[list[float]]:
        nonlocal attempts
        attempts += 1
        if attempts < 3 or "bad" in texts:
            raise ConnectionError("away")
        return letters(texts)

    assert embedded(fails, "a") == Embedded([numpy.array([1, 0], "<f2").tobytes()])
    assert embedded(fails, "bad", "a").vectors == [None, None]
    assert "fails failed: ConnectionError: away" in embedded(fails, "bad").problem
    assert attempts == 9


@pytest.mark.parametrize(
    "answer", [[[1.0]] * 2, [[float("nan")]], [1.0], "text", None, [["x"]], [[1.0], [1.0, 2.0]]], ids=repr
)
def test_what_is_no_vector_is_not_stored(answer: Any) -> None:
    vectors, problem = embedded(lambda texts: answer, "a")
    assert vectors == [None]
    assert problem


def test_vectors_keep_their_dimension() -> None:
    embedding = Embedding(lambda texts: [[1.0] * len(texts[0])])
    assert not embedded(embedding, "aa").problem
    assert "vectors have 2 numbers, these have 3" in embedded(embedding, "aaa").problem


@pytest.mark.parametrize("embedder", ["openai", 7])
def test_what_is_no_embedder_is_refused(embedder: object) -> None:
    with pytest.raises(UsageError, match="local"):
        embedding_of(embedder)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\.\[search\]"):
        embedded(Embedding(embed.LocalEmbedder()), "a")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match=r"\.\[search\]"):
        embedding_of("local")
