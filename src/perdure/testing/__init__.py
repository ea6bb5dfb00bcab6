"""For tests of your own agents: the drill, a fake airline, child processes to be killed."""
