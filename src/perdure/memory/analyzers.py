"""The analyzers that a store may have besides English (`open(words=…)`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from perdure.errors import ExtraMissing, UsageError
from perdure.memory.languages import FUNCTION_WORDS
from perdure.memory.words import (
    ENGLISH,
    STEMMED_MAX,
    STOP_WORDS,
    Analyzer,
    WordAnalyzer,
    cut,
    folded,
    is_unspaced,
    term,
)

GRAM_MIN: Final = 4  # characters
_ENDING: Final = 2  # characters that a word of a query may have more than one of an item
_FORMS_SHARE: Final = 0.5  # of a word, that its shorter forms count in a query


class GramAnalyzer(WordAnalyzer):
    """Finds long words also by how they begin and end: compounds by their parts, and inflections.

    N-grams from within a word would find more, and most of that by chance.
    """

    def parts(self, text: str) -> list[str]:
        words = [word for word in cut(text) if word not in STOP_WORDS and _has_grams(word)]
        sizes = ((word, size) for word in words for size in range(GRAM_MIN, len(word) + 1))
        return [*super().parts(text), *(gram for word, size in sizes for gram in {word[:size], word[-size:]})]

    def query_terms(self, query: str) -> dict[int, float]:
        terms, dropped = super().query_terms(query), STOP_WORDS | self.dropped(query)
        for word in cut(query):
            if word not in dropped and _has_grams(word):
                forms = [word[:size] for size in range(max(GRAM_MIN, len(word) - _ENDING), len(word) + 1)]
                for number in map(term, forms):
                    terms.setdefault(number, _FORMS_SHARE / len(forms))
        return terms


def _has_grams(word: str) -> bool:
    return GRAM_MIN <= len(word) <= STEMMED_MAX and word.isalpha() and not is_unspaced(word)


SIMPLE = WordAnalyzer("simple", str)
NGRAMS = GramAnalyzer("ngrams", ENGLISH.stem, STOP_WORDS, drops=ENGLISH.drops)
_NAMED = {"english": ENGLISH, "simple": SIMPLE, "ngrams": NGRAMS}


def analyzer_of(words: object) -> Analyzer:
    """Return the analyzer for `open(words=…)`: a name, or a function from a text to its terms. Raises UsageError."""
    if isinstance(words, str):
        return _NAMED.get(words) or _snowball(words)
    module, name = getattr(words, "__module__", None), getattr(words, "__qualname__", "<lambda>")
    name = getattr(words, "id", f"{module}.{name}" if module and name != "<lambda>" else None)
    if not callable(words) or not isinstance(name, str):
        raise UsageError(
            f"words={words!r:.100} is no analyzer: give a name ({', '.join(_NAMED)}, german, …), or a function from a "
            "text to its terms that has a name of its own, or an `id` that changes with what it does"
        )
    return Analyzer(name, _checked(words, name))


def _checked(cuts: Callable[..., Any], name: str) -> Callable[[str], list[str]]:
    def stems(text: str) -> list[str]:
        terms = cuts(text) if text else []
        if not isinstance(terms, list) or not all(type(each) is str for each in terms):
            raise UsageError(f"words={name} returns the terms of a text as a list of str, not {terms!r:.100}")
        return terms

    return stems


@cache
def _snowball(language: str) -> Analyzer:
    """Return the analyzer that stems as Snowball does in a language. Raises UsageError."""
    try:
        import Stemmer
    except ImportError as error:
        raise ExtraMissing(f"words={language!r:.40}", "search") from error
    languages = [name for name in Stemmer.algorithms() if not name.endswith("porter") and name not in _NAMED]
    if language not in languages:
        raise UsageError(f"words={language!r:.40}: {', '.join((*_NAMED, *languages))}, or a function")
    local = threading.local()  # a stemmer may not be used by two threads at once

    def stem(word: str) -> str:
        if not hasattr(local, "stemmer"):
            local.stemmer = Stemmer.Stemmer(language, 0)
        stem: str = local.stemmer.stemWord(word)
        # "café" and "cafe" may end differently for a stemmer.
        return stem if (plain := folded(stem)) == stem else local.stemmer.stemWord(plain)

    drops = (FUNCTION_WORDS.get(language, frozenset()), *ENGLISH.drops)  # a word of two languages is of this one
    return WordAnalyzer(f"snowball {Stemmer.version()} {language}", stem, drops=drops, has_accents=True)
