"""Examine a bad deployment and undo it: snapshot, diff, incident, sandbox, restore.

python examples/snapshots.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import perdure
from perdure.forensics import incident, sandbox

PRICES = {"chair": 120, "lamp": 40}
SIGNS = {"v42": 1, "v43": -1}  # the defect of the new version
sent: list[str] = []  # the mails that customers received


@perdure.step
def price(item: str, version: str) -> int:
    return PRICES[item] * SIGNS[version]


@perdure.effect
def mail(text: str, key: perdure.IdempotencyKey) -> str:
    sent.append(text)
    return f"sent {text!r}"


@perdure.durable
def refund(items: list[str], version: str) -> str:
    state = perdure.state({"total": 0})
    for item in items:
        state["total"] += price(item, version)
    if state["total"] < 0:
        raise ValueError(f"a refund of {state['total']} EUR")
    return mail(f"You get {state['total']} EUR back")


def serve(store: perdure.Store, ticket: int, version: str) -> None:
    """Handle one ticket: a run, the customer's thread, and a fact about the customer."""
    run = store.run(refund, ["lamp", "chair"], version, id=f"refund-{ticket}")
    store.thread(f"ticket-{ticket}").save({"status": run.status, "version": version})
    store.memory("customers").put("ann", {"fact": f"Ann's refund by {version}: {run.status}"})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, perdure.open(Path(folder, "agent.db")) as store:
        serve(store, 1, "v42")
        store.thread("ticket-2").save({"status": "new"})
        before = store.snapshot("before-v43", note="the last state of v42")
        before.mark_good()
        serve(store, 2, "v43")

        print("What has changed since v43:")
        for change in before.diff():
            print("  ", change)
            if change.kind == "changed":
                print(*(f"      {path}" for path in change.paths()), sep="\n")

        failed = store.snapshot("v43-failed")
        report = incident(failed, "refund-2")
        print(f"\nWhy refund-2 failed: {report.error}")
        for frame in report.blame("total"):
            print(f"  step {frame.step.number}, {frame.step.name} -> {frame.step.result}:", *frame.changes)

        SIGNS["v43"] = 1  # try the fix in a fork from the start; a sandbox sends nothing
        with sandbox(failed) as box:
            try:
                box.fork("refund-2", at=0, keys="new", id="fixed").result()
            except perdure.RunStuck as stuck:
                print(f"\nFixed, it gets as far as it may: {stuck}")

        print("\nBack to v42:")
        done = store.restore(before)
        print(done)
        print("now:", store.thread("ticket-2").load().state)
        store.restore(done.undo)
        print("and forth again:", store.thread("ticket-2").load().state)
        print("mails sent:", sent)


if __name__ == "__main__":
    main()
