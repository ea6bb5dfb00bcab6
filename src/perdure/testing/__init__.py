"""Tools for tests of your own agents: the drill, a fake airline, child processes that tests kill, PostgreSQL."""
