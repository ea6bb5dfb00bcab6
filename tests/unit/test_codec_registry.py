"""Only registered or trusted data classes are saved and rebuilt, and none of their code runs for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from perdure.errors import Undecodable, UnknownType, Unstorable, UsageError
from perdure.values.codec import Codec, decode, encode
from perdure.values.registry import Registry, register

MODULE = """
import os
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from subprocess import CompletedProcess

RAN = []

@dataclass
class Plan:
    title: str
    class Inner:
        pass
    @dataclass
    class Step:
        n: int
    def __post_init__(self):
        RAN.append(self)

class Kind(Enum):
    A = 1

class NotData:
    def __init__(self, *args):
        RAN.append(args)

def function(*args):
    RAN.append(args)
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("trustedapp", "trustedapplication"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(MODULE)
        (package / "models.py").write_text(MODULE)
        (package / "broken.py").write_text("raise RuntimeError('broken on import')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("trustedapp")]:
        monkeypatch.delitem(sys.modules, name)
    return "trustedapp"


def loaded(name: str) -> Any:
    return sys.modules[name]


def text_of(name: str, fields: str = '{"title":"t"}', version: int = 1) -> bytes:
    return b'{"^obj":["%s",%d,%s]}' % (name.encode(), version, fields.encode())


@pytest.mark.parametrize("prefix", ["trustedapp.", "trustedapp", "trustedapp.models", "trustedapp.models."])
def test_a_trusted_class_is_imported_and_rebuilt_without_running_its_code(app: str, prefix: str) -> None:
    plan = decode(text_of("trustedapp.models.Plan"), Codec([prefix]))
    module = loaded("trustedapp.models")
    assert type(plan) is module.Plan
    assert plan.title == "t"
    assert module.RAN == []
    assert decode(encode(plan, Codec([prefix])), Codec([prefix])) == plan
    step = module.Plan.Step(3)
    assert decode(encode(step, Codec([prefix])), Codec([prefix])) == step


def test_a_prefix_covers_its_own_module_and_no_longer_name(app: str) -> None:
    codec = Codec(["trustedapp."])
    assert decode(text_of("trustedapp.Plan"), codec).title == "t"
    with pytest.raises(UnknownType, match="trustedapplication"):
        decode(text_of("trustedapplication.Plan"), codec)
    assert "trustedapplication" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        "NotData",
        "function",
        "os.system",
        "os",
        "Fraction",
        "CompletedProcess",
        "Plan.Inner",
        "Plan.__init__",
        "missing",
        "Plan.Step.__class__",
        "models",
        "RAN",
        "RAN.append",
        "",
        ".Plan",
        "models..Plan",
        "__builtins__",
        "broken.Plan",
    ],
)
def test_under_a_trusted_prefix_only_data_classes_defined_there_are_rebuilt(app: str, name: str) -> None:
    for prefix in ("trustedapp.", "trustedapp.models."):
        with pytest.raises(UnknownType):
            decode(text_of(prefix + name), Codec([prefix]))
    assert getattr(sys.modules.get("trustedapp"), "RAN", []) == []


def test_an_untrusted_module_is_never_imported(app: str) -> None:
    with pytest.raises(UnknownType) as caught:
        decode(text_of("trustedapp.models.Plan"), Codec())
    assert caught.value.type_name == "trustedapp.models.Plan"
    assert 'trust=["trustedapp."]' in str(caught.value)
    assert "@perdure.register" in str(caught.value)
    assert "trustedapp" not in sys.modules


def test_messages_of_langchain_are_trusted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("langchain_core", "langchain_core.messages", "langchain_core.messages.human"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["langchain_core.messages.human"]

    class HumanMessage(BaseModel):
        content: str
        id: str | None = None

    HumanMessage.__module__ = module.__name__
    HumanMessage.__qualname__ = "HumanMessage"
    vars(module)["HumanMessage"] = HumanMessage
    message = HumanMessage(content="hello")
    back = decode(encode({"messages": [message]}, Codec()), Codec())["messages"][0]
    assert type(back) is HumanMessage
    assert back == message
    assert back.model_fields_set == {"content"}


def fresh(version: int = 1, upgrade: Any = None, **types: Any) -> tuple[type, Codec]:
    cls = make_dataclass("Plan", [(k, v) if not isinstance(v, tuple) else (k, *v) for k, v in types.items()])
    registry = Registry()
    registry.add(cls, name="app.Plan", version=version, upgrade=upgrade)
    return cls, Codec(registry=registry)


def test_upgrades_are_applied_in_order_and_get_plain_fields() -> None:
    cls, codec = fresh(
        3,
        {1: lambda old: {"titles": [old["title"]]}, 2: lambda old: {"names": tuple(old["titles"])}},
        names=tuple[str, ...],
    )
    for version, fields in ((1, '{"title":"t"}'), (2, '{"titles":["t"]}'), (3, '{"names":{"^tuple":["t"]}}')):
        assert decode(text_of("app.Plan", fields, version), codec) == cls(("t",))


def test_a_newer_version_or_a_missing_or_failing_upgrade_is_a_clear_error() -> None:
    _, codec = fresh(3, {2: lambda old: old["nothing"]}, title=str)
    with pytest.raises(UnknownType, match="newer code"):
        decode(text_of("app.Plan", version=4), codec)
    with pytest.raises(UnknownType, match="no upgrade from version 1 to 2"):
        decode(text_of("app.Plan", version=1), codec)
    with pytest.raises(Undecodable, match="from version 2 to 3 failed"):
        decode(text_of("app.Plan", version=2), codec)
    assert decode(text_of("app.Plan", version=4), codec, raw=True)["<version>"] == 4


def test_new_fields_take_their_defaults_and_lost_ones_say_what_to_do() -> None:
    cls, codec = fresh(title=str, tags=(list[str], field(default_factory=list)), size=(int, 3))
    first, second = (decode(text_of("app.Plan"), codec) for _ in range(2))
    assert first == cls("t", [], 3)
    assert first.tags is not second.tags
    with pytest.raises(Undecodable, match=r"'gone', which the class no longer has; .*upgrade"):
        decode(text_of("app.Plan", '{"title":"t","gone":1}'), codec)
    with pytest.raises(Undecodable, match="lacks the field 'title'"):
        decode(text_of("app.Plan", "{}"), codec)


def test_one_name_belongs_to_one_class_but_a_reload_is_fine() -> None:
    registry = Registry()
    old = make_dataclass("Plan", ["title"])
    new = make_dataclass("Plan", ["title"])
    registry.add(old, name="app.Plan")
    registry.add(new, name="app.Plan")
    codec = Codec(registry=registry)
    assert type(decode(encode(old("t"), codec), codec)) is new
    with pytest.raises(UsageError, match=r"'app\.Plan' is registered for"):
        registry.add(make_dataclass("Other", ["title"]), name="app.Plan")


def test_a_class_registered_later_is_known_to_a_codec_made_before() -> None:
    registry = Registry()
    codec = Codec(registry=registry)
    cls = make_dataclass("Late", ["title"])
    with pytest.raises(Unstorable):
        encode(cls("t"), codec)
    registry.add(cls, name="app.Late")
    assert decode(encode(cls("t"), codec), codec) == cls("t")


class Opaque:
    def __init__(self, secret: int) -> None:
        self.secret = secret


def test_a_class_that_is_no_data_class_is_kept_by_its_two_functions() -> None:
    registry = Registry()
    registry.add(Opaque, name="app.Opaque", dump=lambda value: (value.secret,), load=lambda body: Opaque(*body))
    codec = Codec(registry=registry)
    assert decode(encode([Opaque(5)], codec), codec)[0].secret == 5
    assert decode(encode(Opaque(5), codec), codec, raw=True) == {"<type>": "app.Opaque", "<value>": (5,)}
    with pytest.raises(Undecodable):
        decode(text_of("app.Opaque", "[1,2,3]"), codec)


@dataclass
class Title:
    text: str


class Size(Enum):
    BIG = 1


def test_classes_of_another_package_lose_fields_that_it_no_longer_has_and_enums_stay() -> None:
    registry = Registry()
    registry.add(Size, name="Size", foreign=True)
    registry.add(Title, name="Title", foreign=True)
    codec = Codec(registry=registry)
    assert decode(encode(Size.BIG, codec), codec) is Size.BIG
    assert decode(text_of("Title", '{"text":"t","gone":1}'), codec) == Title("t")


def test_every_form_of_register_works() -> None:
    @register
    @dataclass
    class One:
        a: int = 1

    @register("test.Two", version=2)
    @dataclass
    class Two:
        a: int = 1

    @register(version=2)
    @dataclass
    class Three:
        a: int = 1

    @dataclass
    class Four:
        a: int = 1

    assert register(Four, name="test.Four") is Four
    for cls in (One, Two, Three, Four):
        assert decode(encode(cls(2), Codec()), Codec()) == cls(2)
    assert encode(Two(), Codec()) == b'{"^obj":["test.Two",2,{"a":1}]}'
    assert b'"test.Four"' in encode(Four(), Codec())


class Empty(Enum):
    pass


@pytest.mark.parametrize(
    "call",
    [
        lambda: register(Opaque),
        lambda: register(Opaque, dump=str),
        lambda: register(int),
        lambda: register(3),  # type: ignore[call-overload]
        lambda: register(Empty),
        lambda: register(make_dataclass("P", []), version=0),
        lambda: register(make_dataclass("P", []), name=""),
        lambda: register(make_dataclass("P", []), version=2, upgrade={2: len}),
        lambda: register("x")(len),  # type: ignore[type-var]
        lambda: Codec("myapp."),
        lambda: Codec([""]),
        lambda: Codec(["."]),
        lambda: Codec(["my-app"]),
    ],
)
def test_calls_that_cannot_be_right_are_refused(call: Any) -> None:
    with pytest.raises(UsageError):
        call()


def test_raw_form_is_readable_and_needs_no_class() -> None:
    text = (
        b'{"p":{"^obj":["gone.Plan",1,{"title":"t","steps":{"^tuple":[1]}}]},'
        b'"s":{"^set":[{"^obj":["gone.Color",1,{"name":"RED"}]}]},'
        b'"d":{"^dict":[[{"^obj":["gone.Color",1,{"name":"RED"}]},1]]}}'
    )
    red = {"<type>": "gone.Color", "name": "RED"}
    assert decode(text, Codec(), raw=True) == {
        "p": {"<type>": "gone.Plan", "title": "t", "steps": (1,)},
        "s": {"<type>": "set", "items": [red]},
        "d": {"<type>": "dict", "items": [[red, 1]]},
    }
    with pytest.raises(UnknownType):
        decode(text, Codec())


def test_the_codec_imports_neither_numpy_nor_pydantic() -> None:
    code = "import perdure.values.codec; assert not {'numpy', 'pydantic'} & set(sys.modules)"
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"], check=True)
