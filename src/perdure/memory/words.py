"""The words of an item: cut and stemmed by SQLite's own tokenizer, without stop words, packed into a few bytes.

Chinese, Japanese and Korean, which have no spaces or long words, are cut into pairs of characters. Cyrillic words lose
their endings. A term is the crc32 of a stem: an item takes five bytes per different word. Nothing here needs numpy, so
that a put works without it.
"""

from __future__ import annotations

import re
import struct
import threading
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast
from zlib import crc32

import apsw

from perdure.memory.languages import CYRILLIC_ENDING, FUNCTION_WORDS

TEXT_WEIGHT = 10  # of one occurrence, in tenths
CONTEXT_WEIGHT = 6
LABEL_WEIGHT = 3  # of a key, a field's name, a number, and a single Chinese character of a longer word
COUNT_MAX = 255  # one byte
# Context helps a short text that cannot be understood alone ("Yes, I did!"). It would drown a long one, and the
# beginning of a long context seldom says what the text is about.
CHARACTERS_WITH_CONTEXT = 400
_STOP = """
a about above after again all also am an and any are aren as at be because been before being below between both but by
can cannot could couldn d did didn do does doesn doing don down during each few for from further had hadn has hasn have
haven having he her here hers herself him himself his how i if in into is isn it its itself just ll m me more most my
myself no nor not now o of off on once only or other our ours ourselves out over own re s same she should shouldn so
some such t than that the their theirs them themselves then there these they this those through to too under until up ve
very was wasn we were weren what when where which while who whom why will with won would wouldn you your yours yourself
yourselves
"""
STOP_WORDS = frozenset(_STOP.split())
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_SYMBOL = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff]")  # the tokenizer drops them
_NAME = re.compile("[A-Z][A-Za-z]+")
_CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])")
_CUT = ["unicode61", "remove_diacritics", "2"]
_STEMMED_MAX = 64  # the tokenizer stems no longer words, and a cache should not keep them
_local = threading.local()

Tokenizer = Callable[[bytes], list[str]]


class IndexText(NamedTuple):
    """What an item is found by: its text, what was said before, and its labels: key, names of fields, numbers."""

    text: str
    context: str | None = None
    labels: str = ""

    @property
    def indexed_context(self) -> str:
        if self.context is None or len(self.context) > CHARACTERS_WITH_CONTEXT:
            return ""
        return self.context[: max(0, CHARACTERS_WITH_CONTEXT - len(self.text))]

    @property
    def embedded(self) -> str:
        """Return the text to embed: that of the item, and the indexed part of its context."""
        return f"{self.text} {self.indexed_context}".strip()

    def pack(self) -> bytes:
        """Return the terms (four bytes each, ascending), then their weighted counts (one byte each)."""
        counts: dict[int, int] = {}
        for found_by, weight in (
            (chain(stems(self.text), names(self.text)), TEXT_WEIGHT),
            (_HAN.findall(self.text), LABEL_WEIGHT),
            (stems(self.indexed_context), CONTEXT_WEIGHT),
            (stems(_CAMEL.sub(" ", self.labels)), LABEL_WEIGHT),
        ):
            for number in map(term, found_by):
                counts[number] = counts.get(number, 0) + weight
        terms = sorted(counts)
        return struct.pack(f"<{len(terms)}I", *terms) + bytes([min(counts[number], COUNT_MAX) for number in terms])


def query_terms(query: str) -> list[int]:
    """Return the different terms of a query, in its order. Stop words are terms if there is nothing else."""
    words = [*stems(query, _function_words(query)), *names(query.lstrip(), 1)]  # a question begins with a capital
    return list(dict.fromkeys(map(term, words or _cut(query))))


@lru_cache(100_000)
def term(stem: str) -> int:
    return crc32(stem.encode())


def names(text: str, start: int = 0) -> list[str]:
    """Return the stop words from a place on that may be names, since they are capitalised: IT, Will, The Who."""
    found = (match[0].lower() for match in _NAME.finditer(text) if match.start() >= start)
    return [word for word in found if word in STOP_WORDS]


def _function_words(query: str) -> frozenset[str]:
    """Return the words that say nothing in the language of a query: the one that has most of them there."""
    words = frozenset(_cut(query))
    return max((STOP_WORDS, *FUNCTION_WORDS), key=lambda known: len(words & known))  # English, if several have


def stems(text: str, without: frozenset[str] = frozenset()) -> list[str]:
    """Return the stems of a text's words, in order, without stop words and those in `without`."""
    words: list[str] = []
    for word in _cut(text):
        if word in without or word in STOP_WORDS:
            continue
        if not word.isascii() and len(word) > 2 and _UNSPACED.search(word):
            words += [word[at : at + 2] for at in range(len(word) - 1)]
        else:
            words.append(_stem(word) if len(word) <= _STEMMED_MAX else word)
    return words if text.isascii() else [*words, *_SYMBOL.findall(text)]


def _cut(text: str) -> list[str]:
    if not text:
        return []
    return _tokenizers()[0](unicodedata.normalize("NFKC", text).encode(errors="replace"))


@lru_cache(20_000)
def _stem(word: str) -> str:
    stem = "".join(_tokenizers()[1](word.encode()))
    return stem if stem.isascii() else CYRILLIC_ENDING.sub("", stem)


def _tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Return a tokenizer that cuts words, and one that also stems them.

    They belong to a connection, which belongs to a thread.
    """
    if not hasattr(_local, "tokenizers"):
        connection = apsw.Connection(":memory:")

        def tokenizer(name: str, arguments: list[str]) -> Tokenizer:
            tokenize = connection.fts5_tokenizer(name, arguments)
            options: dict[str, Any] = {"include_offsets": False, "include_colocated": False}
            return lambda data: cast("list[str]", tokenize(data, apsw.FTS5_TOKENIZE_DOCUMENT, None, **options))

        _local.tokenizers = tokenizer(_CUT[0], _CUT[1:]), tokenizer("porter", _CUT)
    return cast("tuple[Tokenizer, Tokenizer]", _local.tokenizers)
