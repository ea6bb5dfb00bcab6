"""What a call passed is bound, hashed and restored the same way, however it was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure.errors import Unstorable, UsageError
from perdure.runs.functions.inputs import DIGEST_BYTES, Binder, annotations_of, digest, is_key
from perdure.runs.functions.keys import IdempotencyKey
from perdure.values.codec import Codec, decode

if TYPE_CHECKING:
    from nowhere import OnlyForCheckers  # type: ignore[import-not-found]

CODEC = Codec()


def plain(a: Any, b: Any = 2, *, c: Any = 3) -> dict[str, Any]:
    return locals()


def strict(a: Any, b: Any, *, c: Any) -> dict[str, Any]:
    return locals()


def only_position(a: Any, b: Any = 2, /, c: Any = 3) -> dict[str, Any]:
    return locals()


def rest(a: Any, b: Any = 2, *rest: Any, c: Any = 3) -> dict[str, Any]:
    return locals()


def everything(a: Any, /, b: Any = 2, *rest: Any, c: Any, d: Any = 4, **more: Any) -> dict[str, Any]:
    return locals()


def nothing() -> dict[str, Any]:
    return locals()


def book(flight: str, seats: int = 1, *, key: IdempotencyKey) -> str:
    return f"{flight} {seats} {key}"


def book_last(flight: str, key: IdempotencyKey) -> str:
    return f"{flight} {key}"


FUNCTIONS = [plain, strict, only_position, rest, everything, nothing]


def arguments(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return Binder(fn).bind(args, kwargs)


def refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except TypeError:
        return True
    return False


# ---- binding


def test_positional_arguments_have_the_names_of_their_parameters() -> None:
    assert arguments(plain, 1, 5) == {"a": 1, "b": 5}


def test_defaults_that_were_not_passed_are_no_input() -> None:
    assert arguments(plain, 1) == {"a": 1}
    assert arguments(plain, 1, c=3) == {"a": 1, "c": 3}


@pytest.mark.parametrize("call", [((1, 2), {"c": 3}), ((1,), {"c": 3, "b": 2}), ((), {"c": 3, "b": 2, "a": 1})])
def test_however_a_call_is_written_its_text_is_the_same(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    binder = Binder(plain)
    assert binder.text(*call, CODEC) == b'{"a":1,"b":2,"c":3}'


def test_more_positional_arguments_are_a_list_and_more_keywords_are_merged_by_name() -> None:
    found = arguments(everything, 1, 2, 3, 4, z=0, y=1, c=5)
    assert found == {"a": 1, "b": 2, "rest": [3, 4], "c": 5, "y": 1, "z": 0}
    assert list(found) == ["a", "b", "rest", "c", "y", "z"]


def test_an_ignored_argument_is_no_input_whether_it_is_passed_or_not() -> None:
    binder = Binder(plain, ignore=("b",))
    assert binder.bind((1, object()), {}) == binder.bind((1,), {}) == {"a": 1}
    assert binder.bind((1,), {"b": object()}) == {"a": 1}


def test_all_of_args_and_kwargs_can_be_ignored() -> None:
    binder = Binder(everything, ignore=("rest", "more"))
    assert binder.bind((1, 2, 3), {"c": 4, "x": 5}) == {"a": 1, "b": 2, "c": 4}
    assert Binder(everything, ignore=("x",)).bind((1,), {"c": 4, "x": 5}) == {"a": 1, "c": 4}


@pytest.mark.parametrize("ignore", [("client",), "a"])
def test_ignoring_what_is_not_there_is_refused_at_once(ignore: Any) -> None:
    with pytest.raises(UsageError, match="ignore"):
        Binder(plain, ignore=ignore)


def test_a_name_that_would_stand_for_two_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match="'rest'"):
        arguments(everything, 1, 2, 3, c=4, rest=5)
    with pytest.raises(UsageError, match="'a'"):
        arguments(everything, 1, c=4, a=5)


def test_a_wrapped_function_is_bound_by_the_signature_that_it_shows() -> None:
    @wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    assert arguments(wrapper, 1, 2) == {"a": 1, "b": 2}


def test_a_partial_function_is_bound_by_what_it_still_takes() -> None:
    assert arguments(partial(plain, 1), 5) == {"b": 5}


def test_a_function_without_a_signature_is_refused() -> None:
    with pytest.raises(UsageError, match="wrap it"):
        Binder(dict.update)


@pytest.mark.parametrize("fn", FUNCTIONS)
@given(
    args=st.lists(st.integers(), max_size=5),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "x"]), st.integers(), max_size=4),
)
def test_what_python_refuses_is_refused_and_the_rest_is_restored(
    fn: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    """Binding agrees with calling, and what was bound, stored and restored calls the function with the same."""
    binder = Binder(fn)
    expected = refuses(lambda: fn(*args, **kwargs))
    if fn is everything and not expected and "a" in kwargs:
        return  # everything(1, a=2, c=3) is a call, and cannot be recorded
    assert refuses(lambda: binder.bind(tuple(args), kwargs)) == expected
    if expected:
        return
    bound = binder.bind(tuple(args), kwargs)
    stored = decode(binder.text(tuple(args), kwargs, CODEC), CODEC)
    assert stored == bound
    again_args, again_kwargs = binder.restore(stored)
    assert fn(*again_args, **again_kwargs) == fn(*args, **kwargs)
    again = binder.bind(again_args, again_kwargs)
    # What a position needed in between is passed now though it was a default before.
    assert bound.items() <= again.items()


# ---- methods


class Agent:
    def search(self, text: str) -> str:
        return text

    @classmethod
    def make(cls, text: str) -> str:
        return text


def test_self_is_no_input() -> None:
    assert arguments(Agent.search, Agent(), "x") == {"text": "x"}
    assert arguments(Agent.search, Agent(), text="x") == {"text": "x"}
    assert arguments(Agent.make.__func__, Agent, "x") == {"text": "x"}  # type: ignore[attr-defined]


def test_a_function_outside_of_a_class_may_have_an_argument_called_self() -> None:
    def function(self: Any) -> None: ...

    assert arguments(function, 1) == {"self": 1}


def test_a_method_of_a_local_class_is_a_method() -> None:
    class Local:
        def method(self, x: int) -> None: ...

    assert arguments(Local.method, Local(), 1) == {"x": 1}


def test_restoring_leaves_self_to_the_caller() -> None:
    binder = Binder(Agent.search)
    args, kwargs = binder.restore({"self": "agent-1", "text": "x"})
    assert Agent().search(*args, **kwargs) == "x"


# ---- the key


def test_the_key_is_filled_in_and_is_no_input() -> None:
    for fn in (book, book_last):
        binder = Binder(fn)
        bound = binder.bind(("LH1",), {})
        assert bound == {"flight": "LH1"}
        args, kwargs = binder.call_with(("LH1",), {}, IdempotencyKey("k"))
        assert fn(*args, **kwargs).endswith(" k")


def test_a_key_that_the_caller_gives_is_used_and_is_no_input() -> None:
    binder = Binder(book_last)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(("LH1", "mine"), {}), (("LH1",), {"key": "mine"})]
    for args, kwargs in calls:
        bound = binder.bind(args, kwargs)
        assert bound == {"flight": "LH1"}
        called_args, called_kwargs = binder.call_with(args, kwargs, "k")
        assert book_last(*called_args, **called_kwargs) == "LH1 mine"


def test_none_is_not_a_key() -> None:
    binder = Binder(book_last)
    assert binder.call_with(("LH1", None), {}, "k") == (("LH1", "k"), {})
    assert binder.call_with(("LH1",), {"key": None}, "k") == (("LH1",), {"key": "k"})


def test_the_callers_keywords_are_not_changed() -> None:
    kwargs: dict[str, Any] = {}
    Binder(book).call_with(("LH1",), kwargs, "k")
    assert kwargs == {}


def test_a_function_without_a_key_is_called_as_it_was() -> None:
    args, kwargs = (1,), {"b": 2}
    assert Binder(plain).call_with(args, kwargs, "k") == (args, kwargs)
    assert Binder(plain).plan.key is None


def test_a_missing_argument_is_named_and_a_missing_key_is_not() -> None:
    with pytest.raises(TypeError, match=r"^book\(\): missing a required argument: 'flight'$"):
        Binder(book).bind((), {})
    with pytest.raises(TypeError, match=r"^book_last\(\): missing a required argument: 'flight'$"):
        Binder(book_last).bind((), {})


def unresolvable(a: OnlyForCheckers, b: int, key: perdure.IdempotencyKey | None = None) -> None: ...
def text_only(a: OnlyForCheckers, key: OnlyForCheckers | IdempotencyKey) -> None: ...
def optional(key: Optional[perdure.IdempotencyKey] = None) -> None: ...  # noqa: UP045
def annotated(key: Annotated[IdempotencyKey, "what the airline knows it by"]) -> None: ...
def not_one(key: str, other: SimpleNamespace) -> None: ...


@pytest.mark.parametrize("fn", [unresolvable, text_only, optional, annotated])
def test_the_key_is_found_in_every_way_of_writing_it(fn: Callable[..., Any]) -> None:
    assert Binder(fn).plan.key == "key"


def test_a_parameter_called_key_is_not_the_key_by_its_name() -> None:
    assert Binder(not_one).plan.key is None


def test_one_unknown_name_spoils_no_other_annotation() -> None:
    assert annotations_of(unresolvable) == {"a": "OnlyForCheckers", "b": int, "key": Optional[IdempotencyKey]}  # noqa: UP045


@pytest.mark.parametrize(
    "text",
    [
        "IdempotencyKey",
        "perdure.IdempotencyKey",
        "IdempotencyKey | None",
        "Optional[IdempotencyKey]",
        "None|perdure.IdempotencyKey",
    ],
)
def test_the_key_is_known_by_its_text(text: str) -> None:
    assert is_key(text)


@pytest.mark.parametrize("text", ["Keys", "list[IdempotencyKey]", "crypto.Key", "str", ""])
def test_other_texts_are_not_the_key(text: str) -> None:
    assert not is_key(text)


def two_keys(key: IdempotencyKey, other: IdempotencyKey) -> None: ...
def by_position(key: IdempotencyKey, /) -> None: ...
def before_rest(key: IdempotencyKey, *rest: int) -> None: ...


@pytest.mark.parametrize("fn", [two_keys, by_position, before_rest])
def test_a_key_that_cannot_be_filled_in_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="key"):
        Binder(fn).bind((), {})


# ---- text and digest


def test_an_unstorable_argument_is_named_with_its_step_and_its_path() -> None:
    binder = Binder(book)
    with pytest.raises(Unstorable) as refused:
        binder.text(({"y": 1, "x": object()},), {}, CODEC)
    assert refused.value.path == 'book(flight=…)["x"]'
    assert str(refused.value).startswith('book(flight=…)["x"] cannot be saved: ')
    assert "state" not in str(refused.value).split("cannot be saved")[0]


def test_a_client_as_an_argument_is_answered_with_how_to_leave_it_out() -> None:
    binder = Binder(plain, name="search")
    with pytest.raises(Unstorable, match=r'^search\(b=…\) cannot be saved: .*ignore=\("b",\)$') as refused:
        binder.text((1, lambda: None), {}, CODEC)
    assert refused.value.path == "search(b=…)"


def test_an_unstorable_one_of_many_is_named_by_its_position() -> None:
    binder = Binder(rest)
    with pytest.raises(Unstorable) as refused:
        binder.text((1, 2, 3, object()), {}, CODEC)
    assert refused.value.path == "rest(rest=…)[1]"


def test_equal_dicts_in_another_order_are_another_input() -> None:
    binder = Binder(plain)
    texts = {binder.text((value,), {}, CODEC) for value in ({"x": 1, "y": 2}, {"y": 2, "x": 1})}
    assert len(texts) == 2


def test_values_that_are_equal_to_python_and_of_other_types_are_other_inputs() -> None:
    binder = Binder(plain)
    values: list[Any] = [1, True, 1.0, "1", (1,), [1], b"1"]
    assert len({digest(binder.text((value,), {}, CODEC)) for value in values}) == len(values)


def test_a_digest_is_eight_bytes_that_never_change() -> None:
    assert len(digest(b"")) == DIGEST_BYTES == 8
    assert digest(b'{"a":1}').hex() == "d59b6562d7c9b121"


def test_restoring_fails_when_what_a_position_needs_was_ignored() -> None:
    binder = Binder(rest, ignore=("a",))
    stored = binder.bind((object(), 2, 3), {})
    with pytest.raises(UsageError, match="'a' was not recorded"):
        binder.restore(stored)


def test_binding_two_arguments_takes_a_few_microseconds() -> None:
    """The best of many, far above what is measured, so that a busy machine does not fail it."""
    binder = Binder(book_last)
    binder.bind(("a", "b"), {})
    best = min(_timed(binder) for _ in range(20))
    assert best < 25e-6


def _timed(binder: Binder) -> float:
    start = time.perf_counter()
    for _ in range(100):
        binder.bind(("a", "b"), {})
    return (time.perf_counter() - start) / 100
