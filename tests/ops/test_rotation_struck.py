"""A rotation that fails at any statement, or meets another one: the data stays readable, and its answer is true."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from keeping_kit import PLACES, Clock, Hook, opened, place, struck_everywhere

import perdure
from perdure.encryption import Keys, StaticKeys
from perdure.ops import keys as rotation

OLD, NEW, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
STATE = {"city": "Lisbon"}
_tenants = itertools.count()


def given(*keys: bytes) -> StaticKeys:
    """The first is the one in use."""
    return StaticKeys(list(keys))


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest) -> str:
    return place(request, request.param)


def test_struck_anywhere_the_old_key_or_the_new_one_opens_it_and_the_next_rotation_finishes(url: str) -> None:
    hook, clock = Hook(), Clock()
    with opened(url, clock, keys=given(OLD)) as plain, opened(url, clock, keys=given(NEW, OLD), hook=hook) as rotating:

        def scene() -> str:
            name = f"tenant {next(_tenants)}"
            plain.tenant(name).thread("t").save(STATE)
            return name

        def check(name: str, point: int) -> None:
            with opened(url, clock, keys=given(NEW, OLD)) as store:
                assert store.tenant(name).thread("t").load().state == STATE
                assert store.tenant(name).ops.rotate_keys().key == rotating.tenant(name).ops.list_keys()[0].id
            with opened(url, clock, keys=given(NEW)) as store:
                assert store.tenant(name).thread("t").load().state == STATE

        struck_everywhere(scene, lambda name: rotating.tenant(name).ops.rotate_keys(), hook, check)


def test_a_rotation_that_another_one_overtook_does_not_say_that_it_was_done(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped_anew = rotation._wrapped_anew
    with opened(url, Clock(), keys=given(OLD)) as store:
        store.thread("t").save(STATE)
    with opened(url, Clock(), keys=given(NEW, OLD)) as first, opened(url, Clock(), keys=given(OTHER, OLD)) as second:

        def overtaken(tenant: int, name: str, keys: Keys, key: bytes, wrapped: bytes) -> Any:
            monkeypatch.setattr(rotation, "_wrapped_anew", wrapped_anew)
            first.ops.rotate_keys()
            return wrapped_anew(tenant, name, keys, key, wrapped)

        monkeypatch.setattr(rotation, "_wrapped_anew", overtaken)
        with pytest.raises(perdure.errors.KeyMissing):
            second.ops.rotate_keys()
        assert first.thread("t").load().state == STATE
