"""The checklist of a deployment, and what to do about each line of it."""
