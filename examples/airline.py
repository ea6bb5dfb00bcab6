"""A pretend airline: the outside world that examples/travel.py and examples/demo.py book with.

    python examples/airline.py                      # prints its url; ends with Ctrl-C, or when its input is closed
    python examples/airline.py --ignore-keys        # one that books the same key twice
    python examples/airline.py --sold-out "Grand Hotel Oslo" --delay-s 2

It is a process of its own, and keeps what it did in airline.db in the current directory: every request that it
received, and every booking. So the agent may die as often as it likes, and the ledger tells what really happened.
The server is in perdure.testing.fake_airline, where your tests find it too.
"""

from __future__ import annotations

from perdure.testing.fake_airline import main

if __name__ == "__main__":
    main()
