"""docs/reference/api.md is what docs/generate.py writes, and every public name has a docstring."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import perdure

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_generated_one_and_has_every_class_whose_objects_public_calls_return(
    generate: ModuleType,
) -> None:
    page = generate.page()
    assert (DOCS / "reference" / "api.md").read_text() == page, "run python docs/generate.py"
    shown = set(re.findall(r"^## ([A-Z]\w+)$", page, re.MULTILINE))
    for call in (perdure.Run.outcome, perdure.Run.messages, perdure.Store.bulk, perdure.Thread.largest):
        classes = generate.returned(call)
        assert classes, "its annotation was not understood"
        assert {cls.__name__ for cls in classes} <= shown


def test_every_public_name_and_method_has_a_docstring(generate: ModuleType) -> None:
    for name in perdure.__all__:
        value = getattr(perdure, name)
        assert name == "__version__" or inspect.getdoc(value), name
        for method, function in generate.methods(value) if inspect.isclass(value) else ():
            assert isinstance(function, property) or inspect.getdoc(function), f"{name}.{method}"
