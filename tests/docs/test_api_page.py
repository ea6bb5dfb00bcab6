"""docs/reference/api.md names everything public, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, get_overloads

import pytest

import holdfast
import holdfast.langgraph
from holdfast.langgraph import Compacted, HoldfastSaver, Imported, import_langgraph
from holdfast.runs.calls import decorators
from holdfast.runs.calls.asking import Given
from holdfast.runs.calls.calls import Budget
from holdfast.runs.journal.rows import STATUSES
from holdfast.testing import drill

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


def rows_of(text: str) -> dict[str, list[str]]:
    """By name: what the rows of the tables say after it, up to the end of the line."""
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(r"^\| `@?(\w+)(.*)$", text, flags=re.MULTILINE):
        found.setdefault(name, []).append(rest)
    return found


def missing(function: Callable[..., Any], row: str) -> list[str]:
    """Parameters that a row does not name as words of their own."""
    words = set(re.findall(r"\w+", row))
    return [name for name in inspect.signature(function).parameters if name != "self" and name not in words]


def test_every_public_name_is_on_the_page_and_no_other() -> None:
    words = set(re.findall(r"`@?(?:hf\.)?(\w+)", PAGE.read_text()))
    assert {*holdfast.__all__, *holdfast.langgraph.__all__} <= words
    assert set(re.findall(r"\bhf\.(\w+)", PAGE.read_text())) <= {*holdfast.__all__}
    assert set(re.findall(r"holdfast\.(\w+)", PAGE.read_text())) <= {"langgraph", "testing"}


def test_every_contents_entry_leads_to_a_section() -> None:
    text = PAGE.read_text()
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings


def test_autosave_is_on_the_page_with_all_that_it_takes() -> None:
    mapping = {name for name in dir(MutableMapping) if not name.startswith("_")}
    policies = {name for name in dir(holdfast.autosave) if not name.startswith("_")}
    assert documented("AutoState") == (operations(holdfast.AutoState) - mapping) | policies
    rows = rows_of(section("AutoState"))
    for name in policies:
        assert not missing(getattr(holdfast.autosave, name), rows[name][0]), name


HANDLES = [holdfast.Store, holdfast.Run, holdfast.Thread, holdfast.Tools, holdfast.Resource]


@pytest.mark.parametrize("handle", HANDLES)
def test_every_method_is_on_the_page_and_no_other(handle: type) -> None:
    own = {"id"} if handle is holdfast.Run else set()  # an attribute of the object
    assert documented(handle.__name__) == operations(handle) | own


@pytest.mark.parametrize("handle", [*HANDLES, holdfast.Worker])
def test_every_parameter_is_on_the_page(handle: type) -> None:
    rows = rows_of(section(handle.__name__))
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name in rows:
            assert not missing(method, rows[name][-1]), name


def test_every_parameter_of_opening_a_store_is_on_the_page() -> None:
    assert documented("Opening") >= set(inspect.signature(holdfast.open).parameters)


FUNCTIONS = sorted(
    name
    for name in holdfast.__all__
    if name[0].islower()
    and name not in ("register", "tools", "progress", "autosave")  # their own ways of being called
    and not inspect.ismodule(getattr(holdfast, name))
)


@pytest.mark.parametrize("module", ["logs", "metrics"])
def test_every_function_of_a_module_is_on_the_page_with_its_parameters(module: str) -> None:
    found = getattr(holdfast, module)
    for name in found.__all__:
        [row] = re.findall(rf"^\| `hf\.{module}\.{name}\b(.*)$", section("Metrics and logs"), flags=re.MULTILINE)
        if name[0].islower():
            assert not missing(getattr(found, name), row)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_on_the_page_with_its_parameters(name: str) -> None:
    rows = [row for row in rows_of(PAGE.read_text()).get(name, []) if row.startswith("(")]
    function = getattr(holdfast, name)
    # Other handles have methods of the same name: one of the rows is the function's.
    assert any(not missing(function, row) for row in rows), f"{name}{inspect.signature(function)}"


def test_every_parameter_of_progress_is_on_the_page() -> None:
    assert not missing(holdfast.progress.__call__, rows_of(section("Inside a run"))["progress"][0])


@pytest.mark.parametrize("name", ["durable", "step", "effect"])
def test_every_option_of_a_decorator_is_on_the_page_and_in_its_types(name: str) -> None:
    taken = set(inspect.signature(getattr(decorators, f"_decorate_{name}")).parameters) - {"fn"}
    typed = {option for each in get_overloads(getattr(holdfast, name)) for option in inspect.signature(each).parameters}
    assert documented(f"Options of {name}") == taken == typed - {"fn"}


@pytest.mark.parametrize("made", [holdfast.Worker, holdfast.Queue])
def test_what_is_made_from_arguments_is_on_the_page_with_all_of_them(made: type) -> None:
    methods = {name for name in operations(made) if callable(getattr(made, name))}
    assert documented(made.__name__) == set(inspect.signature(made).parameters) | methods


def test_every_status_of_a_run_is_on_the_page() -> None:
    assert not [status for status in STATUSES if f"`{status}`" not in rows_of(section("Run"))["status"][0]]


def test_the_drill_is_on_the_page_with_all_that_it_takes_and_gives() -> None:
    [row] = rows_of(section("Testing"))["drill"]
    assert not missing(drill.drill, row)
    words = set(re.findall(r"`(\w+)", section("Testing")))
    assert {field.name for field in dataclasses.fields(drill.Report)} | {"ok", "text"} <= words


def test_what_is_given_back_without_a_section_of_its_own_is_in_its_row() -> None:
    assert not [name for name in Given.__struct_fields__ if f"`{name}`" not in rows_of(section("Store"))["answer"][0]]
    assert not [name for name in operations(Budget) if f"`{name}`" not in rows_of(section("Inside a run"))["budget"][0]]
    assert {"id", "result"} == operations(holdfast.Child) <= set(re.findall(r"`(\w+)", section("Child")))


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


MODELS = [
    holdfast.RunInfo,
    holdfast.Step,
    holdfast.Ask,
    holdfast.Event,
    holdfast.Finding,
    holdfast.Replay,
    holdfast.Progress,
    holdfast.Health,
    holdfast.ThreadInfo,
    holdfast.Change,
    holdfast.Problem,
    holdfast.Report,
    holdfast.Pruned,
    holdfast.Stats,
    Compacted,
    Imported,
]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_of_a_model_is_on_the_page(model: type) -> None:
    words = set(re.findall(r"`(\w+)`", section(model.__name__)))
    properties = {name for name, _ in inspect.getmembers(model, lambda value: isinstance(value, property))}
    fields = getattr(model, "__struct_fields__", None) or [field.name for field in dataclasses.fields(model)]
    assert {*fields} | properties <= words


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
