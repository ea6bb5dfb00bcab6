"""Train a model, be killed in the middle of an epoch, and reach the same weights as without the kill, bit by bit.

    python examples/training.py        # dies in the middle of epoch 13
    python examples/training.py        # resumes from the last checkpoint, and ends

It needs, in a clone: pip install . numpy safetensors

A checkpoint has the weights (numpy arrays, stored as they are), the optimizer (as safetensors, which tensors of torch
become by `safetensors.torch.save`), the epoch and the state of the random generator. It is in training.db in the
current directory. Adaptive autosave finds how often to save, from the cost of a save and the failures it has seen.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import perdure

EPOCHS, RATE, MOMENTUM = 20, 0.1, 0.9
INPUTS = np.random.default_rng(0).normal(size=(256, 8))
WEIGHTS = np.arange(8, dtype=np.float64)
TARGETS = INPUTS @ WEIGHTS


def beginning() -> dict[str, Any]:
    generator = np.random.default_rng(1)
    return {
        "epoch": 0,
        "weights": np.zeros(8),
        "optimizer": save({"velocity": np.zeros(8)}),
        "random": generator.bit_generator.state,
        "losses": [],
    }


def train_epoch(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state after one more epoch. The state alone decides it, so a repeated epoch is the same."""
    generator = np.random.default_rng()
    generator.bit_generator.state = state["random"]
    weights, velocity = state["weights"].copy(), load(state["optimizer"])["velocity"].copy()
    for batch in np.array_split(generator.permutation(len(INPUTS)), 8):
        error = INPUTS[batch] @ weights - TARGETS[batch]
        velocity = MOMENTUM * velocity - RATE * (INPUTS[batch].T @ error) / len(batch)
        weights = weights + velocity
    loss = float(np.mean((INPUTS @ weights - TARGETS) ** 2))
    return {
        "epoch": state["epoch"] + 1,
        "weights": weights,
        "optimizer": save({"velocity": velocity}),
        "random": generator.bit_generator.state,
        "losses": [*state["losses"], round(loss, 6)],
    }


def main() -> None:
    undisturbed = beginning()
    for _ in range(EPOCHS):
        undisturbed = train_epoch(undisturbed)
    with perdure.open("training.db") as store:
        thread = store.thread("run-1")
        is_first_time = thread.get_head() is None
        policy = perdure.autosave.adaptive(min_s=0, mtbf_s=1e-6)  # after every epoch, as these take no time
        with thread.autosave(policy, initial=beginning()) as state:
            print(f"begins after epoch {state['epoch']}", flush=True)
            while state["epoch"] < EPOCHS:
                if is_first_time and state["epoch"] == 12:
                    state.save()
                    train_epoch(dict(state))  # the work of the epoch that is lost
                    os.kill(os.getpid(), signal.SIGKILL)
                state.update(train_epoch(dict(state)))
        trained = thread.load().state
        print(f"epoch {trained['epoch']}, loss {trained['losses'][-1]}")
        print("same weights as without a kill:", np.array_equal(trained["weights"], undisturbed["weights"]))
        print("same optimizer:", trained["optimizer"] == undisturbed["optimizer"])


if __name__ == "__main__":
    main()
