"""Facts that change: what a model answers about known facts, and facts that say the same without a model.

A fact is an item. A change adds it, updates it, ends it because another one supersedes it, or forgets it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args

from msgspec.structs import replace

from perdure.errors import ExtraMissing, UsageError
from perdure.memory import flows, rows
from perdure.memory.labels import check_key
from perdure.memory.languages import NEGATION, NEGATIONS
from perdure.memory.models import Item
from perdure.memory.reading import ItemReader
from perdure.memory.rows import DELETED, ItemQuery, NewVersion
from perdure.memory.scopes import searcher_of
from perdure.memory.search import search
from perdure.memory.words import Analyzer
from perdure.storage.program import Flow
from perdure.threads.context import StoreContext

Duplicates = Literal["merge", "link", "keep"]
KNOWN_MAX: Final = 20  # facts that `extract` gets
SAME_COSINE: Final = 0.95
_NEAR_MAX: Final = 5
_WORDS_MIN: Final = 3
_WORD: Final = re.compile(r"[^\W\d_]+")
_NUMBER: Final = re.compile(r"\w*\d\w*")
_FIELDS: Final = frozenset(("do", "key", "value", "supersedes", "valid_from", "valid_to"))


class FactChange(NamedTuple):
    """A change of a fact. A value of None forgets it. `supersedes` is the key of a fact that holds no longer."""

    key: str
    value: Any
    supersedes: str | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None


def check_duplicates(duplicates: object) -> None:
    """Raise UsageError unless this is a policy for facts that say the same."""
    if duplicates not in get_args(Duplicates):
        raise UsageError(f"duplicates={duplicates!r}: {', '.join(get_args(Duplicates))}")


def changes_of(answer: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, FactChange]:
    """Return the changes in an answer of `extract`, by key: facts by key, or a list of changes. Raises UsageError."""
    if answer is None:
        return {}
    if isinstance(answer, Mapping):
        return {key: FactChange(key, value) for key, value in answer.items()}
    changes = [_change_of(one) for one in answer]
    return {change.key: change for change in changes if change is not None}


def _change_of(said: Any) -> FactChange | None:
    if isinstance(said, FactChange):
        return said
    if not isinstance(said, Mapping) or not said.keys() <= _FIELDS:
        raise UsageError(f"extract() returns changes with the fields {', '.join(sorted(_FIELDS))}, not {said!r:.200}")
    do, key, value = said.get("do"), said.get("key"), said.get("value")
    if do == "nothing":
        return None
    if do not in ("add", "update", "supersede", "forget") or not isinstance(key, str):
        raise UsageError(f'a change has "do" (add, update, supersede, forget, nothing) and "key": {said!r:.200}')
    if (do == "forget") != (value is None) or (do == "supersede") != isinstance(said.get("supersedes"), str):
        raise UsageError(f'only "forget" has no "value", and only "supersede" has "supersedes": {said!r:.200}')
    supersedes = None if said.get("supersedes") == key else said.get("supersedes")
    return FactChange(key, value, supersedes, *(_time(said.get(name)) for name in ("valid_from", "valid_to")))


def _time(said: Any) -> datetime | None:
    if said is None or isinstance(said, datetime):
        return said
    try:
        return datetime.fromisoformat(said)
    except (TypeError, ValueError):
        raise UsageError(f"valid_from and valid_to are ISO dates, not {said!r:.60}") from None


def nearest(
    ctx: StoreContext,
    path: str,
    text: str,
    limit: int = KNOWN_MAX,
    *,
    relevant: bool = False,
    by_meaning: bool = False,
) -> Flow[NearFacts]:
    """Return the facts of a namespace that hold now and are nearest to a text, each with its cosine.

    Without the extra `search` the newest are returned. A ranking's cosine leaves out what the whole namespace shares;
    that of `by_meaning` compares the two texts alone.
    """
    now = ctx.clock_us()
    scope, reader = ItemQuery(path, now, valid_at=now), ItemReader(ctx.codec)
    try:
        hits = yield from search(
            ctx, scope, text, 0, limit, relevant, lambda row: row.path == path and reader(row), by_meaning
        )
    except ExtraMissing:
        listed = yield from flows.listing(ctx, scope, limit, 0, lambda row: row.path == path and reader(row))
        return NearFacts(reader.items(listed), [None] * len(listed))
    return NearFacts(reader.items(row for row, _ in hits), [hit.cosine for _, hit in hits])


def known_facts(ctx: StoreContext, path: str, text: str) -> Flow[dict[str, Any]]:
    """Return up to KNOWN_MAX facts by key: the nearest to a text, then the newest.

    "I moved to Oslo" has no word of "The user lives in Graz".
    """
    near = yield from nearest(ctx, path, text)
    now, reader = ctx.clock_us(), ItemReader(ctx.codec)
    scope = ItemQuery(path, now, valid_at=now)
    newest = yield from flows.listing(ctx, scope, KNOWN_MAX, 0, lambda row: row.path == path and reader(row))
    facts = {item.key: item.value for item in [*near.items, *reader.items(newest)]}
    return dict([*facts.items()][:KNOWN_MAX])


class NearFacts(NamedTuple):
    """Facts near a text, with their cosines. A cosine is None without an embedder."""

    items: list[Item]
    cosines: list[float | None]


def sentence(value: Any) -> str:
    """Return the text of a value of the form {"fact": …}, or "". Other values mean something with their key alone."""
    is_fact = isinstance(value, Mapping) and value.keys() == {"fact"} and isinstance(value["fact"], str)
    return value["fact"] if is_fact else ""


def same_fact(ctx: StoreContext, path: str, value: Any) -> Flow[Item | None]:
    """Return a known sentence that says what a new one says, or None.

    It has the same words, or a cosine of SAME_COSINE. A long sentence has that too if one word differs, and both have
    it if they name the same people in other roles. So sentences that differ in what `_fixed` returns are never the
    same, nor those alike in meaning alone of which one begins with a word that the other lacks: it may be a name. Nor
    are those of fewer than three words, which mean something with their key alone.
    """
    words = searcher_of(ctx).words
    sought, fixed = frozenset(words.stems(sentence(value))), _fixed(sentence(value), words)
    if len(sought) < _WORDS_MIN:
        return None
    for by_meaning in (True, False):  # an item without a vector is found by its words alone
        near = yield from nearest(ctx, path, sentence(value), _NEAR_MAX, by_meaning=by_meaning)
        for item, cosine in zip(near.items, near.cosines, strict=True):
            known = frozenset(words.stems(sentence(item.value)))
            begin_alike = _first(sentence(value), words) <= known and _first(sentence(item.value), words) <= sought
            says_same = known == sought or (by_meaning and (cosine or 0) >= SAME_COSINE and begin_alike)
            if len(known) >= _WORDS_MIN and fixed == _fixed(sentence(item.value), words) and says_same:
                return item
    return None


def _fixed(text: str, analyzer: Analyzer) -> tuple[list[str], list[str], list[str]]:
    """Return what must not differ in texts that say the same: negations, numbers, and names in their order.

    A capitalised word may be a name, unless it is the first.
    """
    words = _WORD.findall(text)
    negations = [word for word in map(str.casefold, words) if word in NEGATIONS]
    names = analyzer.stems(" ".join(word for word in words[1:] if word[0].isupper()))
    return sorted([*negations, *NEGATION.findall(text)]), sorted(_NUMBER.findall(text)), names


def _first(text: str, analyzer: Analyzer) -> frozenset[str]:
    """Return the stem of a capitalised first word, which may be a name; nothing of a stop word."""
    word = _WORD.search(text)
    return frozenset(analyzer.stems(word[0]) if word is not None and word[0][0].isupper() else ())


def versions_of(
    ctx: StoreContext, path: str, changes: Mapping[str, FactChange], duplicates: Duplicates
) -> Flow[list[NewVersion]]:
    """Return the versions that make changes. A pinned fact stays pinned.

    A new fact that says what a known one says is merged: it becomes a version of that one. With "link", it supersedes
    that one. With "keep", both stay.
    """
    now = ctx.clock_us()
    names = [*changes, *(change.supersedes for change in changes.values() if change.supersedes is not None)]
    stored = yield from flows.query(ctx, rows.read_keys, [(path, check_key(name)) for name in names], now)
    there = dict(zip(names, stored, strict=True))
    ended: list[NewVersion] = []
    puts: list[NewVersion] = []
    gone: list[NewVersion] = []
    for key, change in changes.items():
        if change.value is None:
            gone.append(NewVersion(check_key(key), gone=DELETED))
            continue
        options = {"valid_from": change.valid_from, "valid_to": change.valid_to}
        version = flows.new_version(ctx, now, key, change.value, **options)
        old, supersedes = there[key], change.supersedes
        if old is None and supersedes is None and duplicates != "keep":
            same = yield from same_fact(ctx, path, change.value)
            if same is not None and same.key not in changes:
                if duplicates == "merge":
                    puts.append(replace(version, key=check_key(same.key), pinned=same.pinned))
                    continue
                ended.append(_ending(same.key, version, now))
        if supersedes is not None and there[supersedes] is not None:
            ended.append(_ending(supersedes, version, now))
        puts.append(replace(version, pinned=old is not None and bool(old.pinned)))
    return [*ended, *(yield from flows.with_vectors(ctx, puts)), *gone]


def _ending(key: str, by: NewVersion, now: int) -> NewVersion:
    """Return the version that ends a fact when the one that supersedes it begins."""
    return NewVersion(check_key(key), closes_at=now if by.valid_from is None else by.valid_from)
