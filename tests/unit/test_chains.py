"""Chains of links: what is read is what was saved, changed bytes are noticed, and a chain is never long."""

from __future__ import annotations

import random

import msgspec
import pytest

from perdure.errors import Damaged, Undecodable
from perdure.log.cache import Base
from perdure.log.chains import LINKS_MAX, ChainLink, extend, pack, read_tip, unpack, walk


def states(count: int) -> list[bytes]:
    chance = random.Random(7)
    words = [f"word{number}" for number in range(300)]
    lines = [" ".join(chance.choices(words, k=40)) for _ in range(count)]
    return [("[" + ",".join(lines[: number + 1]) + "]").encode() for number in range(count)]


def links_of(texts: list[bytes], *, anew: int = 0) -> list[ChainLink]:
    """The links of texts. `anew`: how often another writer, who has only read the chain, goes on."""
    links: list[ChainLink] = []
    tip: Base | None = None
    for number, text in enumerate(texts):
        if anew and number % anew == 0 and links:
            tip = read_tip(chain_of(links, links[-1]))
        link, tip = extend(tip, text, f"label {number}", number, 1000 + number, bytes([number % 256]) * 16)
        links.append(unpack(pack(link)))
    return links


def chain_of(links: list[ChainLink], last: ChainLink) -> list[ChainLink]:
    return links[last.key : last.number + 1]


@pytest.mark.parametrize("anew", [0, 1, 5])
def test_every_state_is_read_as_it_was_saved_whoever_wrote_it(anew: int) -> None:
    texts = states(100)
    links = links_of(texts, anew=anew)
    for link, text in zip(links, texts, strict=True):
        assert read_tip(chain_of(links, link)).data == text
    assert [text for _, text in walk(chain_of(links, links[63]))] == texts[links[63].key : 64]
    assert max(link.number - link.key for link in links) == LINKS_MAX - 1
    assert sum(len(pack(link)) for link in links) < sum(map(len, texts)) / 20


def test_a_changed_link_is_noticed() -> None:
    links = links_of(states(6))
    chain_of(links, links[5])
    changes: list[tuple[int, dict[str, object]]] = [
        (5, {"label": "label 4"}),
        (5, {"at": 0}),
        (5, {"salt": bytes(16)}),
        (5, {"body": links[4].body}),
        (0, {"body": links[0].body[:-1]}),
        (4, {"hash": bytes(32)}),
        (4, {"number": 7}),
        (3, {"key": 3}),
    ]
    for position, change in changes:
        changed = list(links)
        changed[position] = msgspec.structs.replace(links[position], **change)
        with pytest.raises(Damaged, match="is damaged"):
            read_tip(changed)
    with pytest.raises(Damaged):
        list(walk(links[:2] + links[3:]))
    with pytest.raises(Undecodable, match="malformed"):
        unpack(pack(links[0])[:-1])
