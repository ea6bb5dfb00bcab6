"""docs/reference/api.md names everything public, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import holdfast
import holdfast.langgraph
from holdfast.langgraph import Compacted, HoldfastSaver, Imported, import_langgraph

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def section(title: str) -> str:
    """The text under a second-level heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def documented(title: str) -> set[str]:
    """The first code word of each row of the section's tables, up to its arguments."""
    return set(re.findall(r"^\| `(\w+)", section(title), flags=re.MULTILINE))


def operations(handle: type) -> set[str]:
    """Public methods and properties; async twins are documented as a rule, not one by one."""
    names = {name for name in dir(handle) if not name.startswith("_")}
    return {name for name in names if not (name.startswith("a") and name[1:] in names)}


def test_every_public_name_is_on_the_page_and_no_other() -> None:
    words = set(re.findall(r"`(?:holdfast\.)?(\w+)", PAGE.read_text()))
    assert {*holdfast.__all__, *holdfast.langgraph.__all__} <= words
    assert set(re.findall(r"holdfast\.(\w+)", PAGE.read_text())) <= {*holdfast.__all__, "langgraph", "db"}


@pytest.mark.parametrize("handle", [holdfast.Store, holdfast.Thread])
def test_every_method_is_on_the_page_and_no_other(handle: type) -> None:
    assert documented(handle.__name__) == operations(handle)


@pytest.mark.parametrize("handle", [holdfast.Store, holdfast.Thread])
def test_every_parameter_is_on_the_page(handle: type) -> None:
    rows = dict(re.findall(r"^\| `(\w+)(.*)$", section(handle.__name__), flags=re.MULTILINE))
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name in rows:
            missing = [p for p in inspect.signature(method).parameters if p != "self" and p not in rows[name]]
            assert not missing, f"{name}: {missing}"


def test_the_saver_is_on_the_page_with_all_that_it_takes_and_has() -> None:
    arguments = set(inspect.signature(HoldfastSaver).parameters)
    contract = {name for name in dir(HoldfastSaver.__base__) if not name.startswith("_")}
    assert documented("HoldfastSaver") == arguments | (operations(HoldfastSaver) - contract)
    rows = dict(re.findall(r"^\| `(\w+)\((.*)$", section("HoldfastSaver"), flags=re.MULTILINE))
    for name, row in rows.items():
        taken = set(inspect.signature(getattr(HoldfastSaver, name)).parameters) - {"self"}
        assert not [one for one in taken if one not in row], name
    overridden = {name for name in vars(HoldfastSaver) if name in contract and f"a{name}" in vars(HoldfastSaver)}
    assert overridden <= set(re.findall(r"`(\w+)`", section("HoldfastSaver")))


def test_every_parameter_of_the_import_is_on_the_page() -> None:
    [row] = re.findall(r"^\| `import_langgraph.*$", section("Importing from LangGraph"), flags=re.MULTILINE)
    assert not [name for name in inspect.signature(import_langgraph).parameters if name not in row]


MODELS = [holdfast.ThreadInfo, holdfast.Change, holdfast.Problem, holdfast.Report, holdfast.Stats, Compacted, Imported]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_of_a_model_is_on_the_page(model: type) -> None:
    words = set(re.findall(r"`(\w+)`", section(model.__name__)))
    assert {field.name for field in dataclasses.fields(model)} <= words


def test_every_field_of_a_checkpoint_is_on_the_page() -> None:
    public = {name for name in dir(holdfast.Checkpoint) if not name.startswith("_")}
    assert documented("Checkpoint") == public


def test_every_error_is_on_the_page() -> None:
    errors = {
        name
        for name in holdfast.__all__
        if inspect.isclass(value := getattr(holdfast, name)) and issubclass(value, Exception)
    }
    assert documented("Errors") == errors
