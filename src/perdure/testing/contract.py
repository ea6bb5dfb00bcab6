"""The contract of a store: what must hold on every driver, blocking and async.

Third parties run it on their own driver. Make a fixture `harness`, and a class that inherits the suite:

    @pytest.fixture
    async def harness(tmp_path):
        harness = Harness(partial(perdure.open, f"{tmp_path}/a.db"), "async")
        yield harness
        await harness.finish()

    class TestMyDriver(StoreContract):
        pass

The tests are coroutines: pytest-asyncio with `asyncio_mode = "auto"` runs them. `await harness.finish()` is part of
every test: it verifies what the test has left behind.
"""

from __future__ import annotations

from perdure.testing.contract_arranging import ArrangingContract, PruningContract
from perdure.testing.contract_history import HistoryContract, ListingContract
from perdure.testing.contract_placing import PlacingContract
from perdure.testing.contract_saving import RacingContract, SavingContract
from perdure.testing.contract_sharing import LifecycleContract, TenantContract
from perdure.testing.contract_values import LimitsContract, ValuesContract
from perdure.testing.harness import Harness, Mode

__all__ = ["Harness", "Mode", "StoreContract"]


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
