"""Working memory, what a model reads: conversations, prompts within a budget, scratchpads, shortened histories.

Built on threads, runs and `memory`. Its public names are those of `perdure.memory`.
"""
