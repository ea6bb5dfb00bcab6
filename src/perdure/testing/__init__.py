"""For tests of your own agents: the drill, a pretend airline, processes to be killed, a real PostgreSQL."""
