"""Let two writers save to one thread in three ways: branch, refuse, merge. No save is lost.

python examples/two_writers.py
"""

from __future__ import annotations

import threading

import perdure


def branch(store: perdure.Store) -> None:
    """Save without options: the second writer's save becomes a branch, and its `is_head` is False."""
    store.thread("draft").save({"text": "Dear all"})
    ann, bob = store.thread("draft"), store.thread("draft")
    ann.load()
    bob.load()

    first = ann.save({"text": "Dear all, hello"}, note="ann")
    second = bob.save({"text": "Dear friends"}, note="bob")
    print(f"branch: ann is the head: {first.is_head}; bob is the head: {second.is_head}")
    print("branch: kept are", sorted(end.state["text"] for end in ann.branches()))


def refuse(store: perdure.Store) -> None:
    """Save with `expect`: refused unless the head is still the checkpoint that was read."""
    thread = store.thread("budget")
    seen = thread.save({"left": 100})
    store.thread("budget").save({"left": 60}, note="another agent spent 40")
    try:
        thread.save({"left": 90}, expect=seen)
    except perdure.Conflict as conflict:
        print("refuse: head was", "as expected" if conflict.actual == seen.id else "moved by another writer")
    print("refuse: left is", store.thread("budget").load().state["left"])


def merge(store: perdure.Store) -> None:
    """Call `update`: it changes the newest state, and retries if another writer was faster."""
    store.thread("board").save({"votes": {}})

    def vote(name: str) -> None:
        store.thread("board").update({"votes": {name: "yes"}})

    voters = [threading.Thread(target=vote, args=(f"voter-{number}",)) for number in range(8)]
    for voter in voters:
        voter.start()
    for voter in voters:
        voter.join()
    print("merge: votes counted:", len(store.thread("board").load().state["votes"]))


def main() -> None:
    with perdure.open(":memory:") as store:
        branch(store)
        refuse(store)
        merge(store)


if __name__ == "__main__":
    main()
