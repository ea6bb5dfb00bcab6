"""The contract of a store: what must hold on every driver, blocking and async.

Third parties run it on their own driver. Make a fixture `harness`, and a class that inherits the suite:

    @pytest.fixture
    async def harness(tmp_path):
        harness = Harness(partial(holdfast.open, f"{tmp_path}/a.db"), "async")
        yield harness
        await harness.finish()

    class TestMyDriver(StoreContract):
        pass

The tests are coroutines: pytest-asyncio with `asyncio_mode = "auto"` runs them. `await harness.finish()` is part of
every test: it verifies what the test has left behind.
"""

from __future__ import annotations

from holdfast.testing.contract_arranging import ArrangingContract, PruningContract
from holdfast.testing.contract_history import HistoryContract, ListingContract
from holdfast.testing.contract_placing import PlacingContract
from holdfast.testing.contract_saving import RacingContract, SavingContract
from holdfast.testing.contract_sharing import LifecycleContract, TenantContract
from holdfast.testing.contract_values import LimitsContract, ValuesContract
from holdfast.testing.harness import Harness, Mode

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
