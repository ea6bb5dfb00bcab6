"""Change a state freely and let Perdure decide when to save it. After a kill, the agent resumes.

python examples/autosave.py        # reads nine chapters, then is killed in the middle of its notes
python examples/autosave.py        # the same line again: resumes from the last save, and ends
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
            state.update(read=chapter, notes=notes)  # saves both keys together
            if chapter == 8:
                state.save()  # save now, before a step that cannot be undone
            if chapter == 9 and is_first_time:
                cost = store.ops.health()
                print(f"a crash now would cost {cost.unsaved_changes} changes", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"{len(thread.load().state['notes'])} chapters have notes")
    store.close()


if __name__ == "__main__":
    main()
