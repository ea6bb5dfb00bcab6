"""Start, claim and execute runs in this process."""
