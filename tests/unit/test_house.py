"""The house rules: public names, layers, twins of sync and async, import time."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import perdure
from perdure.log.domain import DOMAIN as THREADS
from perdure.memory import AgentMemory, Conversation
from perdure.memory.domain import DOMAIN as MEMORY
from perdure.memory.handle import Memory
from perdure.ops.operations import Operations
from perdure.ops.store import Store
from perdure.runs.domain import DOMAIN as RUNS
from perdure.runs.store import RunStore
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.store import SnapshotStore
from perdure.storage.closing import AsyncClosing
from perdure.storage.domains import Domain
from perdure.teams import Team, TeamSnapshot
from perdure.threads.context import Handle
from perdure.threads.store import ThreadStore
from perdure.threads.thread import Thread

SOURCE = Path(perdure.__file__).parent
TESTS = Path(__file__).parent.parent
# Lowest first: a module may import from its own layer and from those before it.
LAYERS = (
    "late",
    "errors",
    "values",
    "storage",
    "encryption",
    "log",
    "threads",
    "runs",
    "tasks",
    "agents",
    "memory",
    "working_memory",
    "transfers",
    "snapshots",
    "teams",
    "ops",
    "adapters",
    "langchain",
    "langchain_history",
    "llama_index",
    "burr",
    "crewai",
    "langgraph",
    "pydantic_ai",
    "openai_agents",
    "adk",
    "cosmos",
    "claude_agent",
    "agent_framework",
    "strands",
    "views",
    "testing",
    "forensics",
    "regions",
    "inspector",
    "cli",
)
# Products on top of the mechanisms: each can be removed as a folder, with the module of `cli` that has its name.
PRODUCTS = ("forensics", "regions")
# Adapters of agent frameworks, which are slow to import. No module has more than 250 lines.
AGENTS = ("pydantic_ai", "openai_agents", "adk", "claude_agent", "agent_framework", "strands",
          "langchain_history", "llama_index", "burr", "crewai")  # fmt: skip
# Usable after `import perdure`, and imported when first used.
FACES = {"agents", "encryption", "errors", "forensics", "memory", "ops", "regions", "snapshots", "teams", "views"}
# The floors of the largest layer. Between them the imports at the head of a module go downwards; what a function
# imports when it is called may come from above.
FLOORS = {
    "runs": ("run_table", "tables", "functions", "journal", "domain", "execution", "streams", "calls", "parallel",
             "engine", "maintenance", "history", "handle", "starting", "schedules", "workers", "store"),
    "ops": ("telemetry", "health", "overview", "roles", "keys", "maintenance", "repair", "doctor", "operations",
            "store"),
}  # fmt: skip


@cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the package, parsed once."""
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@pytest.fixture(scope="module", autouse=True)
def parsed_modules_are_forgotten() -> Iterator[None]:
    """A million objects would be looked at by each collection of garbage in later tests."""
    yield
    modules.cache_clear()
    imported_by.cache_clear()


@cache
def imported_by(path: Path) -> frozenset[str]:
    """What a module of the package imports from it."""
    return frozenset(imports(modules()[path]))


def layer(module: str) -> int:
    """The layer of a dotted module name; the package itself stands on top of the domains."""
    parts = module.replace("__main__", "cli").split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 else LAYERS.index("ops")


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "perdure":
            names |= {node.module} if "." in node.module else {f"perdure.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "perdure"}
    return names


def test_all_names_exactly_what_is_public() -> None:
    """Every line of the stub exports a name, to type checkers and at run time: `from MODULE import NAME as NAME`."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [(line.module, alias.name) for line in lines for alias in line.names if alias.asname == alias.name]
    assert len(names) == len(lines)
    assert {name for module, name in names if module != "perdure"} | {"__version__"} == set(perdure.__all__)
    assert {name for module, name in names if module == "perdure"} == FACES


@pytest.mark.parametrize(
    "package",
    [perdure, perdure.memory, perdure.ops, perdure.snapshots, perdure.forensics, perdure.regions, perdure.views],
    ids=lambda one: one.__name__,
)
def test_completion_shows_exactly_what_is_public(package: ModuleType) -> None:
    modules = FACES if package is perdure else set()
    shown = {name for name in dir(package) if not name.startswith("__")}
    assert shown == {*package.__all__, *modules} - {"__version__"}
    assert [name for name in shown if not hasattr(package, name)] == []


def types_only(tree: ast.Module) -> set[str]:
    """What is imported for annotations alone."""
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {name for block in blocks for name in imports(block)}


def test_a_layer_imports_only_downwards() -> None:
    for path, tree in modules().items():
        name = "perdure." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        # What users hand in, and what `snap.store` gives them, is a whole `perdure.Store`: its type is named upwards.
        upwards = types_only(tree) & {"perdure.ops.store"}
        for imported in imported_by(path) - upwards if name != "perdure" else ():
            if imported.split(".")[1:2] and imported.split(".")[1] not in LAYERS:
                assert layer(name) >= LAYERS.index("langgraph"), f"{name} imports the package root: {imported}"
                continue
            assert layer(imported) <= layer(name), f"{name} imports upwards: {imported}"


@pytest.mark.parametrize("product", PRODUCTS)
def test_only_commands_and_the_face_import_a_product_and_when_they_run(product: str) -> None:
    for path, tree in modules().items():
        place = path.relative_to(SOURCE)
        if place.parts[0] == product or f"perdure.{product}" not in {
            ".".join(name.split(".")[:2]) for name in imported_by(path)
        }:
            continue
        assert place.parts[0] in ("ops", "cli", "__init__.py"), f"{place} imports {product}"
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [name for node in at_once for name in imports(node) if product in name], (
            f"{place} imports it at once"
        )


def test_without_products_everything_else_works() -> None:
    """Every other module is imported; threads, runs, memory, snapshots, a restore, the doctor and commands work. No
    product imports another one: the test above."""
    code = f"""
import importlib, pathlib, sys
for product in {PRODUCTS}:
    sys.modules["perdure." + product] = None  # as if the folder were not there
import perdure
source = pathlib.Path(perdure.__file__).parent
for path in sorted(source.rglob("*.py")):
    parts = path.relative_to(source).with_suffix("").parts
    if parts[0] not in {(*PRODUCTS, *AGENTS)} and parts[-1] not in ("__init__", "__main__"):
        importlib.import_module(".".join(("perdure", *parts)))

@perdure.durable
def double(number): return 2 * number

with perdure.open(":memory:") as store:
    store.thread("a").save([1])
    assert store.run(double, 2, id="r").result() == 4
    store.memory("users").put("k", "v")
    snap = store.snapshot("s")
    store.thread("a").save([2])
    assert [str(change) for change in snap.diff()] == ["~ thread a"]
    store.restore(snap)
    assert store.thread("a").load().state == [1] and store.ops.verify().ok
    assert store.ops.doctor()
from perdure.cli import main
assert main(["--help"]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def agent_modules() -> list[Path]:
    return [path for path in modules() if path.relative_to(SOURCE).parts[0].removesuffix(".py") in AGENTS]


def test_adapters_import_public_names_only() -> None:
    """What an adapter needs of the engine is a port: `perdure.adapters`, or another public module."""
    ports = {"perdure.errors", "perdure.adapters", "perdure.ops", *(f"perdure.{name}" for name in perdure.__all__)}
    own = ("perdure.langgraph", *(f"perdure.{name}" for name in AGENTS))
    for path in [*(SOURCE / "langgraph").rglob("*.py"), SOURCE / "langchain.py", *agent_modules()]:
        others = {name for name in imported_by(path) if not name.startswith(own)}
        assert others - {"perdure"} <= ports, path


def test_cosmos_is_built_on_chains_and_lines_and_on_no_store() -> None:
    """It keeps threads without SQL: of what is below the adapters it takes what is pure, and a pool of threads."""
    pure = ("errors", "values", "log", "threads", "storage.store_threads", "adapters", "langgraph", "cosmos", "ops")
    for path in (SOURCE / "cosmos").rglob("*.py"):
        for name in imports(modules()[path]):
            assert name.startswith(tuple(f"perdure.{one}" for one in pure)), f"{path} imports {name}"


def test_the_inspector_imports_public_names_only() -> None:
    """It shows what any program could read: a page that needs more is a call that is missing."""
    faces = {*FACES, *(name for name in perdure.__all__)}
    for path in (SOURCE / "inspector").rglob("*.py"):
        own = {name for name in imported_by(path) if name.startswith("perdure.inspector")}
        assert imported_by(path) - own - {"perdure"} <= {f"perdure.{name}" for name in faces}, path


FRAMEWORKS = re.compile(
    r"lang_?(chain|graph|smith)|pregel|checkpoint_ns|pydantic[._]ai|llama_?index|crewai|autogen|semantic_kernel"
    r"|haystack|smolagents|agno|dspy|litellm|google\.(adk|genai)|openai|anthropic|mistralai|cohere",
    re.IGNORECASE,
)
# They speak the formats of model APIs, and name a format after its API. None imports an SDK.
FORMATS = {
    "agents/formats.py",
    "agents/tools.py",
    "working_memory/context.py",
    "memory/embedding_services.py",
    "working_memory/history.py",
}


def test_runs_know_no_tasks_of_other_frameworks() -> None:
    """How calls in such a task wait, find their records and ask is `perdure.tasks`, behind `CallPolicy`."""
    for path in (SOURCE / "runs").rglob("*.py"):
        assert not re.search(r"\b(can_park|take_for)\b|\.(alone|around|asking)\b", path.read_text()), path


def test_nothing_below_an_adapter_names_a_framework() -> None:
    for below in LAYERS[: LAYERS.index("adapters")]:
        for path in [*(SOURCE / below).rglob("*.py"), *SOURCE.glob(f"{below}.py")]:
            names = {one.group().lower() for one in FRAMEWORKS.finditer(path.read_text())}
            allowed = {"openai", "anthropic", "cohere"} if str(path.relative_to(SOURCE)) in FORMATS else set()
            assert names <= allowed, f"{path} names {names - allowed}"
            imported = {
                name
                for node in ast.walk(modules()[path])
                if isinstance(node, ast.Import | ast.ImportFrom)
                for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            }
            assert not [name for name in imported if FRAMEWORKS.match(name)], path


@pytest.mark.parametrize("whole", FLOORS)
def test_the_floors_of_a_layer_import_only_downwards(whole: str) -> None:
    floors = FLOORS[whole]
    found = {path.relative_to(SOURCE / whole).parts[0].removesuffix(".py") for path in (SOURCE / whole).rglob("*.py")}
    assert found - {"__init__"} == set(floors)
    for path in (SOURCE / whole).rglob("*.py"):
        floor = path.relative_to(SOURCE / whole).parts[0].removesuffix(".py")
        for node in modules()[path].body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"perdure.{whole}."):
                below = str(node.module).split(".")[2]
                assert floors.index(below) <= floors.index(floor), f"{path} imports upwards: {node.module}"


@pytest.mark.parametrize(
    ("domain", "lower"),
    [
        (THREADS, ("values", "storage", "encryption")),
        (RUNS, ("values", "storage", "encryption", "log", "threads")),
        (MEMORY, ("values", "storage", "encryption", "log", "threads", "runs", "agents")),
    ],
)
def test_no_sql_of_a_lower_layer_names_a_table_of(domain: Domain, lower: tuple[str, ...]) -> None:
    names = "|".join(table.name for table in domain.tables)
    statement = re.compile(rf"\b(FROM|JOIN|INTO|UPDATE) ({names})\b")
    for layer_name in lower:
        for path in (SOURCE / layer_name).rglob("*.py"):
            assert not statement.search(path.read_text()), f"{path} names a table that {domain.name} owns"


def test_a_run_writes_only_with_its_fence() -> None:
    """What runs inside a run writes in two places, which name the run's fence."""
    inside = [SOURCE / "runs" / "engine" / "execute.py"]
    inside += [path for floor in ("execution", "calls", "parallel") for path in (SOURCE / "runs" / floor).iterdir()]
    writes: list[tuple[str, str]] = []
    for path in inside:
        if path.suffix != ".py":
            continue
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, ast.ImportFrom) and outer.module == "perdure.storage.program":
                writes += [(path.name, alias.name) for alias in outer.names if alias.name in ("write", "write_repair")]
            elif isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                writes += [(path.name, outer.name) for node in ast.walk(outer) if _asks_to_write(node)]
    assert sorted(writes) == [("journal_writer.py", "append"), ("journal_writer.py", "commit_with_retry")]


def _asks_to_write(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "aappend"):
        return isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "driver"
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Transaction"
        and any(keyword.arg == "write" for keyword in node.keywords)
    )


def test_no_condition_is_entered_itself() -> None:
    """Its methods are Python: Ctrl-C at their entry leaves the lock held. The lock that it was made with is entered."""
    of_stores = [path for path in modules() if SOURCE / "testing" not in path.parents]
    assert not [path for path in of_stores if "Condition()" in path.read_text()]


def test_every_module_says_what_it_is() -> None:
    assert not [path for path, tree in modules().items() if not ast.get_docstring(tree)]


@pytest.mark.parametrize("name", ["errors.Busy", "ops.Backup", "encryption.KeyFile", "agents.Progress", "outcome.Done"])
def test_a_public_module_needs_no_import_of_its_own(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import perdure; perdure.{name}"], check=True)


def test_opening_a_store_imports_little() -> None:
    code = """
import sys, perdure
perdure.open(":memory:").close()
assert not {"asyncio", "importlib.metadata", "perdure.snapshots.restore"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_at_most_71_names_at_the_top_level() -> None:
    assert len(perdure.__all__) <= 71


def test_no_adapter_over_250_lines() -> None:
    assert not [path for path in agent_modules() if len(path.read_text().splitlines()) > 250]


def test_no_file_over_500_lines() -> None:
    files = [*modules(), *TESTS.rglob("*.py")]
    assert not [path for path in files if len(path.read_text().splitlines()) > 500], "split them by subject"


def test_no_function_over_70_lines() -> None:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 70, f"{path}:{node.lineno} {node.name}"


def operations(handle: type) -> list[str]:
    """The public methods that do I/O: all but those that only make a handle."""
    without_io = {"tenant", "thread", "autosave", "line", "memory", "as_of", "reading", "team", "agent"}
    names = [name for name, _ in inspect.getmembers(handle, inspect.isfunction) if not name.startswith("_")]
    twins = {name for name in names if name.startswith("a") and name[1:] in names}
    return [name for name in names if name not in twins and name not in without_io]


def test_a_store_is_composed_of_parts_that_know_nothing_of_each_other() -> None:
    for part in (ThreadStore, RunStore, SnapshotStore, Operations):
        assert part.__bases__ == (Handle,)
    assert Store.__bases__ == (Handle, AsyncClosing)


@pytest.mark.parametrize(
    "handle", [Store, Operations, Snapshot, Thread, Memory, Conversation, AgentMemory, Team, TeamSnapshot]
)
def test_every_operation_has_an_async_twin_with_the_same_signature(handle: type) -> None:
    for name in operations(handle):
        blocking = inspect.signature(getattr(handle, name))
        twin = inspect.signature(getattr(handle, "a" + name))
        assert blocking.parameters == twin.parameters, name
        expected = str(blocking.return_annotation).replace("Iterator", "AsyncIterator")
        assert str(twin.return_annotation) == expected, name


def test_import_brings_hardly_anything() -> None:
    """What takes time is imported when it is used. The time itself is a benchmark."""
    code = "import sys; before = set(sys.modules); import perdure; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert not {"apsw", "msgspec", "asyncio", "psycopg", "rich", "numpy", "pydantic", "langgraph"} & set(imported)
    assert len(imported) < 50


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
