"""docs/reference/api.md names everything public, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, get_overloads

import pytest

import perdure
import perdure.langgraph
from perdure.langgraph import Compacted, MigrationReport, PerdureSaver, import_langgraph
from perdure.runs.calls import decorators
from perdure.runs.calls.asking import Given
from perdure.runs.journal.rows import STATUSES
from perdure.testing import drill

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
    words = set(re.findall(r"`@?(?:perdure\.)?(\w+)", PAGE.read_text()))
    assert {*perdure.__all__, *perdure.langgraph.__all__} <= words
    assert set(re.findall(r"\bperdure\.(\w+)", PAGE.read_text())) <= {*perdure.__all__, "langgraph", "testing"}


def test_every_contents_entry_leads_to_a_section() -> None:
    text = PAGE.read_text()
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings


def test_autosave_is_on_the_page_with_all_that_it_takes() -> None:
    mapping = {name for name in dir(MutableMapping) if not name.startswith("_")}
    policies = {name for name in dir(perdure.autosave) if not name.startswith("_")}
    assert documented("AutoState") == (operations(perdure.AutoState) - mapping) | policies
    rows = rows_of(section("AutoState"))
    for name in policies:
        assert not missing(getattr(perdure.autosave, name), rows[name][0]), name


HANDLES = [perdure.Store, perdure.Run, perdure.Thread, perdure.Tools]


@pytest.mark.parametrize("handle", HANDLES)
def test_every_method_is_on_the_page_and_no_other(handle: type) -> None:
    own = {"id"} if handle is perdure.Run else set()  # an attribute of the object
    assert documented(handle.__name__) == operations(handle) | own


@pytest.mark.parametrize("handle", [*HANDLES, perdure.Worker])
def test_every_parameter_is_on_the_page(handle: type) -> None:
    rows = rows_of(section(handle.__name__))
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name in rows:
            assert not missing(method, rows[name][-1]), name


def test_every_parameter_of_opening_a_store_is_on_the_page() -> None:
    assert documented("Opening") >= set(inspect.signature(perdure.open).parameters)


FUNCTIONS = sorted(
    name
    for name in perdure.__all__
    if name[0].islower()
    and name not in ("register", "tools", "progress", "autosave")  # their own ways of being called
    and not inspect.ismodule(getattr(perdure, name))
)


@pytest.mark.parametrize("module", ["logs", "metrics"])
def test_every_function_of_a_module_is_on_the_page_with_its_parameters(module: str) -> None:
    found = getattr(perdure, module)
    for name in found.__all__:
        [row] = re.findall(rf"^\| `perdure\.{module}\.{name}\b(.*)$", section("Metrics and logs"), flags=re.MULTILINE)
        if name[0].islower():
            assert not missing(getattr(found, name), row)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_on_the_page_with_its_parameters(name: str) -> None:
    rows = [row for row in rows_of(PAGE.read_text()).get(name, []) if row.startswith("(")]
    function = getattr(perdure, name)
    # Other handles have methods of the same name: one of the rows is the function's.
    assert any(not missing(function, row) for row in rows), f"{name}{inspect.signature(function)}"


def test_every_parameter_of_progress_is_on_the_page() -> None:
    assert not missing(perdure.progress.__call__, rows_of(section("Inside a run"))["progress"][0])


@pytest.mark.parametrize("name", ["durable", "step", "effect"])
def test_every_option_of_a_decorator_is_on_the_page_and_in_its_types(name: str) -> None:
    taken = set(inspect.signature(getattr(decorators, f"_decorate_{name}")).parameters) - {"fn"}
    typed = {option for each in get_overloads(getattr(perdure, name)) for option in inspect.signature(each).parameters}
    assert documented(f"Options of {name}") == taken == typed - {"fn"}


@pytest.mark.parametrize("made", [perdure.Worker, perdure.Queue])
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
    assert {"id", "result"} == operations(perdure.Child) <= set(re.findall(r"`(\w+)", section("Child")))


def test_the_saver_is_on_the_page_with_all_that_it_takes_and_has() -> None:
    arguments = set(inspect.signature(PerdureSaver).parameters)
    contract = {name for name in dir(PerdureSaver.__base__) if not name.startswith("_")}
    assert documented("PerdureSaver") == arguments | (operations(PerdureSaver) - contract)
    rows = dict(re.findall(r"^\| `(\w+)\((.*)$", section("PerdureSaver"), flags=re.MULTILINE))
    for name, row in rows.items():
        taken = set(inspect.signature(getattr(PerdureSaver, name)).parameters) - {"self"}
        assert not [one for one in taken if one not in row], name
    overridden = {name for name in vars(PerdureSaver) if name in contract and f"a{name}" in vars(PerdureSaver)}
    assert overridden <= set(re.findall(r"`(\w+)`", section("PerdureSaver")))


def test_every_parameter_of_the_import_is_on_the_page() -> None:
    [row] = re.findall(r"^\| `import_langgraph.*$", section("Importing from LangGraph"), flags=re.MULTILINE)
    assert not [name for name in inspect.signature(import_langgraph).parameters if name not in row]


MODELS = [
    perdure.RunInfo,
    perdure.Step,
    perdure.Ask,
    perdure.Event,
    perdure.Finding,
    perdure.Replay,
    perdure.Progress,
    perdure.Health,
    perdure.ThreadInfo,
    perdure.Change,
    perdure.Problem,
    perdure.Report,
    perdure.Pruned,
    perdure.Stats,
    Compacted,
    MigrationReport,
]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_of_a_model_is_on_the_page(model: type) -> None:
    words = set(re.findall(r"`(\w+)`", section(model.__name__)))
    properties = {name for name, _ in inspect.getmembers(model, lambda value: isinstance(value, property))}
    fields = getattr(model, "__struct_fields__", None) or [field.name for field in dataclasses.fields(model)]
    assert {*fields} | properties <= words


def test_every_field_of_a_checkpoint_is_on_the_page() -> None:
    public = {name for name in dir(perdure.Checkpoint) if not name.startswith("_")}
    assert documented("Checkpoint") == public


def test_every_error_is_on_the_page() -> None:
    errors = {
        name
        for name in perdure.__all__
        if inspect.isclass(value := getattr(perdure, name)) and issubclass(value, Exception)
    }
    assert documented("Errors") == errors
