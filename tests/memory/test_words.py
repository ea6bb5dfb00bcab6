"""What an item's words are: stems, weights, bytes."""

from __future__ import annotations

import struct
import threading
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.memory.words import CHARACTERS_WITH_CONTEXT, COUNT_MAX, ENGLISH, IndexText, cut, term


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She was hiking, he hikes", ["hike", "hike"]),
        ("NAÏVE café", ["naiv", "cafe"]),
        ("user_id=foo-bar", ["user", "id", "foo", "bar"]),
        ("東京都に", ["東京", "京都", "都に"]),
        ("山", ["山"]),
        ("한국어를 공부", ["한국", "국어", "어를", "공부"]),
        ("\uff21\uff22\uff23 \uff11\uff12\uff13", ["abc", "123"]),
        ("我在Google工作", ["我在", "在g", "e工", "工作", "googl"]),
        ("9月3日の会議", ["9月", "月3", "3日", "日の", "の会", "会議", "9", "3"]),
        ("人々の村", ["人々", "々の", "の村"]),
        ("Die Straße, die STRASSE", ["die", "strass", "die", "strass"]),
        ("STRA\u1e9eE", ["strass"]),
        ("I \u2764 🎸 music", ["music", "\u2764", "🎸"]),
        ("🇩🇪🇫🇷 \u2b50", ["🇩🇪", "🇫🇷", "\u2b50"]),
        ("the and of", []),
        ("", []),
        ("a\0fish \ud800", ["fish"]),
    ],
)
def test_words_are_stemmed_without_stop_words(text: str, expected: list[str]) -> None:
    assert ENGLISH.stems(text) == expected


def unpack(packed: bytes) -> dict[int, int]:
    size = len(packed) // 5
    return dict(zip(struct.unpack(f"<{size}I", packed[: 4 * size]), packed[4 * size : 5 * size], strict=True))


def pack(text: str, context: str | None = None, labels: str = "") -> bytes:
    return ENGLISH.pack(IndexText(text, context, labels))


def test_context_weighs_less_and_only_fills_a_short_text() -> None:
    assert unpack(pack("fish", "fish bird")) == {term("fish"): 16, term("bird"): 6}
    long = "x" * (CHARACTERS_WITH_CONTEXT - 5)
    assert unpack(pack(long, "bird tree")).keys() & {*ENGLISH.query_terms("bird tree")} == {term("bird")}
    assert pack(long * 2, "bird") == pack(long * 2)
    assert pack("fish", "bird " * 100) == pack("fish"), "the beginning of a long context says little"


def test_labels_weigh_least() -> None:
    assert unpack(pack("blue", labels="favoriteColor room_4711")) == {
        term("blue"): 10,
        **{term(stem): 3 for stem in ("favorit", "color", "favoritecolor", "room", "4711")},
    }


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("Alice heard The Who", ["The Who", "Who did Alice hear? The Who?", "who"]),
        ("Will works in IT", ["IT", "Will", "who is Will"]),
        ("富士山に登る", ["山", "富士", "富士山"]),
        ("집에 있는 iPhone을 고쳤다", ["집", "iPhone"]),
        ("\uff46\uff55\uff4c\uff4c width", ["full", "\uff57\uff49\uff44\uff54\uff48"]),
        ("plays the 🎸", ["🎸"]),
        ("бабушка и созвоны", ["бабушками", "созвон", "созвонах"]),
    ],
)
def test_what_is_there_is_found(text: str, queries: list[str]) -> None:
    terms = unpack(pack(text)).keys()
    assert [query for query in queries if not terms & set(ENGLISH.query_terms(query))] == []
    assert not unpack(pack("the others and it will")).keys() & set(ENGLISH.query_terms(queries[0]))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("Has Tom a red hat?", ["tom", "red", "hat"]),
        ("Was hat Sabine?", ["sabin"]),
        ("¿Dónde está la gata?", ["gata"]),
        ("Где моя собака?", ["собак"]),
        ("¿Quién es?", ["quien", "es"]),
    ],
)
def test_a_query_has_no_words_that_say_nothing_in_its_language(query: str, words: list[str]) -> None:
    assert list(ENGLISH.query_terms(query)) == [term(word) for word in words]


def test_a_long_name_takes_no_longer_than_a_text_of_its_length() -> None:
    started = process_time()
    pack("", labels="favoriteColor " + "a" * 40_000)
    assert process_time() - started < 1  # quadratic time is many seconds


def test_a_count_stays_within_its_byte() -> None:
    assert unpack(pack("fish " * 100)) == {term("fish"): COUNT_MAX}


@given(st.text(), st.none() | st.text())
def test_any_text_can_be_packed(text: str, context: str | None) -> None:
    packed = pack(text, context)
    assert ENGLISH.has_packed(packed)
    assert not ENGLISH.has_packed(packed[:-4]), "of a version that named no analyzer"
    counts = unpack(packed)
    assert list(counts) == sorted(counts)
    assert set(map(term, ENGLISH.stems(text))) <= set(counts)


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_is_cut_as_the_tokenizer_of_sqlite_cuts_it(text: str) -> None:
    assert [*cut(text), "e"] == cut(f"{text} é"), "what is not ASCII goes to the tokenizer"


def test_words_are_the_same_after_very_many_others() -> None:
    before = pack("hiking at 4711")
    many = unpack(pack(" ".join(map(str, range(30_000)))))
    assert len(many) == 30_000
    assert pack("hiking at 4711") == before


def test_threads_cut_words_at_the_same_time() -> None:
    results: list[list[str]] = []
    text = "Caroline went to the support group. " * 50
    threads = [
        threading.Thread(target=lambda: results.extend(ENGLISH.stems(text) for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ENGLISH.stems(text)] * 200
