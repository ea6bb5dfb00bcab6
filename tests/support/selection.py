"""What `make test` leaves to `make soak`: parameters that fail as those of another test would, and large installs.

A test on either database and in either mode runs as sync on SQLite and as async on PostgreSQL: what is one program for
both modes, and one text of SQL for both databases, does not fail crosswise alone. PERDURE_SOAK=1 runs all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK, spread

DATABASES = {"sqlite", "postgres"}
MODES = ("mode", "way")
# Repairs of many kinds of damage by the same few mechanisms: each test once, with the first of its parameters.
ONCE = {"test_repair.py", "test_repair_random.py", "test_repair_unreadable.py"}
# What these test lies above the SQL, which the contract, conformance and crash tests run on both databases. Every
# statement of the library that they run on PostgreSQL, other tests run there too (recorded by test, and compared). They
# run on SQLite alone, in both modes.
ABOVE_SQL = (
    "cli/",
    "forensics/",
    "memory/test_summarized_caps",
    "ops/test_autosave.py",
    "ops/test_autosave_background",
    "ops/test_edits",
    "ops/test_encryption",
    "ops/test_key_providers",
    "ops/test_large",
    "ops/test_metrics",
    "ops/test_retention_langgraph",
    "ops/test_retention_of_forks",
    "ops/test_traces",
    "runs/test_verify_runs",
    "runs/test_answers_names_and_caches.py",
    "runs/test_asking_for_approval.py",
    "runs/test_async_runs.py",
    "runs/test_attempts_and_deadlines.py",
    "runs/test_bad_parameters.py",
    "runs/test_bad_use.py",
    "runs/test_bad_use_elsewhere.py",
    "runs/test_callbacks_by_name.py",
    "runs/test_effects.py",
    "runs/test_effects_doubt.py",
    "runs/test_errors_are_kept.py",
    "runs/test_forgotten_await.py",
    "runs/test_handles.py",
    "runs/test_parallel.py",
    "runs/test_parallel_first.py",
    "runs/test_parallel_map.py",
    "runs/test_parallel_mistakes.py",
    "runs/test_people.py",
    "runs/test_progress.py",
    "runs/test_questions_in_one_query.py",
    "runs/test_retrying.py",
    "runs/test_run_state.py",
    "runs/test_run_values.py",
    "runs/test_runs_begun_anew_and_changed.py",
    "runs/test_runs_edge_cases.py",
    "runs/test_sagas.py",
    "runs/test_sagas_doubt.py",
    "runs/test_saves_in_runs.py",
    "runs/test_steps_limits.py",
    "runs/test_subtasks.py",
    "runs/test_timeouts.py",
    "runs/test_tools.py",
    "runs/test_tools_running.py",
    "runs/test_waiting_is_visible.py",
    "snapshots/test_bundles",
    "langgraph/test_approvals",
    "langgraph/test_delta_history",
    "langgraph/test_graphs",
    "langgraph/test_same_as_stock",
    "langgraph/test_saver_combinations",
    "langgraph/test_store_in_graphs",
    "langgraph/test_store_stock_defects",
    "langgraph/test_types",
    "langgraph/test_effects_features",
    "langgraph/test_saver_values",
)
# Tests of what `make soak` alone installs: CrewAI has 850 MB, Azurite 127 MB.
IN_SOAK_ALONE = {"test_crewai.py"}
SERVER_IN_SOAK_ALONE = "azurite"  # the last word of a parameter
# Expensive tests with many cases of one mechanism: so many of them, at even distances, so that the first and the last
# value of every parameter are among them.
FEW = {
    "test_a_fault_at_any_step_shows_all_or_nothing_and_the_next_call_finishes": 3,
    "test_a_graph_runs_as_in_memory": 5,
    "test_a_graph_that_changes_old_messages_in_place": 2,
    "test_a_history_is_what_its_checkpoints_are_one_by_one": 2,
    "test_a_kill_between_object_and_checkpoint_loses_nothing": 2,
    "test_a_kill_between_object_and_entry_loses_nothing": 2,
    "test_a_transfer_that_is_killed_leaves_all_or_nothing": 2,
    "test_a_transfer_that_is_killed_is_finished_by_the_same_call": 2,
    "test_a_random_program_beside_killed_workers_conserves_them_too": 0,
    "test_beside_writers_a_replica_is_the_source_at_one_instant": 2,
    "test_more_threads_than_one_transaction_takes": 2,
    "test_random_kills": 3,
    "test_sigkill_at_any_step_leaves_the_run_in_one_place": 2,
}


def left_to_soak(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    if SOAK:
        return []
    seen: set[tuple[Path, str]] = set()
    left: list[pytest.Item] = []
    few: dict[str, list[pytest.Item]] = {}
    items = list(items)
    encrypted = {name_of(item) for item in items if "encrypted" in params_of(item).values()}
    on_sqlite = {name_of(item) for item in items if databases_of(params_of(item)) == {"sqlite"}}
    for item in items:
        on_server = any(value.endswith(SERVER_IN_SOAK_ALONE) for value in params_of(item).values())
        if item.path.name in IN_SOAK_ALONE or on_server:
            left.append(item)
            continue
        call = getattr(item, "callspec", None)
        if call is None:
            continue
        name = name_of(item)
        if name[1] in FEW:
            few.setdefault(name[1], []).append(item)
            continue
        place = f"{item.path.parent.name}/{item.path.name}"
        above_sql = place.startswith(ABOVE_SQL)
        repeated = above_sql and databases_of(call.params) == {"postgres"} and name in on_sqlite
        # A snapshot in memory is taken by the same statements as one in a file, and an encrypted one by all of them.
        if place.startswith(("snapshots/", "forensics/", "regions/")):
            kinds = {value for value in call.params.values() if isinstance(value, str)}
            repeated |= "memory" in kinds and name in seen
            repeated |= bool({"sqlite", "memory"} & kinds) and name in encrypted
        if repeated or (not above_sql and is_crossed(call.params)) or (item.path.name in ONCE and name in seen):
            left.append(item)
        else:
            seen.add(name)
    for test, cases in few.items():
        taken = set(spread(cases, FEW[test]))
        left += [case for case in cases if case not in taken]
    return left


def name_of(item: pytest.Item) -> tuple[Path, str]:
    return item.path, str(getattr(item, "originalname", item.name))


def params_of(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return {} if call is None else {name: value for name, value in call.params.items() if isinstance(value, str)}


def databases_of(params: dict[str, Any]) -> set[str]:
    return DATABASES & {value for value in params.values() if isinstance(value, str)}


def is_crossed(params: dict[str, Any]) -> bool:
    databases = databases_of(params)
    [mode, *_] = [*(params[name] for name in MODES if name in params), None]
    if len(databases) != 1 or mode not in ("sync", "blocking", "async"):
        return False
    return bool((databases == {"sqlite"}) == (mode == "async"))
