"""What a process has one of per database: made on first use, gone with the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from perdure.storage.program import Driver

T = TypeVar("T")


class PerDriver(Generic[T]):
    """An object per driver. It must not refer to the driver, which would then live as long as the process."""

    def __init__(self, make: Callable[[Driver], T]) -> None:
        self._make = make
        self._objects: WeakKeyDictionary[Driver, T] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, driver: Driver) -> T:
        with self._lock:
            value = self._objects.get(driver)
            if value is None:
                value = self._objects[driver] = self._make(driver)
            return value

    def pop(self, driver: Driver) -> T | None:
        with self._lock:
            return self._objects.pop(driver, None)
