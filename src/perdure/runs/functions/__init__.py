"""What is known of a user's function: its name, its arguments and their schemas, its rules. No I/O, no run."""
