"""Embedders turn texts into vectors of length 1: a local model, any function or an embeddings object.

An embedder runs before a transaction, never in one. If it fails, the caller gets no vectors and the reason. An item
without a vector is still found by its words.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import ExtraMissing, UsageError
from perdure.memory.hooks import Calls, calls_of
from perdure.storage.program import Flow, either, sleep

BATCH = 128  # texts per call
RETRY_DELAYS_S = (0.1, 0.5)
PARTS = "\x1e"  # between the parts of a text that have a vector each
KNOWN_MAX = 1000  # texts whose vectors are kept, for repeated queries and unchanged items


class Embedded(NamedTuple):
    """Vectors as they are stored (float16, little-endian). None: the text is empty, or `problem` says why."""

    vectors: list[bytes | None]
    problem: str = ""


class Embedding:
    """Calls an embedder in batches and with retries, and keeps the vectors of recent texts."""

    def __init__(self, embedder: Any) -> None:
        self._texts = self._queries = calls_of(
            getattr(embedder, "embed_documents", embedder), getattr(embedder, "aembed_documents", None)
        )
        if hasattr(embedder, "embed_query"):  # an embeddings object takes queries one by one
            self._queries = calls_of(lambda texts: [embedder.embed_query(text) for text in texts])
        self._batch: int = getattr(embedder, "batch", BATCH)
        self.id: str = getattr(embedder, "id", None) or _name(embedder)
        self.dimension: int | None = getattr(embedder, "dimension", None)
        self.floor: float | None = getattr(embedder, "floor", None)
        self._known: OrderedDict[tuple[bool, bytes], bytes] = OrderedDict()  # by digest: no text is kept
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> Flow[Embedded]:
        """Return the vectors of texts. An empty text has none. Those of a text in parts follow each other.

        Some models embed a query differently from the texts to be found; set `queries` for queries.
        """
        cut = [[text] if queries else text.split(PARTS) for text in texts]
        vectors, problem = yield from self._vectors([part for parts in cut for part in parts], queries)
        each = iter(vectors)
        joined = (b"".join(vector for _, vector in zip(parts, each, strict=False) if vector) for parts in cut)
        return Embedded([vector or None for vector in joined], problem)

    def _vectors(self, texts: Sequence[str], queries: bool) -> Flow[Embedded]:
        problem = ""
        queries = queries and self._queries is not self._texts
        digests = {text: (queries, blake2b(text.encode(errors="replace"), digest_size=16).digest()) for text in texts}
        with self._lock:
            vector_of = {text: self._known.get(digest) for text, digest in digests.items()}
        missing = [text for text, known in vector_of.items() if known is None and text.strip()]
        for start in range(0, len(missing), self._batch):
            batch = missing[start : start + self._batch]
            vectors, failed = yield from self._embed(batch, self._queries if queries else self._texts)
            problem = problem or failed
            computed = dict(zip(batch, vectors, strict=False))
            vector_of |= computed
            with self._lock:
                self._known |= {digests[text]: vector for text, vector in computed.items()}
                while len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
        return Embedded([vector_of[text] for text in texts], problem)

    def _embed(self, batch: list[str], calls: Calls) -> Flow[tuple[list[bytes], str]]:
        problem = ""
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                answer = yield from either(lambda: calls[0](batch), lambda: calls[1](batch))
                return self._stored(answer, len(batch)), ""
            except UsageError:
                raise
            except Exception as error:
                problem = f"the embedder {self.id} failed: {type(error).__name__}: {error}"
                asked_s: float | None = getattr(error, "retry_after_s", 0)
            if delay_s is None or asked_s is None:
                break
            yield from sleep(max(delay_s, asked_s))
        return [], problem

    def _stored(self, answer: Any, count: int) -> list[bytes]:
        numpy = _numpy()
        matrix = numpy.asarray(answer, "f4")
        if matrix.ndim != 2 or len(matrix) != count or not numpy.isfinite(matrix).all():
            raise ValueError(f"{count} vectors of numbers were expected, not an array of shape {matrix.shape}")
        if self.dimension is not None and matrix.shape[1] != self.dimension:
            raise ValueError(f"vectors have {self.dimension} numbers, these have {matrix.shape[1]}")
        self.dimension = matrix.shape[1]
        lengths = numpy.linalg.norm(matrix, axis=1, keepdims=True)
        return [vector.tobytes() for vector in (matrix / numpy.maximum(lengths, 1e-9)).astype("<f2")]


class SentenceModel:
    """A model of sentence-transformers. It has a prompt of its own for queries where it was trained with one."""

    def __init__(self, model: Any) -> None:
        name = getattr(model, "id", None) or getattr(getattr(model, "tokenizer", None), "name_or_path", None)
        if not name:
            raise UsageError('this model has no name: set model.id = "…", which changes with the model')
        self.id = f"sentence-transformers:{name}"
        self._texts = getattr(model, "encode_document", model.encode)
        self._queries = getattr(model, "encode_query", model.encode)

    def embed_documents(self, texts: list[str]) -> Any:
        """Return the vectors of texts that will be stored."""
        return self._texts(texts)

    def embed_query(self, text: str) -> Any:
        """Return the vector of a text that is searched for."""
        return self._queries([text])[0]


class LocalEmbedder:
    """The mean of WordLlama's static word vectors (16 MB, English), read from its wheel without importing it."""

    id = "wordllama-l2-supercat-256"
    dimension = 256
    floor = 0.21

    def __call__(self, texts: list[str], /) -> Any:
        numpy = _numpy()
        tokenizer, table = self._model
        vectors = numpy.zeros((len(texts), self.dimension), "f4")
        for vector, text in zip(vectors, texts, strict=True):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens:
                vector[:] = table[tokens].mean(0, dtype="f4")
        return vectors

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        numpy = _numpy()
        spec = importlib.util.find_spec("wordllama")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            raise ExtraMissing('embedder="local"', "search")
        folder = Path(spec.origin).parent
        data = numpy.memmap(folder / "weights" / "l2_supercat_256.safetensors", mode="r")
        # A safetensors file: the size of a JSON header, the header, the tensors. This one has one tensor.
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        [tensor] = [each for name, each in json.loads(data[8:start].tobytes()).items() if name != "__metadata__"]
        first, last = tensor["data_offsets"]
        table = data[start + first : start + last].view("<f2").reshape(tensor["shape"])
        return Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")), table


def embedding_of(embedder: object) -> Embedding | None:
    """Return the embedding for `open(embedder=…)`: a name, a function, an embeddings object or None."""
    if embedder is None or isinstance(embedder, Embedding):
        return embedder
    _numpy()
    if embedder == "local":
        return _local()
    if isinstance(embedder, str):
        from perdure.memory.embedding_services import ServiceEmbedder

        return Embedding(ServiceEmbedder(embedder))
    if hasattr(embedder, "encode") and not hasattr(embedder, "embed_documents"):
        return Embedding(SentenceModel(embedder))
    if not callable(embedder) and not hasattr(embedder, "embed_documents"):
        raise UsageError(
            f'embedder= is "local", "SERVICE:MODEL", a function from texts to vectors, or None; not {embedder!r:.100}'
        )
    return Embedding(embedder)


@cache
def _local() -> Embedding:
    return Embedding(LocalEmbedder())


def _name(embedder: object) -> str:
    named = embedder if hasattr(embedder, "__qualname__") else type(embedder)
    model = getattr(embedder, "model", None) or getattr(embedder, "model_name", None)
    parts = (model, getattr(embedder, "dimensions", None))
    return ":".join(
        [f"{named.__module__}.{named.__qualname__}", *(str(part) for part in parts if type(part) in (str, int))]
    )


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ExtraMissing("an embedder", "search") from error
    return numpy
