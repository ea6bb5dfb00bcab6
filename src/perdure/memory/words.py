"""The words of an item: cut and stemmed by SQLite's own tokenizer, without stop words, packed into a few bytes.

Chinese, Japanese and Korean, which have no spaces or long words, are cut into pairs of characters. A term is the crc32
of a stem: an item takes five bytes per different word. Other analyzers than English are in `analyzers.py`. Nothing here
needs numpy, so that a put works without it.
"""

from __future__ import annotations

import re
import struct
import threading
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast
from zlib import crc32

import apsw

from perdure.memory.languages import CYRILLIC_ENDING, FUNCTION_WORDS

TEXT_WEIGHT = 10  # of one occurrence, in tenths
CONTEXT_WEIGHT = 6
LABEL_WEIGHT = 3  # of a key, a field's name, a number, and a single Chinese or Korean character of a longer word
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
_SYLLABLES = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_SYLLABLE = re.compile(f"[{_SYLLABLES}]")  # a Chinese or Korean character, which may be a word
_UNSPACED = re.compile(f"[\u3040-\u30ff{_SYLLABLES}]")
_PAIR = re.compile(f"(?=({_UNSPACED.pattern}.|.{_UNSPACED.pattern}))")
_WITHIN = re.compile(f"[^\u3040-\u30ff{_SYLLABLES}]+")  # a Latin word or a number in a text without spaces
# The tokenizer drops them. A flag is two letters.
_SYMBOL = re.compile(
    "[\U0001f1e6-\U0001f1ff]{2}|[\u2300-\u23ff\u2600-\u27bf\u2b1b\u2b1c\u2b50\u2b55\U0001f000-\U0001faff]"
)
_NAME = re.compile("[A-Z][A-Za-z]+")
_FIRST_NAME = re.compile(r"\A\s*[A-Z][A-Za-z]+")
_CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])")
_CAMEL_WORD = re.compile(r"\b\w*[a-z0-9][A-Z]\w*")  # begins at a boundary: long words would take quadratic time
STEMMED_MAX = 64  # the tokenizer stems no longer words, and a cache should not keep them
_KNOWN_MAX = 20_000  # words whose terms an analyzer keeps
# What the tokenizer makes of ASCII: letters in lower case, digits, and separators.
_ASCII = bytes(ord(chr(code).lower()) if chr(code).isalnum() else 32 for code in range(128)).ljust(256)
_VERSION = 2  # of what analyzers make of a text: raise it when that changes, and items are cut again
_PLAIN, _PORTER, _ACCENTS = range(3)  # the tokenizers
_local = threading.local()

Tokenizer = Callable[[bytes], list[str]]


class IndexText(NamedTuple):
    """What an item is found by: its text, what was said before, its labels (names of fields, numbers), and its key."""

    text: str
    context: str | None = None
    labels: str = ""
    key: str = ""

    @property
    def indexed_context(self) -> str:
        if self.context is None or len(self.context) > CHARACTERS_WITH_CONTEXT:
            return ""
        return self.context[: max(0, CHARACTERS_WITH_CONTEXT - len(self.text))]

    @property
    def embedded(self) -> str:
        """Return the text to embed: that of the item, and the indexed part of its context.

        `{"vegetarian": True}` has no text, and says something nevertheless: its labels are embedded. A number alone
        says nothing.
        """
        said = f"{self.text} {self.indexed_context}".strip()
        return said or (_CAMEL.sub(" ", self.labels).replace("_", " ") if any(map(str.isalpha, self.labels)) else "")


class Analyzer:
    """Says which terms a text has, and packs those of an item.

    Packed terms end with the mark of their analyzer. One that sees another mark cuts the item again (`scopes.py`).
    """

    def __init__(self, id: str, stems: Callable[[str], list[str]]) -> None:
        self.id, self.stems = f"{id} {_VERSION}", stems
        self._mark = crc32(self.id.encode()).to_bytes(4, "little")

    def has_packed(self, packed: bytes) -> bool:
        return len(packed) % 5 == len(self._mark) and packed.endswith(self._mark)

    def pack(self, text: IndexText) -> bytes:
        """Return the terms (four bytes each, ascending), their weighted counts (one byte each), and the mark."""
        counts: dict[int, int] = {}
        for numbers, weight in (
            (self.terms(text.text), TEXT_WEIGHT),
            (map(term, self.names(text.text)), TEXT_WEIGHT),
            (map(term, self.parts(text.text)), LABEL_WEIGHT),
            (self.terms(text.indexed_context), CONTEXT_WEIGHT),
            (self.terms(_with_parts(f"{text.key} {text.labels}".strip())), LABEL_WEIGHT),
        ):
            for number in numbers:
                counts[number] = counts.get(number, 0) + weight
        terms = sorted(counts)
        weights = [count if (count := counts[number]) < COUNT_MAX else COUNT_MAX for number in terms]
        return struct.pack(f"<{len(terms)}I", *terms) + bytes(weights) + self._mark

    def query_terms(self, query: str) -> dict[int, float]:
        """Return the different terms of a query, in its order, with the part of a word that each counts."""
        return dict.fromkeys(map(term, self.stems(query)), 1.0)

    def terms(self, text: str) -> list[int]:
        """Return the terms of a text, in order."""
        return [*map(term, self.stems(text))]

    def names(self, text: str) -> list[str]:
        """Return the stop words that may be names, since they are capitalised: IT, Will, The Who."""
        return []

    def parts(self, text: str) -> list[str]:
        """Return the parts of words by which an item is found too, with less weight."""
        return []


class WordAnalyzer(Analyzer):
    """Cuts a text into words, and stems these. Stop words are terms only of a query that has nothing else.

    A query also loses the words of that set of `drops` of which it has most: those that say nothing in its language.
    """

    def __init__(
        self,
        id: str,
        stem: Callable[[str], str],
        stop: frozenset[str] = frozenset(),
        *,
        drops: Sequence[frozenset[str]] = (),
        has_accents: bool = False,
    ) -> None:
        super().__init__(id, self._stems)
        self.stem, self._stop, self.drops, self._has_accents = stem, stop, drops, has_accents
        self._known = _KnownWords(lambda word: tuple(map(term, self._of_word(word))))

    def terms(self, text: str) -> list[int]:
        terms = [number for word in cut(text, has_accents=self._has_accents) for number in self._known[word]]
        return terms if text.isascii() else [*terms, *map(term, _SYMBOL.findall(text))]

    def query_terms(self, query: str) -> dict[int, float]:
        # A question begins with a capital.
        words = [*self._stems(query, self.dropped(query)), *self.names(_FIRST_NAME.sub("", query))]
        return dict.fromkeys(map(term, words or self._stems(query) or cut(query)), 1.0)

    def names(self, text: str) -> list[str]:
        return [word for name in _NAME.findall(text) if (word := name.lower()) in self._stop]

    def parts(self, text: str) -> list[str]:
        return [] if text.isascii() else _SYLLABLE.findall(text)

    def dropped(self, query: str) -> frozenset[str]:
        """Return the words that say nothing in the language of a query."""
        words = frozenset(cut(query))
        return max(self.drops, key=lambda known: len(words & known), default=self._stop)  # the first, if several have

    def _stems(self, text: str, without: frozenset[str] = frozenset()) -> list[str]:
        """Return the stems of a text's words, in order, without stop words and those in `without`."""
        words = [word for word in cut(text, has_accents=self._has_accents) if folded(word) not in without]
        return [stem for word in words for stem in self._of_word(word)] + _SYMBOL.findall(text)

    def _of_word(self, word: str) -> list[str]:
        """Return the stems of a word: none of a stop word, pairs of characters of one that is cut into these."""
        if word in self._stop:
            return []
        if is_unspaced(word):
            return [*_PAIR.findall(word), *map(self._stemmed, _WITHIN.findall(word))]
        return [self._stemmed(word)]

    def _stemmed(self, word: str) -> str:
        return self.stem(word) if len(word) <= STEMMED_MAX else word


class _KnownWords(dict[str, tuple[int, ...]]):
    """The terms of words that an analyzer has seen."""

    def __init__(self, terms_of: Callable[[str], tuple[int, ...]]) -> None:
        self._terms_of = terms_of

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _KNOWN_MAX:
            self.clear()
        terms = self._terms_of(word)
        if len(word) <= STEMMED_MAX:
            self[word] = terms
        return terms


def _with_parts(names: str) -> str:
    """Return names with the words of which some are made: favorite Color favoriteColor."""
    return names if names.islower() else " ".join([_CAMEL.sub(" ", names), *_CAMEL_WORD.findall(names)])


def term(stem: str) -> int:
    return crc32(stem.encode())


def is_unspaced(word: str) -> bool:
    """Return whether a word is cut into pairs of characters."""
    return not word.isascii() and len(word) > 2 and _UNSPACED.search(word) is not None


def cut(text: str, *, has_accents: bool = False) -> list[str]:
    """Return the words of a text in lower case, without accents unless it `has_accents`."""
    if text.isascii():
        return text.encode().translate(_ASCII).decode().split()
    tokenize = _tokenizers()[_ACCENTS if has_accents else _PLAIN]
    return tokenize(unicodedata.normalize("NFKC", text).replace("ß", "ss").replace("ẞ", "SS").encode(errors="replace"))


def folded(word: str) -> str:
    """Return a word without accents."""
    return word if word.isascii() else "".join(cut(word))


def _stem(word: str) -> str:
    stem = "".join(_tokenizers()[_PORTER](word.encode()))
    return stem if stem.isascii() else CYRILLIC_ENDING.sub("", stem)


def _tokenizers() -> tuple[Tokenizer, ...]:
    """Return the tokenizers: one that cuts words, one that also stems them, and one that leaves their accents.

    They belong to a connection, which belongs to a thread.
    """
    if not hasattr(_local, "tokenizers"):
        connection = apsw.Connection(":memory:")

        def tokenizer(name: str, arguments: list[str]) -> Tokenizer:
            tokenize = connection.fts5_tokenizer(name, arguments)
            options: dict[str, Any] = {"include_offsets": False, "include_colocated": False}
            return lambda data: cast("list[str]", tokenize(data, apsw.FTS5_TOKENIZE_DOCUMENT, None, **options))

        plain, accents = (["unicode61", "remove_diacritics", each] for each in "20")
        _local.tokenizers = (
            tokenizer(plain[0], plain[1:]),
            tokenizer("porter", plain),
            tokenizer(accents[0], accents[1:]),
        )
    return cast("tuple[Tokenizer, ...]", _local.tokenizers)


ENGLISH = WordAnalyzer("english", _stem, STOP_WORDS, drops=(STOP_WORDS, *FUNCTION_WORDS.values()))
