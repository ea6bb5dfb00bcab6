"""The history of a run: its state at a step, replays, forks, and checks of new code against old runs."""
