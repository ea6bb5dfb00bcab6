"""Looking back and starting again from there: states at a step, replays, forks, new code against old runs."""
