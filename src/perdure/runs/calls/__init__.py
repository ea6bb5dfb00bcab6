"""The calls that code in a run can make and record: steps, effects, questions, messages, children, state."""
