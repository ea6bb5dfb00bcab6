"""What stays of runs and what goes, whether it is whole, and what a repair does about it."""
