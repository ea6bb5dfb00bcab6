"""What code in a run calls, and what each call writes down: steps, effects, questions, messages, children, state."""
