"""An agent that changes its state freely and lets Perdure decide when to save it. Killed, it resumes.

python examples/autosave.py        # reads nine chapters, and is killed in the middle of its notes
python examples/autosave.py        # the same line again: resumes with what was saved, and ends
"""

from __future__ import annotations

import os
import signal

import perdure

CHAPTERS = 12


def main() -> None:
    store = perdure.open("autosave.db")
    thread = store.thread("reading")
    is_first_time = thread.get_head() is None
    with thread.autosave(perdure.autosave.every(4), background=True, initial={"read": 0, "notes": {}}) as state:
        known = state["read"]
        print(f"{known} chapters were read before")
        for chapter in range(known + 1, CHAPTERS + 1):
            notes = {**state["notes"], f"chapter {chapter}": f"what chapter {chapter} says"}
            state.update(read=chapter, notes=notes)  # no save falls between the two
            if chapter == 8:
                state.save()  # before something that cannot be undone
            if chapter == 9 and is_first_time:
                cost = store.ops.health()
                print(f"a crash now would cost {cost.unsaved_changes} changes", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"{len(thread.load().state['notes'])} chapters have notes")
    store.close()


if __name__ == "__main__":
    main()
