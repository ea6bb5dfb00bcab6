"""A run whose process is killed before or after the object of an effect's result is written: URL, folder, point."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import perdure


def settle() -> perdure.outcome.Done:
    print("settled")
    return perdure.outcome.Done(perdure.External(b"receipt" * 100))


@perdure.step
def load() -> perdure.External[bytes]:
    return perdure.External(b"step" * 200)


@perdure.effect(reconcile=settle)
def pay(of: perdure.External[bytes]) -> perdure.External[bytes]:
    armed.append(True)
    return perdure.External(b"receipt" * 100)


@perdure.durable
def flow() -> int:
    one = load()
    return len(one.get()) + len(pay(one).get())


armed: list[bool] = []
url, folder, point = sys.argv[1:]


class Killing:
    def __init__(self, objects: Any) -> None:
        self.objects, self.get, self.delete = objects, objects.get, objects.delete

    def put(self, name: str, data: bytes) -> None:
        if point != "before" or not armed:
            self.objects.put(name, data)
        if point and armed:
            os.kill(os.getpid(), signal.SIGKILL)


with perdure.open(url, objects=folder, lease_s=1) as store:
    store._context.objects = Killing(store._context.objects)
    print(store.run(flow, id="killed").result())
