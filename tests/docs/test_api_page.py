"""docs/reference/api.md is what docs/generate.py writes, and every public name has a docstring."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import perdure

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_generated_one(generate: ModuleType) -> None:
    assert (DOCS / "reference" / "api.md").read_text() == generate.page(), "run python docs/generate.py"


def test_every_public_name_and_method_has_a_docstring(generate: ModuleType) -> None:
    for name in perdure.__all__:
        value = getattr(perdure, name)
        assert name == "__version__" or inspect.getdoc(value), name
        for method, function in generate.methods(value) if inspect.isclass(value) else ():
            assert isinstance(function, property) or inspect.getdoc(function), f"{name}.{method}"


def test_the_page_has_every_class_whose_objects_public_calls_return(generate: ModuleType) -> None:
    page = generate.page()
    for cls in (perdure.Run.outcome, perdure.Run.messages, perdure.Store.bulk, perdure.Thread.largest):
        assert generate.returned(cls), "its annotation was not understood"
    missing = [cls.__name__ for cls in generate.results() if f"\n## {cls.__name__}\n" not in page]
    assert missing == []
