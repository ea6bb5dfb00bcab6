"""The contract of a store: what must hold on every driver, blocking and async.

A test module inherits a suite and makes a fixture `harness`; `await harness.finish()` verifies what a test has left.
"""

from __future__ import annotations

from contract_arranging import ArrangingContract, PruningContract
from contract_history import HistoryContract, ListingContract
from contract_placing import PlacingContract
from contract_saving import RacingContract, SavingContract
from contract_sharing import LifecycleContract, TenantContract
from contract_values import LimitsContract, ValuesContract
from harness import Harness, Mode

__all__ = ["Harness", "Mode", "StoreContract", "StoreSmoke"]


class StoreContract(
    SavingContract,
    RacingContract,
    PlacingContract,
    HistoryContract,
    ListingContract,
    ArrangingContract,
    PruningContract,
    ValuesContract,
    LimitsContract,
    TenantContract,
    LifecycleContract,
):
    """Everything a store promises, as tests. Needs a fixture named `harness`."""


class StoreSmoke(RacingContract, TenantContract, LifecycleContract):
    """For one more way to the same store: what depends on the driver in full, and one test of everything else."""

    test_each_save_follows_the_one_before = SavingContract.test_each_save_follows_the_one_before
    test_rollback_is_a_new_head = SavingContract.test_rollback_is_a_new_head_that_equals_the_old_checkpoint
    test_update_removes_paths = SavingContract.test_update_removes_paths
    test_prunes_and_forks_of_one_tree_at_once = PlacingContract.test_prunes_and_forks_of_one_tree_at_once
    test_history_pages_over_more_than_a_hundred = HistoryContract.test_history_pages_over_more_than_a_hundred
    test_diff = HistoryContract.test_diff_names_what_was_added_removed_and_changed
    test_where = ListingContract.test_where_finds_threads_by_all_of_their_metadata
    test_concurrent_annotations_lose_nothing = ListingContract.test_concurrent_annotations_lose_nothing
    test_forks_of_forks_and_of_old_checkpoints = ArrangingContract.test_forks_of_forks_and_of_old_checkpoints
    test_late_writes = ArrangingContract.test_late_writes_to_a_deleted_thread_are_refused
    test_forks_keep_what_they_need = PruningContract.test_forks_keep_what_they_need
    test_saves_while_pruning_lose_nothing = PruningContract.test_saves_while_pruning_lose_nothing
    test_every_type_comes_back_as_it_was = ValuesContract.test_every_type_comes_back_as_it_was
    test_an_unstorable_value = ValuesContract.test_an_unstorable_value_names_its_path_and_writes_nothing
    test_metadata_at_its_limits = LimitsContract.test_metadata_at_its_limits
